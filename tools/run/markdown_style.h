// MarkdownStyle: Markdown on a terminal, lightly: headings and **strong** words bold, code cyan, quotes and fences dim.
// No character is added or removed but colours, so what is copied is what the model wrote.
#pragma once

#include <string>
#include <string_view>

namespace quern {

class MarkdownStyle {
  public:
    /// `text`: UTF-8 without escape sequences, cut anywhere. A few characters may be held back.
    std::string push(std::string_view text);
    /// What is held back, and the end of all colours.
    std::string finish();

  private:
    void begin_line(std::string& out, bool at_end);
    void in_line(char c, std::string& out);
    void end_stars(char next, std::string& out);
    void end_line(std::string& out);
    void set(std::string& out);

    std::string start_;  // of a line whose kind is not known yet
    std::string fence_;  // of the code block that is open
    bool at_start_ = true;
    int stars_ = 0;  // held back
    bool heading_ = false, dim_ = false, strong_ = false, code_ = false;
    char before_ = '\n';
    std::string colors_;  // in force
};

}  // namespace quern
