#include "tools/run/line_editor.h"

#include <fcntl.h>
#include <histedit.h>
#include <poll.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <cwchar>
#include <deque>
#include <utility>

namespace quern {
namespace {

constexpr int kHistoryLines = 1000;
constexpr wchar_t kPastedBreak =
    L'\u23ce';  // stands for a line break of pasted text while the line is edited
constexpr const char* kPastedBreakUtf8 = "\xe2\x8f\x8e";
constexpr const char* kPasteOn = "\033[?2004h";
constexpr const char* kPasteOff = "\033[?2004l";
constexpr const char* kPasteBegin = "\033[200~";
constexpr const char* kPasteEnd = "\033[201~";

void replace_all(std::string& text, const std::string& from, const std::string& to) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
}

}  // namespace

struct LineEditor::State {
    explicit State(Signals& s) : signals(s) {}

    Signals& signals;
    EditLine* edit = nullptr;
    History* history = nullptr;
    std::FILE* screen = stdout;  // where the line is drawn
    HistEvent event{};
    std::string history_file, prompt;
    std::deque<wchar_t> ready;  // characters read but not yet given to the editor
    End end = End::line;
    bool listening = false;  // this line's reading has begun
    std::string cleared;     // what the line held when Ctrl-C came

    void draw(const char* text) const;
    void listen() const;
    void stop();
    bool read_byte(char& byte);
    bool read_paste();
    int next(wchar_t* out);
    bool decode(char first);
};

void LineEditor::State::draw(const char* text) const {
    std::fputs(text, screen);
    std::fflush(screen);
}

/// The terminal is in the editor's mode by now. That mode swaps CR and LF; a paste with CR LF then has two
/// line breaks for one, so it stops swapping here.
void LineEditor::State::listen() const {
    termios mode{};
    if (::tcgetattr(STDIN_FILENO, &mode) == 0) {
        mode.c_iflag &= ~static_cast<tcflag_t>(INLCR | ICRNL);
        ::tcsetattr(STDIN_FILENO, TCSANOW, &mode);
    }
    draw(kPasteOn);
}

/// Ctrl-Z: the shell gets the terminal as it was.
void LineEditor::State::stop() {
    draw(kPasteOff);
    el_set(edit, EL_PREP_TERM, 0);
    signals.stop_self();
    el_set(edit, EL_PREP_TERM, 1);
    listen();
    el_set(edit, EL_REFRESH);
}

/// Waits for a byte or a signal.
bool LineEditor::State::read_byte(char& byte) {
    while (true) {
        if (signals.terminated() != 0) {
            end = End::terminated;
            return false;
        }
        if (signals.take_interrupt()) {
            end = End::interrupt;
            const LineInfo* typed = el_line(edit);
            cleared.assign(typed->buffer, typed->lastchar);
            return false;
        }
        if (signals.take_stop()) stop();
        if (signals.take_resize()) el_resize(edit);
        pollfd waiting[2] = {{STDIN_FILENO, POLLIN, 0}, {signals.wake_fd(), POLLIN, 0}};
        if (::poll(waiting, 2, -1) < 0 && errno != EINTR) break;
        if (waiting[1].revents != 0) signals.drain();
        if (waiting[0].revents == 0) continue;
        const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
        if (n == 1) return true;
        if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        break;
    }
    end = End::eof;
    return false;
}

/// After ESC: either a bracketed paste, taken whole, or a key whose bytes go to the editor.
bool LineEditor::State::read_paste() {
    std::string head = "\033";
    while (std::strncmp(kPasteBegin, head.c_str(), head.size()) == 0 && head != kPasteBegin) {
        pollfd waiting{STDIN_FILENO, POLLIN, 0};
        if (head.size() == 1 && ::poll(&waiting, 1, 25) <= 0) break;  // the Esc key alone
        char byte;
        if (!read_byte(byte)) return false;
        head += byte;
    }
    if (head != kPasteBegin) {
        const char last = head.back();
        head.pop_back();
        for (char c : head) ready.push_back(c);
        return decode(last);  // Alt and a letter may be of several bytes
    }
    std::string text;
    while (!text.ends_with(kPasteEnd)) {
        char byte;
        if (!read_byte(byte)) return false;
        text += byte;
    }
    text.resize(text.size() - std::strlen(kPasteEnd));
    replace_all(text, "\r\n", "\n");
    std::mbstate_t mb{};
    for (size_t at = 0; at < text.size();) {
        wchar_t wide;
        const size_t n = std::mbrtowc(&wide, text.data() + at, text.size() - at, &mb);
        if (n == 0 || n > text.size()) {  // not a character: skip the byte
            mb = {};
            ++at;
            continue;
        }
        at += n;
        if (wide == L'\n' || wide == L'\r') wide = kPastedBreak;
        if (wide == L'\t') wide = L' ';
        const bool control = wide < 32 || (wide >= 127 && wide < 160);
        if (!control) ready.push_back(wide);
    }
    return true;
}

bool LineEditor::State::decode(char first) {
    std::mbstate_t mb{};
    wchar_t wide;
    size_t n = std::mbrtowc(&wide, &first, 1, &mb);
    for (int more = 0; n == static_cast<size_t>(-2) && more < 4; ++more) {
        char byte;
        if (!read_byte(byte)) return false;
        n = std::mbrtowc(&wide, &byte, 1, &mb);
    }
    if (n <= 1) ready.push_back(n == 0 ? L'\0' : wide);
    return true;
}

int LineEditor::State::next(wchar_t* out) {
    if (!std::exchange(listening, true)) listen();
    while (ready.empty()) {
        char byte;
        if (!read_byte(byte)) return -1;
        if (byte == '\033' ? !read_paste() : !decode(byte)) return -1;
    }
    *out = ready.front();
    ready.pop_front();
    return 1;
}

LineEditor::LineEditor(Signals& signals, const std::string& history_file) : state_(new State(signals)) {
    if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
    State& s = *state_;
    if (::isatty(STDOUT_FILENO) == 0) {  // stdout is for answers only
        std::FILE* terminal = std::fopen("/dev/tty", "we");
        s.screen = terminal != nullptr ? terminal : stderr;
    }
    s.edit = el_init("quern", stdin, s.screen, stderr);
    s.history = history_init();
    s.history_file = history_file;
    history(s.history, &s.event, H_SETSIZE, kHistoryLines);
    history(s.history, &s.event, H_SETUNIQUE, 1);
    el_set(s.edit, EL_CLIENTDATA, state_);
    el_set(s.edit, EL_EDITOR, "emacs");
    el_set(s.edit, EL_SIGNAL, 0);
    el_set(s.edit, EL_HIST, history, s.history);
    el_set(
        s.edit, EL_PROMPT, +[](EditLine* e) {
            State* state = nullptr;
            el_get(e, EL_CLIENTDATA, &state);
            return state->prompt.data();
        });
    el_set(
        s.edit, EL_GETCFN, +[](EditLine* e, wchar_t* c) {
            State* state = nullptr;
            el_get(e, EL_CLIENTDATA, &state);
            return state->next(c);
        });
    el_source(s.edit, nullptr);  // ~/.editrc
    if (!history_file.empty()) history(s.history, &s.event, H_LOAD, history_file.c_str());
}

LineEditor::~LineEditor() {
    history_end(state_->history);
    el_end(state_->edit);
    if (state_->screen != stdout && state_->screen != stderr) std::fclose(state_->screen);
    delete state_;
}

LineEditor::End LineEditor::read(const std::string& prompt, std::string& line) {
    State& s = *state_;
    s.prompt = prompt;
    s.end = End::line;
    s.signals.polite(true);
    s.signals.catch_stop(true);
    s.listening = false;
    s.cleared.clear();
    int count = 0;
    const char* text = el_gets(s.edit, &count);
    s.draw(kPasteOff);
    s.signals.catch_stop(false);
    if (text == nullptr || count <= 0) {
        const End end = s.end == End::line ? End::eof : s.end;
        if (end == End::interrupt) {
            s.ready.clear();
            el_reset(s.edit);
            line = s.cleared;
        }
        s.draw("\n");
        return end;
    }
    line.assign(text, static_cast<size_t>(count));
    while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
    replace_all(line, kPastedBreakUtf8, "\n");
    return End::line;
}

void LineEditor::remember(const std::string& line) {
    State& s = *state_;
    std::string entry = line;
    replace_all(entry, "\n", kPastedBreakUtf8);
    history(s.history, &s.event, H_ENTER, entry.c_str());
    if (s.history_file.empty()) return;
    // Made here so that it is never readable by others; a directory or a link elsewhere is left alone.
    const int fd = ::open(s.history_file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return;
    ::fchmod(fd, 0600);
    ::close(fd);
    history(s.history, &s.event, H_SAVE, s.history_file.c_str());
}

}  // namespace quern
