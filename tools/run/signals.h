// Signals of an interactive program: the first Ctrl-C asks, the second insists, and the terminal is always
// left as it was found.
#pragma once

namespace quern {

constexpr int kExitTruncated = 8;      // --fail-on-truncation
constexpr int kExitTimeout = 124;      // --timeout
constexpr int kExitInterrupted = 130;  // SIGINT
constexpr int kExitPipe = 141;         // SIGPIPE: the reader of stdout has gone
constexpr int kExitTerminated = 143;   // SIGTERM, SIGHUP

class Signals {
  public:
    /// Installs the handlers and remembers the terminal's settings. Until `polite(true)`, SIGINT and SIGTERM
    /// end the process at once. One instance at a time.
    Signals();
    /// Restores handlers and terminal.
    ~Signals();
    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

    /// True: signals only set what the functions below report, because someone looks at it; a second SIGINT
    /// or SIGTERM that nobody took still ends the process.
    void polite(bool on);
    /// Whether Ctrl-C came since the last call.
    bool take_interrupt();
    /// Ctrl-C came and was not taken yet.
    bool interrupted() const;
    /// 143 once SIGTERM or SIGHUP came, else 0.
    int terminated() const;
    bool take_resize();
    /// Ctrl-Z while `catch_stop`: the line editor has to leave the terminal in order before stopping.
    bool take_stop();
    void catch_stop(bool on);
    /// Becomes readable when a signal arrives.
    int wake_fd() const;
    /// Empties wake_fd.
    void drain();
    /// Stops the process as SIGTSTP does; returns when it is continued.
    void stop_self();
};

}  // namespace quern
