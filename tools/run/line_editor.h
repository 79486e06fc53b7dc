// LineEditor: one line from a person, with editing, history and completion (libedit), or from a pipe.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "tools/run/completion.h"
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

    /// A person types: there is somebody to ask.
    bool interactive() const;
    /// What Tab offers for a line up to the cursor; without it, Tab does nothing.
    void on_tab(std::function<Completion(std::string_view line)> complete);

    /// Without a terminal `prompt` is not shown. Line breaks of a pasted text stay in `line`; a typed one ends it. After Ctrl-C, `line` is what was typed so far.
    End read(const std::string& prompt, std::string& line);
    void remember(const std::string& line);

    struct State;

  private:
    State* state_;
};

}  // namespace quern
