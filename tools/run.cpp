// quern run: load a checkpoint, then chat, answer once, or run token ids.
#include <unistd.h>

#include <limits>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "models/model.h"
#include "tools/commands.h"
#include "tools/loading.h"
#include "tools/run/answer.h"
#include "tools/run/input.h"

namespace quern {
namespace {

nlohmann::ordered_json read_tools(const std::string& path) {
    if (path.empty()) return {};
    const std::string text = read_input_file(path);
    parse_json(text, path, {.kind = ErrorKind::usage});  // the checks; the tree below keeps the order of keys
    nlohmann::ordered_json tools = nlohmann::ordered_json::parse(text);
    if (!tools.is_array()) FAIL(usage, "{}: tools should be a JSON array as in the OpenAI API", path);
    return tools;
}

void say_what_was_loaded(const RunContext& c) {
    const ModelInfo& i = c.engine.model().info();
    note(fmt::format("model     {} ({}, {})\nbackend   {}, {}\ncontext   {} tokens\nsettings\n{}", i.name,
                     i.architecture, i.formats, c.engine.backend().name(), c.engine.backend().description(),
                     c.engine.context(), describe(c.settings)));
}

EngineOptions engine_options(const RunOptions& o) {
    EngineOptions e{.context = o.context,
                    .sequences = 1,
                    .step_tokens = o.step_tokens,
                    .kv_type = o.kv_type,
                    .cache_bytes = o.cache_bytes};
    // Logits of a prompt come from the same steps as an answer without them.
    if (!o.logits_file.empty()) e.prompt_logits = std::numeric_limits<int64_t>::max();
    return e;
}

}  // namespace

int cmd_run(int argc, char** argv) {
    open_standard_descriptors();
    Signals signals;
    RunOptions options;
    if (!parse_run_options(argc, argv, options)) return 0;
    if (!options.system_file.empty()) options.system = read_input_file(options.system_file);
    const auto tools = read_tools(options.tools_file);

    LoadedModel loaded = load_and_start({.model = options.model,
                                         .synthetic = options.synthetic,
                                         .mix = options.mix,
                                         .gpu = options.gpu,
                                         .device = options.device,
                                         .threads = options.threads,
                                         .tokenizer = options.ids_file.empty(),
                                         .dense = options.dense,
                                         .engine = engine_options(options),
                                         .verbose = options.verbose});
    RunContext context{options, *loaded.engine, signals, default_settings(*loaded.model), tools};
    for (const auto& [name, value] : options.settings)
        set_value(context.settings, name, value, "--" + name, "flag");
    if (options.verbose) say_what_was_loaded(context);
    for (const std::string& text : loaded.model->notes())
        if (options.verbose || text.find("template") != std::string::npos) note("note: " + text + "\n");

    if (!options.ids_file.empty()) return run_ids(context);
    const bool prompt = (options.prompt && !options.chat) || !options.prompt_file.empty();
    const bool terminal = isatty(STDIN_FILENO) == 1;
    if (prompt || options.raw || options.json || !terminal) return run_one_shot(context);
    return run_repl(context);
}

}  // namespace quern
