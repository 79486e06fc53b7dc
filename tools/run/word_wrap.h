// WordWrap: breaks lines between words, so that a terminal does not break them within words.
#pragma once

#include <string>
#include <string_view>

namespace quern {

class WordWrap {
  public:
    /// `columns`: cells of a line; 0: nothing is broken. `indent`: cells before continued lines, at least.
    explicit WordWrap(int columns, int indent = 0) : columns_(columns), least_indent_(indent) {}

    /// UTF-8 text in pieces cut anywhere, with CSI ... m for colours. The word at its end is held back. Lines that
    /// continue one that is indented, or begins like an item of a list, are indented like its text. Between lines that
    /// begin with ``` or ~~~ nothing is broken. Words wider than a line are left to the terminal.
    std::string push(std::string_view text);
    /// What is held back.
    std::string finish();
    /// The lines from here on, the one that is begun included, have so many cells. Nothing happens where nothing is broken,
    /// or with 0.
    void resize(int columns);

  private:
    void take(std::string_view character, std::string& out);
    void end_word(std::string& out);
    void end_line(std::string& out);
    void note_first_word(int width);

    int columns_, least_indent_;
    std::string part_;    // of a character or an escape sequence
    std::string blanks_;  // after the last word written
    std::string word_;
    int column_ = 0, indent_ = 0;
    bool first_ = true;  // no word was written on this line
    bool code_ = false;
};

/// A whole text; continued lines are indented by `indent` cells.
std::string wrap_text(const std::string& text, int columns, int indent = 0);

}  // namespace quern
