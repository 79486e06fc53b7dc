// quern: runs Qwen3.6 NVFP4 checkpoints. This file is the table of subcommands and the last catch.
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include "ggml-like/check.h"
#include "tools/commands.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/output.h"

namespace quern {
namespace {

struct Command {
    const char* name;
    const char* summary;
    int (*func)(int argc, char** argv);
};

constexpr Command kCommands[] = {
    {"run", "chat with a checkpoint, or answer one prompt", cmd_run},
    {"serve", "answer many clients through the OpenAI and Anthropic APIs", cmd_serve},
    {"bench", "measure prompt and answer speed", cmd_bench},
    {"quantize-inspect", "list a checkpoint's tensors and check that every byte is accounted for",
     cmd_quantize_inspect},
};

std::string help() {
    std::string out =
        "quern " QUERN_VERSION ": runs Qwen3.6 NVFP4 checkpoints\n\nUsage: quern COMMAND [FLAGS]\n\n";
    for (const Command& command : kCommands) out += fmt::format("  {:18}{}\n", command.name, command.summary);
    return out + "\nquern COMMAND --help lists the flags. First try: quern run\n";
}

int dispatch(int argc, char** argv) {
    const std::string name = argc > 1 ? argv[1] : "";
    if (name == "--version") return print("quern " QUERN_VERSION "\n"), 0;
    if (name == "--help" || name == "-h" || name == "help") return print(help()), 0;
    if (name.empty()) {
        std::fputs(help().c_str(), stderr);
        return static_cast<int>(ErrorKind::usage);
    }
    std::vector<std::string> names;
    for (const Command& command : kCommands) {
        if (name == command.name) return command.func(argc - 1, argv + 1);
        names.push_back(command.name);
    }
    FAIL(usage, "unknown command '{}'{} (quern --help lists them)", printable(name),
         did_you_mean(name, names));
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) {
    // What the text of an error names may come from a hostile file: no control characters to the terminal.
    const auto report = [](const char* text) {
        std::fprintf(stderr, "quern: error: %s\n", quern::printable_lines(text, 4000).c_str());
    };
    try {
        return quern::dispatch(argc, argv);
    } catch (const quern::Error& error) {
        report(quern::in_typed_names(error.what()).c_str());
        return error.exit_code();
    } catch (const std::bad_alloc&) {
        report("out of memory");
        return static_cast<int>(quern::ErrorKind::memory);
    } catch (const std::exception& error) {
        report(error.what());
        return static_cast<int>(quern::ErrorKind::runtime);
    }
}
