// ToolCommand: calls of tools are answered by a program (--tool-cmd), after a person has agreed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "models/chat_format.h"
#include "tools/run/signals.h"

namespace quern {

class ToolCommand {
  public:
    /// `program`: a path, or a name that is looked for in PATH. Throws Error(usage) if it cannot be run. `agree` is
    /// told what is to be run, and says whether it may.
    ToolCommand(const std::string& program, Signals& signals,
                std::function<bool(const std::string& what)> agree);

    /// Messages with the results of all calls, in their order. A call that was not agreed to has a result that says so;
    /// `declined` is set then.
    std::vector<Message> answer(const std::vector<ToolCall>& calls, bool& declined) const;

  private:
    std::string run(const ToolCall& call) const;

    std::string program_;
    Signals& signals_;
    std::function<bool(const std::string&)> agree_;
};

}  // namespace quern
