// LineEditor: one line from a person, with editing and history (libedit).
#pragma once

#include <string>

#include "tools/run/signals.h"

namespace quern {

class LineEditor {
  public:
    enum class End { line, interrupt, eof, terminated };

    /// `history_file`: read now, and each remembered line is appended; empty: none. Only its owner may read it.
    LineEditor(Signals& signals, const std::string& history_file);
    ~LineEditor();
    LineEditor(const LineEditor&) = delete;
    LineEditor& operator=(const LineEditor&) = delete;

    /// Line breaks of a pasted text stay in `line`; a typed one ends it. After Ctrl-C, `line` is what was typed so far.
    End read(const std::string& prompt, std::string& line);
    void remember(const std::string& line);

  private:
    struct State;
    State* state_;
};

}  // namespace quern
