#include "tools/run/printer.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "tools/run/text_width.h"

namespace quern {
namespace {

bool want_color(When when, bool terminal) {
    if (when != When::automatic) return when == When::always;
    const char* term = std::getenv("TERM");
    const char* no_color = std::getenv("NO_COLOR");
    return terminal && (no_color == nullptr || *no_color == 0) && term != nullptr &&
           std::strcmp(term, "dumb") != 0;
}

}  // namespace

Printer::Printer(When thinking, When color)
    : terminal_(out_.is_terminal()),
      color_(want_color(color, terminal_)),
      show_thinking_(thinking == When::always || (thinking == When::automatic && terminal_)),
      wrap_(terminal_ ? terminal_columns(STDOUT_FILENO) : 0) {}

std::string Printer::wrapped(const std::string& text) {
    wrap_.resize(terminal_columns(STDOUT_FILENO));  // windows are resized while answers arrive
    return wrap_.push(text);
}

void Printer::reasoning(const std::string& text) {
    if (!show_thinking_) return;
    if (!terminal_) {
        thinking_ = true;
        err_.write(text);
        return;
    }
    if (!thinking_ && color_) out_.write("\033[2m");
    thinking_ = true;
    out_.write(wrapped(filter_.push(text)));
}

void Printer::begin_content() {
    if (!thinking_) return;
    thinking_ = false;
    if (!terminal_) {
        err_.write("\n");
        return;
    }
    end_part();
    out_.write(wrap_.push(color_ ? "\033[0m\n\n" : "\n\n"));
}

/// What a model writes may hold terminal escapes; a pipe gets it as it is.
void Printer::content(const std::string& text) {
    begin_content();
    if (!terminal_) {
        out_.write(text);
        return;
    }
    const std::string harmless = filter_.push(text);
    out_.write(wrapped(color_ ? style_.push(harmless) : harmless));
}

/// Writes what was held back.
void Printer::end_part() {
    filter_.reset();
    const std::string rest = style_.finish();
    out_.write(wrap_.push(rest) + wrap_.finish());
}

void Printer::end_line() {
    end_part();
    if (out_.last() != '\n') out_.write(wrap_.push("\n"));
}

void Printer::verbatim(const std::string& text) { out_.write(terminal_ ? filter_.push(text) : text); }

void Printer::tool_call(const ToolCall& call) {
    begin_content();
    end_line();
    const nlohmann::ordered_json line = {
        {"tool_call", {{"name", call.name}, {"arguments", nlohmann::ordered_json::parse(call.arguments)}}}};
    out_.write(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void Printer::finish() {
    begin_content();
    end_line();
}

void Printer::remark(const std::string& text, int indent) const {
    const std::string wrapped = wrap_text(text, terminal_columns(STDERR_FILENO), indent);
    const bool dim = color_ && isatty(STDERR_FILENO) == 1;
    note(dim ? "\033[2m" + wrapped + "\033[0m\n" : wrapped + "\n");
}

}  // namespace quern
