#include "tools/run/signals.h"

#include <fcntl.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "ggml-like/check.h"

namespace quern {
namespace {

// What a handler may touch: lock-free atomics and memory set before the handlers were installed.
std::atomic<bool> g_polite{false};
std::atomic<int> g_interrupts{0};
std::atomic<int> g_terminations{0};
std::atomic<bool> g_resized{false};
std::atomic<bool> g_stopped{false};
std::atomic<bool> g_quiet{false};
int g_wake[2] = {-1, -1};
termios g_terminal;
int g_terminal_fd = -1;

constexpr int kHandled[] = {SIGINT, SIGTERM, SIGHUP, SIGWINCH, SIGCONT, SIGPIPE};
struct sigaction g_previous[std::size(kHandled)];

void restore_terminal() {
    if (g_terminal_fd < 0) return;
    // A background process that sets the terminal would be stopped by SIGTTOU.
    struct sigaction ignore {};
    ignore.sa_handler = SIG_IGN;
    struct sigaction before {};
    ::sigaction(SIGTTOU, &ignore, &before);
    ::tcsetattr(g_terminal_fd, TCSANOW, &g_terminal);
    ::sigaction(SIGTTOU, &before, nullptr);
}

[[noreturn]] void leave_now(int code) {
    static constexpr char kPasteOff[] = "\033[?2004l";
    if (g_terminal_fd >= 0) {
        const int fd = ::isatty(STDERR_FILENO) != 0 ? STDERR_FILENO : g_terminal_fd;
        [[maybe_unused]] const ssize_t n = ::write(fd, kPasteOff, sizeof kPasteOff - 1);
    }
    restore_terminal();
    ::_exit(code);
}

/// Only in the foreground: elsewhere the terminal is somebody else's. Safe in handlers.
void show_typing(bool on) {
    termios mode{};
    if (g_terminal_fd < 0 || ::tcgetpgrp(g_terminal_fd) != ::getpgrp()) return;
    if (::tcgetattr(g_terminal_fd, &mode) != 0) return;
    const auto echo = static_cast<tcflag_t>(ECHO);
    mode.c_lflag = on ? mode.c_lflag | (g_terminal.c_lflag & echo) : mode.c_lflag & ~echo;
    ::tcsetattr(g_terminal_fd, TCSANOW, &mode);
}

void wake() { [[maybe_unused]] const ssize_t n = ::write(g_wake[1], "s", 1); }

void on_signal(int signal) {
    const int saved = errno;
    switch (signal) {
        case SIGINT:
            if (!g_polite || ++g_interrupts > 1) leave_now(kExitInterrupted);
            break;
        case SIGTERM:
        case SIGHUP:
            if (!g_polite || ++g_terminations > 1) leave_now(kExitTerminated);
            break;
        case SIGWINCH:
            g_resized = true;
            break;
        case SIGTSTP:
            g_stopped = true;
            break;
        case SIGCONT:  // after a stop that could not be caught, or in the foreground at last
            if (g_quiet) show_typing(false);
            break;
        default:
            break;
    }
    wake();
    errno = saved;
}

void set_handler(int signal, void (*handler)(int), struct sigaction* previous) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;  // wake_fd interrupts waits; system calls elsewhere should not fail
    sigfillset(&action.sa_mask);
    ::sigaction(signal, &action, previous);
}

/// Ctrl-Z while the terminal is quiet: the shell gets it as it was.
void stop_aloud(int signal) {
    // A session's leader has no shell to come back to, and would not be stopped: the terminal stays as it is.
    if (::getsid(0) == ::getpid()) return;
    const int saved = errno;
    show_typing(true);
    set_handler(signal, SIG_DFL, nullptr);
    ::raise(signal);
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, signal);
    ::pthread_sigmask(SIG_UNBLOCK, &only, nullptr);  // stops here
    ::pthread_sigmask(SIG_BLOCK, &only, nullptr);
    if (g_quiet) {  // the answer may have ended meanwhile
        set_handler(signal, stop_aloud, nullptr);
        show_typing(false);
    }
    errno = saved;
}

}  // namespace

Signals::Signals() {
    if (::pipe(g_wake) != 0) FAIL(runtime, "cannot make a pipe for signals: too many open files?");
    for (int fd : g_wake) {
        ::fcntl(fd, F_SETFL, O_NONBLOCK);
        ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    }
    if (::isatty(STDIN_FILENO) != 0 && ::tcgetattr(STDIN_FILENO, &g_terminal) == 0)
        g_terminal_fd = STDIN_FILENO;
    for (size_t i = 0; i < std::size(kHandled); ++i) {
        struct sigaction current {};
        ::sigaction(kHandled[i], nullptr, &current);
        g_previous[i] = current;
        // nohup and shells that run jobs without control mean it when they ignore a signal.
        const bool keep = current.sa_handler == SIG_IGN && (kHandled[i] == SIGINT || kHandled[i] == SIGHUP);
        if (!keep) set_handler(kHandled[i], kHandled[i] == SIGPIPE ? SIG_IGN : on_signal, nullptr);
    }
}

Signals::~Signals() {
    for (size_t i = 0; i < std::size(kHandled); ++i) ::sigaction(kHandled[i], &g_previous[i], nullptr);
    catch_stop(false);
    g_quiet = false;
    restore_terminal();
    g_terminal_fd = -1;
    g_polite = false;
    g_interrupts = 0;
    g_terminations = 0;
    for (int& fd : g_wake) {
        ::close(fd);
        fd = -1;
    }
}

void Signals::polite(bool on) { g_polite = on; }
bool Signals::take_interrupt() { return g_interrupts.exchange(0) > 0; }
bool Signals::interrupted() const { return g_interrupts > 0; }
int Signals::terminated() const { return g_terminations > 0 ? kExitTerminated : 0; }
bool Signals::take_resize() { return g_resized.exchange(false); }
bool Signals::take_stop() { return g_stopped.exchange(false); }
int Signals::wake_fd() const { return g_wake[0]; }

void Signals::catch_stop(bool on) { set_handler(SIGTSTP, on ? on_signal : SIG_DFL, nullptr); }

void Signals::quiet(bool on) {
    if (g_terminal_fd < 0) return;
    g_quiet = on;
    set_handler(SIGTSTP, on ? stop_aloud : SIG_DFL, nullptr);
    show_typing(!on);
}

void Signals::drain() {
    char bytes[64];
    while (::read(g_wake[0], bytes, sizeof bytes) > 0) {
    }
}

void Signals::stop_self() {
    set_handler(SIGTSTP, SIG_DFL, nullptr);
    ::raise(SIGTSTP);
    set_handler(SIGTSTP, on_signal, nullptr);
}

}  // namespace quern
