#include "tools/run/options.h"

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/command.h"
#include "tools/common/kv_flags.h"
#include "tools/common/settings.h"
#include "tools/common/speculation_flags.h"

namespace quern {
namespace {

constexpr const char* kFooter =
    R"(Numbers may have a suffix: k = 1000, M = 1000000, Ki = 1024, Mi = 1048576. The last of repeated flags wins.
QUERN_ARG_CTX_SIZE=8k in the environment does what --ctx-size 8k does; the command line wins.

Standard output carries only the answer. Everything else, thinking too when it is not a terminal, goes to
standard error. Text on standard input is the prompt, or follows the prompt of -p after an empty line.

Exit codes:
    0  ok                                   6  the prompt is longer than the context
    1  failed while running                 8  the answer was cut by a limit, with --fail-on-truncation
    2  the command line is wrong          124  --timeout
    3  the checkpoint is not valid        130  Ctrl-C
    4  does not fit in memory             141  the reader of standard output has gone
    5  no suitable GPU                    143  SIGTERM

Examples:
    quern run                                       chat with the demo checkpoint
    quern run -m DIR -p "What is a quern?"          one answer
    git diff | quern run -m DIR -p "Review this:"   prompt, empty line, standard input)";

When parse_when(const std::string& value, const std::string& flag) {
    if (value == "auto") return When::automatic;
    if (value == "always" || value == "on") return When::always;
    if (value == "never" || value == "off") return When::never;
    FAIL(usage, "{}: expected auto, always or never, found '{}'", flag, printable(value));
}

// The names of the template that mean something here; anything else would be ignored silently.
void apply_template_kwargs(const std::string& text, RunOptions& o) {
    const nlohmann::json object =
        parse_json(text, "--chat-template-kwargs", {.max_depth = 4, .kind = ErrorKind::usage});
    if (!object.is_object()) FAIL(usage, "--chat-template-kwargs: expected a JSON object");
    for (const auto& [key, value] : object.items()) {
        const bool known =
            key == "enable_thinking" || key == "preserve_thinking" || key == "reasoning_effort";
        if (!known)
            FAIL(usage, "--chat-template-kwargs: '{}' is not supported{}", printable(key),
                 did_you_mean(key, {"enable_thinking", "preserve_thinking", "reasoning_effort"}));
        if (key == "reasoning_effort") {
            const auto effort = value.is_string() ? parse_effort(value.get<std::string>()) : std::nullopt;
            if (!effort) FAIL(usage, "--chat-template-kwargs: reasoning_effort must be {}", kEffortNames);
            o.effort = *effort;
            continue;
        }
        if (!value.is_boolean()) FAIL(usage, "--chat-template-kwargs: {} must be true or false", key);
        if (key == "preserve_thinking") o.preserve_thinking = value.get<bool>();
        if (key == "enable_thinking") o.settings.emplace_back("think", value.get<bool>() ? "on" : "off");
    }
}

class Builder {
  public:
    Builder(ArgParser& parser, RunOptions& options) : parser_(parser), o_(options) {}

    void add_all() {
        model();
        add_speculation_flags(parser_, o_.speculation);
        add_vision_flags(parser_, o_.vision);
        prompt();
        sampling();
        thinking();
        output();
        ids();
        add_doctor_flags(parser_, o_.doctor);
        accepted();
        parser_.footer(kFooter);
    }

    /// After the parse: applies flags that change others.
    void finish() {
        check_doctor_flags(o_.doctor);
        if (o_.devices.named() && o_.gpu == GpuOptions::automatic) o_.gpu = GpuOptions::all;
    }

  private:
    void text(const std::string& names, const std::string& value, const std::string& help, std::string& out) {
        parser_.value(names, value, help, [&out](const std::string& v) { out = v; });
    }
    void setting(const std::string& names, const std::string& value, const std::string& help,
                 const std::string& name) {
        const std::string shown = names.substr(0, names.find(','));
        parser_.values(names, value, help, [this, name, shown](const std::string& v) {
            Settings scratch;
            set_value(scratch, name, v, shown, "");  // wrong values are found before the model is loaded
            o_.settings.emplace_back(name, v);
        });
    }
    void toggle(const std::string& names, const std::string& help, bool& out) {
        parser_.toggle(names, help, [&out](bool v) { out = v; });
    }
    void when(const std::string& names, const std::string& help, When& out) {
        parser_.value(names, "WHEN", help,
                      [&out, names](const std::string& v) { out = parse_when(v, names); });
    }

    void model();
    void prompt();
    void sampling();
    void thinking();
    void output();
    void ids();
    void accepted();

    ArgParser& parser_;
    RunOptions& o_;
};

void Builder::model() {
    parser_.positional("[MODEL]", "the same as -m", [this](const std::string& v) { o_.model = v; });
    parser_.section("Model");
    text("-m,--model", "PATH",
         "checkpoint: a directory, a file in it, or a repo id in the local Hugging Face cache; left out: the "
         "demo "
         "checkpoint",
         o_.model);
    text("-hf,--hf-repo", "USER/REPO", "repo id in the local Hugging Face cache (nothing is downloaded)",
         o_.model);
    text("--synthetic", "NAME",
         "random weights in place of a checkpoint, to try a machine: qwen3.6-35b-a3b, qwen3.6-27b-shape, "
         "tiny, "
         "tiny-dense; with the demo checkpoint's tokenizer",
         o_.synthetic);
    text("--mix", "NAME", "formats of synthetic weights: aeon (default), fp8-head, xs, nvidia, qwen-fp8",
         o_.mix);
    parser_.value("-c,--ctx-size", "N", "context in tokens; 0 (default): the largest that fits",
                  [this](const std::string& v) { o_.context = parse_integer(v, "-c", 0, INT32_MAX); });
    parser_.value("-ngl,--gpu-layers,--n-gpu-layers", "all|auto|0",
                  "run on the GPU; default auto: if there is one; as many as the model has layers: all",
                  [this](const std::string& v) { o_.gpu = parse_gpu_layers(v); });
    add_device_flags(parser_, o_.devices);
    parser_.value(
        "-t,--threads", "N", "CPU threads; default: as many as this process may use",
        [this](const std::string& v) { o_.threads = static_cast<int>(parse_integer(v, "-t", 0, 4096)); });
    parser_.value("-ub,--ubatch-size", "N",
                  "tokens of the prompt in one step; default 512, on a GPU 8192; at least 64",
                  [this](const std::string& v) { o_.step_tokens = parse_integer(v, "-ub", 1, 65536); });
    parser_.value(
        "-cram,--cache-ram", "MiB",
        "host memory for states of earlier turns, so that /regen and /undo are instant; default 1024, 0: "
        "none",
        [this](const std::string& v) { o_.cache_bytes = parse_integer(v, "-cram", 0, 1 << 30) << 20; });
    add_kv_flags(parser_, o_.kv_type, o_.kv_type_v);
    add_allow_loss_flag(parser_, o_.allow_loss);
    parser_.value("--dense", "FORMAT", kDenseHelp,
                  [this](const std::string& v) { o_.dense = parse_dense(v); });
}

void Builder::prompt() {
    parser_.section("Prompt");
    parser_.value("-p,--prompt", "TEXT", "answer this and exit; -: read it from standard input",
                  [this](const std::string& v) { o_.prompt = v; });
    text("-f,--file", "FILE", "prompt from a file; after -p it follows an empty line", o_.prompt_file);
    parser_.values(
        "--image", "FILE",
        "an image before the text of the prompt; may be repeated; with --ids: in the place of an image token",
        [this](const std::string& v) { o_.images.push_back(v); });
    parser_.values(
        "--frames", "PATTERN",
        "a video before the text of the prompt: its frames are the files with such names ('clip/*.jpg'); may "
        "be repeated",
        [this](const std::string& v) { o_.videos.push_back(v); });
    parser_.value("--fps", "N", "frames a second of --frames (default 2)",
                  [this](const std::string& v) { o_.fps = parse_number(v, "--fps", 0.001, 1000); });
    text("-sys,--system-prompt", "TEXT", "system message", o_.system);
    text("-sysf,--system-prompt-file", "FILE", "system message from a file", o_.system_file);
    text("--tools", "FILE", "tools the model may call: a JSON array as in the OpenAI API", o_.tools_file);
    text("--tool-cmd", "PROGRAM",
         "answers calls of --tools: it gets the tool's name as its argument and the arguments, as JSON, on "
         "standard input; what it writes is the result. Asks before each call",
         o_.tool_command);
    toggle("--tool-yes", "run --tool-cmd without asking", o_.tool_yes);
    text("-j,--json-schema", "FILE|JSON", "answers are JSON of this schema, after the thinking",
         o_.json_schema);
    text("--grammar", "FILE", "answers are texts of this grammar (GBNF), after the thinking",
         o_.grammar_file);
    parser_.toggle("-cnv,--conversation",
                   "chat on after the prompt; a line of a pipe is a message or a command each",
                   [this](bool v) { o_.chat = v; });
    toggle("-st,--single-turn", "leave after one answer", o_.single_turn);
    toggle("-no-cnv,--no-conversation,--raw", "continue the text itself, without chat format", o_.raw);
}

void Builder::sampling() {
    parser_.section("Sampling (defaults: the checkpoint's generation_config.json)");
    setting("-n,--predict,--n-predict", "N", "tokens of the answer at most; -1 (default): until it ends",
            "n");
    setting("-s,--seed", "N", "-1 (default): random; the seed used is shown with the stats", "seed");
    setting("--temp,--temperature", "X", "0: always the likeliest token", "temp");
    setting("--top-k", "N", "only the N likeliest tokens; 0: off", "top_k");
    setting("--top-p", "X", "only the likeliest tokens that together reach X; 1: off", "top_p");
    setting("--min-p", "X", "only tokens at least X times as likely as the likeliest; 0: off", "min_p");
    setting("--repeat-penalty", "X", "1: off", "repeat_penalty");
    setting("--repeat-last-n", "N", "tokens that penalties look back on; -1: all", "repeat_last_n");
    setting("--presence-penalty", "X", "0: off", "presence_penalty");
    setting("--frequency-penalty", "X", "0: off", "frequency_penalty");
    setting("--logit-bias", "ID(+|-)X", "makes a token more or less likely; may be repeated", "logit_bias");
    toggle("--ignore-eos", "go on after the end of the answer", o_.ignore_eos);
}

void Builder::thinking() {
    parser_.section("Thinking");
    setting("--reasoning", "on|off|auto", "think before answering; auto (default): on", "think");
    setting("--reasoning-budget", "N", "tokens of thinking at most; -1 (default): no limit, 0: none",
            "reasoning_budget");
    when("--show-thinking",
         "auto (default): dim on a terminal; always: on stderr if stdout is no terminal; never",
         o_.show_thinking);
    parser_.value("--chat-template-kwargs", "JSON",
                  "enable_thinking, preserve_thinking and reasoning_effort, as a JSON object",
                  [this](const std::string& v) { apply_template_kwargs(v, o_); });
}

void Builder::output() {
    parser_.section("Output");
    parser_.value("--format", "text|json",
                  "json: one object with content, reasoning, tool_calls, usage, timings",
                  [this](const std::string& v) {
                      if (v != "text" && v != "json")
                          FAIL(usage, "--format: expected text or json, found '{}'", printable(v));
                      o_.json = v == "json";
                  });
    when("--color", "auto (default), always, never; NO_COLOR and TERM=dumb are honoured", o_.color);
    parser_.toggle("--stats,!--no-stats", "a line with tokens and speed on stderr; default: on a terminal",
                   [this](bool v) { o_.stats = v; });
    toggle("-v,--verbose", "model, settings and their origin on stderr", o_.verbose);
    parser_.toggle("--no-history", "keep no history of prompts", [this](bool v) { o_.history = !v; });
    toggle("--fail-on-truncation", "exit with 8 if a limit cut the answer", o_.fail_on_truncation);
    parser_.value("--timeout", "SECONDS", "one answer: stop after this time and exit with 124",
                  [this](const std::string& v) { o_.timeout = parse_number(v, "--timeout", 0, 1e9); });
}

void Builder::ids() {
    parser_.section("Token ids");
    text("--ids", "FILE",
         "prompt as token ids separated by blanks or commas, -: standard input; prints the ids of the "
         "answer; needs "
         "no tokenizer",
         o_.ids_file);
    text("--dump-logits", "OUT.npy",
         "float32 [tokens, vocabulary] of every prompt position; with --ids or -p", o_.logits_file);
    text("--dump-drafts", "OUT.json",
         "every round with a draft: position of its first token, ids drafted, how many were accepted; with "
         "--ids and "
         "--spec. All drafts then have --draft-max tokens where the drafter knows so many",
         o_.drafts_file);
    text("--dump-draft-logits", "OUT.npy",
         "float32 [drafted, vocabulary] that the first round was drafted from; with --ids and --spec mtp or "
         "dflash",
         o_.draft_logits_file);
}

void Builder::accepted() {
    parser_.section("Accepted for llama.cpp's sake, without effect here");
    parser_.value("-b,--batch-size", "N", "see -ub", [](const std::string& v) { parse_integer(v, "-b", 1); });
    parser_.value("-np,--parallel", "N", "run answers one prompt at a time",
                  [](const std::string& v) { parse_integer(v, "-np", 1); });
    parser_.ignored("-fa,--flash-attn", "on, off or auto", {"on", "off", "auto"});
    parser_.ignored("--jinja,--no-jinja", "the chat format is built in");
    parser_.ignored("--warmup,--no-warmup", "there is nothing to warm up");
}

}  // namespace

bool parse_run_options(int argc, char** argv, RunOptions& options) {
    ArgParser parser("run", "chat with a checkpoint, or answer one prompt", "[MODEL] [FLAGS]");
    Builder builder(parser, options);  // outlives the parse: the flags write through it
    builder.add_all();
    if (!parser.parse(argc, argv)) return false;
    builder.finish();
    if (!options.synthetic.empty() && !options.model.empty())
        FAIL(usage, "--synthetic {} and the checkpoint {}: name one of them", printable(options.synthetic),
             printable(options.model));
    if (!options.ids_file.empty() && (options.prompt || !options.prompt_file.empty()))
        FAIL(usage, "--ids is the prompt already; it does not go with -p or -f");
    if (options.raw && !(options.images.empty() && options.videos.empty()))
        FAIL(usage, "--image and --frames need the chat format; leave out --raw");
    if (!options.system.empty() && !options.system_file.empty())
        FAIL(usage, "-sys and -sysf both give a system message; use one");
    if (!options.logits_file.empty() && options.ids_file.empty() && !options.prompt &&
        options.prompt_file.empty())
        FAIL(usage, "--dump-logits needs a prompt: --ids, -p or -f");
    if (!options.drafts_file.empty() && (options.ids_file.empty() || !options.speculation.on()))
        FAIL(usage, "--dump-drafts needs --ids and drafts to dump: add --spec");
    if (!(options.drafts_file + options.draft_logits_file).empty())
        options.speculation.short_head = false;  // somebody compares
    if (!options.tool_command.empty() && options.tools_file.empty())
        FAIL(usage, "--tool-cmd answers calls of tools; say with --tools which there are");
    if (options.tool_yes && options.tool_command.empty()) FAIL(usage, "--tool-yes needs --tool-cmd");
    if (!options.draft_logits_file.empty() &&
        (options.ids_file.empty() ||
         (options.speculation.kind != DrafterKind::mtp && options.speculation.kind != DrafterKind::dflash)))
        FAIL(usage, "--dump-draft-logits needs --ids and --spec mtp or dflash");
    if (!options.json_schema.empty() && !options.grammar_file.empty())
        FAIL(usage, "--json-schema and --grammar both say what the answer must be; use one");
    if (!options.ids_file.empty() && !(options.json_schema + options.grammar_file).empty())
        FAIL(usage, "--ids has no text that --json-schema or --grammar could rule");
    if (options.raw && !options.tools_file.empty())
        FAIL(usage, "--tools needs the chat format; leave out --raw");
    return true;
}

}  // namespace quern
