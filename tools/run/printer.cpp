#include "tools/run/printer.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

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
      show_thinking_(thinking == When::always || (thinking == When::automatic && terminal_)) {}

/// What a model writes may hold terminal escapes; a pipe gets it as it is.
void Printer::write(Output& to, EscapeFilter& filter, const std::string& text) {
    to.write(to.is_terminal() ? filter.push(text) : text);
}

void Printer::reasoning(const std::string& text) {
    if (!show_thinking_) return;
    Output& to = terminal_ ? out_ : err_;
    if (!thinking_ && color_) to.write("\033[2m");
    thinking_ = true;
    write(to, thinking_filter_, text);
}

void Printer::begin_content() {
    if (!thinking_) return;
    thinking_ = false;
    Output& to = terminal_ ? out_ : err_;
    thinking_filter_.reset();
    if (color_) to.write("\033[0m");
    to.write(terminal_ ? "\n\n" : "\n");
}

void Printer::content(const std::string& text) {
    begin_content();
    write(out_, out_filter_, text);
}

void Printer::tool_call(const ToolCall& call) {
    begin_content();
    if (out_.last() != '\n') out_.write("\n");
    const nlohmann::ordered_json line = {
        {"tool_call", {{"name", call.name}, {"arguments", nlohmann::ordered_json::parse(call.arguments)}}}};
    out_.write(line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void Printer::finish() {
    begin_content();
    out_filter_.reset();
    if (out_.last() != '\n') out_.write("\n");
}

void Printer::remark(const std::string& text) const {
    const bool dim = color_ && isatty(STDERR_FILENO) == 1;
    note(dim ? "\033[2m" + text + "\033[0m\n" : text + "\n");
}

}  // namespace quern
