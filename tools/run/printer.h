// Printer: shows an answer while it arrives. Content goes to standard output; thinking, if shown, before it and dim.
#pragma once

#include <string>

#include "models/chat_format.h"
#include "tools/common/output.h"
#include "tools/run/escape_filter.h"
#include "tools/run/options.h"

namespace quern {

class Printer {
  public:
    /// Thinking goes to standard output if that is a terminal, else to standard error.
    Printer(When thinking, When color);

    void reasoning(const std::string& text);
    void content(const std::string& text);
    void tool_call(const ToolCall& call);
    /// Ends the answer: resets colours and closes the last line.
    void finish();
    /// The reader of standard output has gone.
    bool closed() const { return out_.closed(); }
    bool on_terminal() const { return terminal_; }
    /// Text of the program itself on standard error, dim if colours are on.
    void remark(const std::string& text) const;

  private:
    void write(Output& to, EscapeFilter& filter, const std::string& text);
    void begin_content();

    Output out_{1}, err_{2};
    EscapeFilter out_filter_, thinking_filter_;
    bool terminal_, color_, show_thinking_;
    bool thinking_ = false;  // dim text is being printed
};

}  // namespace quern
