#include "tools/run/line_editor.h"

#include <fcntl.h>
#include <histedit.h>
#include <poll.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <cwchar>
#include <deque>
#include <utility>

#include "tools/run/pasted.h"
#include "tools/run/text_width.h"
#include "tools/run/word_wrap.h"

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

using Editor = LineEditor::State;

Editor& state_of(EditLine* e) {
    Editor* state = nullptr;
    el_get(e, EL_CLIENTDATA, &state);
    return *state;
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
    bool terminal = ::isatty(STDIN_FILENO) == 1;
    bool listening = false;  // this line's reading has begun
    std::string cleared;     // what the line held when Ctrl-C came
    PastedTexts pasted;
    std::string recalled;  // an entry of the history, as it is shown
    std::function<Completion(std::string_view)> complete;

    void draw(const char* text) const;
    void listen() const;
    void stop();
    bool read_byte(char& byte);
    bool read_paste();
    int next(wchar_t* out);
    bool decode(char first);
    void insert(const std::string& text);
    End read_plain(std::string& line);
    unsigned char tab();
    void list(const std::vector<std::string>& words) const;
    void bind_keys();
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
            if (terminal) {
                const LineInfo* typed = el_line(edit);
                cleared.assign(typed->buffer, typed->lastchar);
            }
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
    replace_all(text, "\r", "\n");
    insert(pasted.fold(text));
    return true;
}

/// As if it were typed, but for controls, which are no keys.
void LineEditor::State::insert(const std::string& text) {
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
        if (wide == L'\n') wide = kPastedBreak;
        if (wide == L'\t') wide = L' ';
        const bool control = wide < 32 || (wide >= 127 && wide < 160);
        if (!control) ready.push_back(wide);
    }
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

namespace {

/// The history for libedit: long entries are folded like pasted text.
int recall(void* data, HistEvent* event, int op, ...) {
    va_list arguments;
    va_start(arguments, op);
    void* argument = va_arg(arguments, void*);
    va_end(arguments);
    Editor& s = *static_cast<Editor*>(data);
    const int result = history(s.history, event, op, argument);
    const bool entry = op == H_FIRST || op == H_LAST || op == H_PREV || op == H_NEXT || op == H_CURR;
    if (result < 0 || !entry || event->str == nullptr) return result;
    std::string text = event->str;
    replace_all(text, kPastedBreakUtf8, "\n");
    s.recalled = s.pasted.fold(text);
    replace_all(s.recalled, "\n", kPastedBreakUtf8);
    event->str = s.recalled.c_str();
    return result;
}

std::wstring_view text_of(const LineInfoW& line) {
    return {line.buffer, static_cast<size_t>(line.lastchar - line.buffer)};
}

/// The label of a pasted text goes as one.
bool delete_label(EditLine* e) {
    const LineInfo* line = el_line(e);
    const std::string before(line->buffer, line->cursor);
    const size_t length = state_of(e).pasted.label_at_end(before);
    if (length > 0) el_deletestr(e, static_cast<int>(length));
    return length > 0;
}

/// Moves the cursor over one character as people see it, or deletes that.
template <bool Forward, bool Delete>
unsigned char step(EditLine* e, wint_t) {
    const LineInfoW& line = *el_wline(e);
    const auto at = static_cast<size_t>(line.cursor - line.buffer);
    const size_t to = Forward ? next_grapheme(text_of(line), at) : previous_grapheme(text_of(line), at);
    if (to == at) return CC_ERROR;
    if (Delete && !Forward && delete_label(e)) return CC_REFRESH;
    const int count = static_cast<int>(Forward ? to - at : at - to);
    if (Forward || !Delete) el_cursor(e, Forward ? count : -count);
    if (Delete) el_deletestr(e, count);
    return Delete ? CC_REFRESH : CC_CURSOR;
}

}  // namespace

/// Completes the word before the cursor; where several fit, as far as they agree, and then lists them.
unsigned char LineEditor::State::tab() {
    if (!complete) return CC_ERROR;
    const LineInfo* line = el_line(edit);
    const std::string before(line->buffer, line->cursor);
    const Completion found = complete(before);
    if (found.words.empty()) return CC_ERROR;
    const bool one = found.words.size() == 1;
    std::string more = common_prefix(found.words).substr(before.size() - found.from);
    if (one && !found.words[0].ends_with('/')) more += " ";
    if (!more.empty()) return el_insertstr(edit, more.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
    list(found.words);
    return CC_REDISPLAY;
}

void LineEditor::State::list(const std::vector<std::string>& words) const {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : "  ") + word;
    draw(("\r\n" + wrap_text(text, terminal_columns(STDIN_FILENO)) + "\r\n").c_str());
}

void LineEditor::State::bind_keys() {
    using Function = unsigned char (*)(EditLine*, wint_t);
    // Wide: libedit copies names that are not, and never frees the copies.
    const auto key = [this](const wchar_t* name, Function function,
                            std::initializer_list<const wchar_t*> keys) {
        el_wset(edit, EL_ADDFN, name, name, function);
        for (const wchar_t* one : keys) el_wset(edit, EL_BIND, one, name, nullptr);
    };
    key(L"quern-tab", [](EditLine* e, wint_t) { return state_of(e).tab(); }, {L"^I"});
    key(L"quern-left", step<false, false>, {L"^B", L"\\e[D", L"\\eOD"});
    key(L"quern-right", step<true, false>, {L"^F", L"\\e[C", L"\\eOC"});
    key(L"quern-backspace", step<false, true>, {L"^H", L"^?"});
    key(L"quern-delete", step<true, true>, {L"\\e[3~"});
}

LineEditor::End LineEditor::State::read_plain(std::string& line) {
    line.clear();
    char byte;
    while (read_byte(byte)) {
        if (byte == '\n') return End::line;
        line += byte;
    }
    return end == End::eof && !line.empty() ? End::line : end;
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
    el_set(s.edit, EL_HIST, recall, state_);
    el_set(
        s.edit, EL_PROMPT, +[](EditLine* e) { return state_of(e).prompt.data(); });
    el_set(
        s.edit, EL_GETCFN, +[](EditLine* e, wchar_t* c) { return state_of(e).next(c); });
    s.bind_keys();
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
    if (!s.terminal) return s.read_plain(line);
    s.pasted.clear();
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
    line = s.pasted.unfold(std::move(line));
    return End::line;
}

bool LineEditor::interactive() const { return state_->terminal; }

void LineEditor::on_tab(std::function<Completion(std::string_view line)> complete) {
    state_->complete = std::move(complete);
}

void LineEditor::remember(const std::string& line) {
    State& s = *state_;
    if (!s.terminal) return;
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
