// Printer: shows an answer while it arrives. Content goes to standard output; thinking, if shown, before it and dim. On a
// terminal, lines are broken between words, and Markdown is coloured if colours are on.
#pragma once

#include <string>

#include "models/chat_format.h"
#include "tools/common/output.h"
#include "tools/run/escape_filter.h"
#include "tools/run/markdown_style.h"
#include "tools/run/options.h"
#include "tools/run/word_wrap.h"

namespace quern {

class Printer {
  public:
    /// Thinking goes to standard output if that is a terminal, else to standard error.
    Printer(When thinking, When color);

    void reasoning(const std::string& text);
    void content(const std::string& text);
    void tool_call(const ToolCall& call);
    /// For programs: neither broken nor coloured.
    void verbatim(const std::string& text);
    /// Ends the answer: resets colours and closes the last line.
    void finish();
    /// The reader of standard output has gone.
    bool closed() const { return out_.closed(); }
    bool on_terminal() const { return terminal_; }
    /// Text of the program itself on standard error, dim if colours are on; its lines are continued below `indent` cells.
    void remark(const std::string& text, int indent = 0) const;

  private:
    /// With lines broken at the width that the terminal has now.
    std::string wrapped(const std::string& text);
    void begin_content();
    void end_part();
    void end_line();

    Output out_{1}, err_{2};
    EscapeFilter filter_;
    MarkdownStyle style_;
    bool terminal_, color_, show_thinking_;
    bool thinking_ = false;  // dim text is being printed
    WordWrap wrap_;
};

}  // namespace quern
