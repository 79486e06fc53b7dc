// One answer of `quern run`: printed as it comes, then summed up in a line of numbers.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/common/settings.h"
#include "tools/engine/chat_session.h"
#include "tools/run/options.h"
#include "tools/run/printer.h"
#include "tools/run/signals.h"
#include "tools/run/tool_command.h"

namespace quern {

/// What all ways of running share.
struct RunContext {
    const RunOptions& options;
    Engine& engine;
    Signals& signals;
    Settings settings;
    nlohmann::ordered_json tools;
    std::shared_ptr<const Grammar> grammar = nullptr;  // --json-schema or --grammar
};

/// For --timeout. Seconds count from the start of the process.
class Deadline {
  public:
    explicit Deadline(double seconds);  // 0: never
    bool passed() const;

  private:
    double end_;
};

/// Says `what`, asks `question` and returns the line that a person typed; empty: nobody is there.
using AskPerson = std::function<std::string(const std::string& what, const std::string& question)>;
bool is_yes(const std::string& said);
/// What answers calls of tools, if --tool-cmd names it.
std::optional<ToolCommand> tool_command(RunContext& context, AskPerson ask);
/// After an answer: whether its calls were run, and their results added to `messages`, so that the model should go on.
bool run_tools(const std::optional<ToolCommand>& command, const ChatAnswer& answer,
               std::vector<Message>& messages);

/// The engine's settings for the next answer; draws a new seed if none was fixed.
ChatSettings chat_settings(RunContext& context);

/// "18 prompt tokens in 0.03 s (600/s), 42 tokens at 300.1/s, stop, context 60 of 2048, seed 7"
std::string stats_line(const ChatAnswer& answer, const RunContext& context);

/// The object that --format json prints.
nlohmann::ordered_json answer_json(const ChatAnswer& answer, const RunContext& context);

/// Exit code of a single answer: 0, 1 (error), 8 (cut off, if asked for), 130, 141, 143.
int exit_code(const ChatAnswer& answer, const RunContext& context, const Printer& printer);

/// -p, -f or a pipe: answers once.
int run_one_shot(RunContext& context);
/// --ids: token ids in and out.
int run_ids(RunContext& context);
/// A chat on a terminal.
int run_repl(RunContext& context);

}  // namespace quern
