// quern run: load a checkpoint, then chat, answer once, or run token ids.
#include <unistd.h>

#include <limits>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "models/model.h"
#include "tools/commands.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/command.h"
#include "tools/common/fields.h"
#include "tools/common/loading.h"
#include "tools/common/messages.h"
#include "tools/run/answer.h"
#include "tools/run/input.h"

namespace quern {
namespace {

nlohmann::ordered_json read_tools_file(const std::string& path) {
    if (path.empty()) return {};
    const auto tools = parse_json_ordered(read_input_file(path), path, {.kind = ErrorKind::usage});
    try {
        return read_tools(tools);
    } catch (const FieldError& error) {
        FAIL(usage, "{}: {}", path, error.what());
    }
}

/// Null: answers may be anything. Says what of a schema is not enforced.
std::shared_ptr<const Grammar> read_grammar(const RunOptions& o) {
    if (!o.grammar_file.empty()) return Grammar::gbnf(read_input_file(o.grammar_file));
    if (o.json_schema.empty()) return nullptr;
    const bool inline_text = o.json_schema.find_first_of("{") == o.json_schema.find_first_not_of(" \t\r\n");
    const std::string what = inline_text ? "--json-schema" : o.json_schema;
    const std::string text = inline_text ? o.json_schema : read_input_file(o.json_schema);
    auto grammar = Grammar::json(parse_json_ordered(text, what, {.kind = ErrorKind::usage}));
    for (const std::string& place : grammar->not_enforced())
        note(fmt::format("note: of the schema, {} is not enforced\n", printable(place, 200)));
    return grammar;
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
                    .kv_type_v = o.kv_type_v,
                    .cache_bytes = o.cache_bytes,
                    .speculation = o.speculation,
                    .image_min_tokens = o.vision.min_tokens,
                    .image_max_tokens = o.vision.max_tokens};
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
    const auto tools = read_tools_file(options.tools_file);
    const auto grammar = read_grammar(options);

    const LoadOptions load{.model = options.model,
                           .synthetic = options.synthetic,
                           .mix = options.mix,
                           .gpu = options.gpu,
                           .devices = options.devices,
                           .threads = options.threads,
                           .tokenizer = options.ids_file.empty() || options.doctor.wanted,
                           .dense = options.dense,
                           .engine = engine_options(options),
                           .vision = options.vision.on,
                           .vision_format = options.vision.format,
                           .allow_loss = options.allow_loss,
                           .verbose = options.verbose};
    if (options.doctor.wanted) return run_doctor(load, options.doctor);
    LoadedModel loaded = load_and_start(load);
    RunContext context{options, *loaded.engine, signals, default_settings(*loaded.model), tools, grammar};
    for (const auto& [name, value] : options.settings)
        set_value(context.settings, name, value, "--" + name, "flag");
    if (options.verbose) say_what_was_loaded(context);
    for (const std::string& text : loaded.model->notes())
        if (!options.verbose && text.find("template") != std::string::npos) note("note: " + text + "\n");

    if (!options.ids_file.empty()) return run_ids(context);
    const bool prompt = (options.prompt && !options.chat) || !options.prompt_file.empty();
    const bool terminal = isatty(STDIN_FILENO) == 1;
    if (prompt || options.raw || options.json || (!terminal && !options.chat)) return run_one_shot(context);
    return run_repl(context);
}

}  // namespace quern
