#include "tools/serve/options.h"

#include <fstream>

#include "ggml-like/check.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/command.h"
#include "tools/common/kv_flags.h"
#include "tools/common/load_replicas.h"
#include "tools/common/output.h"
#include "tools/common/settings.h"
#include "tools/common/speculation_flags.h"
#include "tools/common/split_flags.h"
#include "tools/serve/client_config.h"

namespace quern {
namespace {

constexpr const char* kFooter =
    R"(The OpenAI API is at http://HOST:PORT/v1, the Anthropic API at /v1/messages, a page to chat at /, /health says
when the model is loaded. QUERN_ARG_PORT=9000 in the environment does what --port 9000 does; give keys that way or with
--api-key-file, so that they are in no process list.

SIGTERM or Ctrl-C ends after the running answers, at most --drain-timeout seconds; a second one ends at once.
Exit codes: 0 after draining, 2 the command line is wrong, 3 to 6 as `quern run`, 7 the port is not available,
130 and 143 ended at once.

Examples:
    quern serve -m DIR --port 8080 -np 16
    quern serve -m DIR --alias fast:temp=0:think=off,deep:temp=0.7
    quern serve --port 8080 --alias qwen -c 131072 --print-config codex)";

constexpr int kMaxReplicas = 16;

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> out;
    for (size_t start = 0; start <= text.size();) {
        const size_t end = std::min(text.find(at, start), text.size());
        if (end > start) out.push_back(text.substr(start, end - start));
        start = end + 1;
    }
    return out;
}

void check_setting(const std::string& name, const std::string& value, const std::string& shown) {
    Settings scratch;
    set_value(scratch, name, value, shown, "");
}

/// NAME or NAME:setting=value:setting=value.
void add_alias(ServeOptions& o, const std::string& text) {
    const auto parts = split(text, ':');
    if (parts.empty()) FAIL(usage, "--alias: '{}' has no name", printable(text));
    std::vector<std::pair<std::string, std::string>> settings;
    for (size_t i = 1; i < parts.size(); ++i) {
        const size_t equals = parts[i].find('=');
        if (equals == std::string::npos)
            FAIL(usage, "--alias {}: expected setting=value, found '{}'", printable(parts[0]),
                 printable(parts[i]));
        settings.emplace_back(parts[i].substr(0, equals), parts[i].substr(equals + 1));
        if (!is_setting(settings.back().first))
            FAIL(usage, "--alias {}: there is no setting '{}'{}; there are {}", printable(parts[0]),
                 printable(settings.back().first), did_you_mean(settings.back().first, setting_names()),
                 fmt::join(setting_names(), ", "));
        check_setting(settings.back().first, settings.back().second, "--alias " + printable(parts[0]));
    }
    o.aliases.emplace_back(parts[0], std::move(settings));
}

void read_keys(ServeOptions& o, const std::string& path) {
    std::ifstream file(path);
    if (!file) FAIL(usage, "--api-key-file: cannot read {}", printable(path));
    for (std::string line; std::getline(file, line);) {
        while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
        if (!line.empty()) o.keys.push_back(line);
    }
    if (o.keys.empty()) FAIL(usage, "--api-key-file: {} holds no key", printable(path));
}

void add_model(ArgParser& p, ServeOptions& o) {
    p.positional("[MODEL]", "the same as -m", [&o](const std::string& v) { o.model = v; });
    p.section("Model");
    p.value("-m,--model", "PATH",
            "checkpoint: a directory, a file in it, or a repo id in the local Hugging Face cache; "
            "left out: the demo checkpoint",
            [&o](const std::string& v) { o.model = v; });
    p.value("-hf,--hf-repo", "USER/REPO", "repo id in the local Hugging Face cache (nothing is downloaded)",
            [&o](const std::string& v) { o.model = v; });
    p.value("--synthetic", "NAME",
            "random weights in place of a checkpoint, to measure load: qwen3.6-35b-a3b, qwen3.6-27b-shape, "
            "tiny, tiny-dense; with +vision behind it one that reads images; with the demo checkpoint's "
            "tokenizer",
            [&o](const std::string& v) { o.synthetic = v; });
    p.value("--mix", "NAME", "formats of synthetic weights: aeon (default), fp8-head, xs, nvidia, qwen-fp8",
            [&o](const std::string& v) { o.mix = v; });
    p.values("-a,--alias,--served-model-name", "NAMES",
             "names to serve under, each with settings: fast:temp=0,deep:temp=0.7:top_p=0.9",
             [&o](const std::string& v) {
                 for (const std::string& one : split(v, ',')) add_alias(o, one);
             });
    p.value("-c,--ctx-size,--max-model-len", "N",
            "context of one answer in tokens; 0 (default): the largest that fits",
            [&o](const std::string& v) { o.context = parse_integer(v, "-c", 0, INT32_MAX); });
    p.value("-np,--parallel,--max-num-seqs", "N",
            "answers computed at the same time, by each replica; default 4",
            [&o](const std::string& v) { o.sequences = parse_integer(v, "-np", 1, 1024); });
    p.value("-ngl,--gpu-layers,--n-gpu-layers", "all|auto|0", "run on the GPU; default auto: if there is one",
            [&o](const std::string& v) { o.gpu = parse_gpu_layers(v); });
    add_device_flags(p, o.devices);
    p.value("-dp,--data-parallel,--data-parallel-size", "N",
            "N replicas of the model, each on a GPU of its own (--device names them), behind this one port; "
            "on the "
            "CPU they share its threads; default 1",
            [&o](const std::string& v) {
                o.replicas = static_cast<int>(parse_integer(v, "--data-parallel", 1, kMaxReplicas));
            });
    p.value("-t,--threads", "N", "CPU threads; default: as many as this process may use",
            [&o](const std::string& v) { o.threads = static_cast<int>(parse_integer(v, "-t", 0, 4096)); });
    p.value("-ub,--ubatch-size,--max-num-batched-tokens", "N",
            "tokens of prompts in one step; default 512, on a GPU 8192; while answers run 128 at most, on a "
            "GPU 1024, of a mixture of experts 1408; at least 64",
            [&o](const std::string& v) { o.step_tokens = parse_integer(v, "-ub", 1, 65536); });
    add_kv_flags(p, o.kv_type, o.kv_type_v);
    add_allow_loss_flag(p, o.allow_loss);
    p.value("--dense", "FORMAT", kDenseHelp, [&o](const std::string& v) { o.dense = parse_dense(v); });
    p.value(
        "-cram,--cache-ram", "MiB",
        "host memory for states of earlier prompts, of all replicas together, taken as they come; default "
        "8192, 0: none are kept; a GPU also has as many as fit beside the context",
        [&o](const std::string& v) { o.cache_bytes = parse_integer(v, "-cram", 0, 1 << 30) << 20; });
    p.value("--cache-dir", "DIR",
            "keep these states in this directory over a restart; holds the tokens of conversations",
            [&o](const std::string& v) { o.cache_dir = v; });
}

void add_network(ArgParser& p, ServeOptions& o) {
    p.section("Network");
    p.value("--host", "ADDRESS", "default 127.0.0.1; another one needs a key or --allow-anonymous",
            [&o](const std::string& v) { o.host = v; });
    p.value("--port", "N", "default 8080; 0: one that is free, printed at the start",
            [&o](const std::string& v) { o.port = static_cast<int>(parse_integer(v, "--port", 0, 65535)); });
    p.values("--api-key", "KEY[,KEY]", "keys of which a request must bring one", [&o](const std::string& v) {
        for (const std::string& key : split(v, ',')) o.keys.push_back(key);
    });
    p.value("--api-key-file", "FILE", "the same, one a line",
            [&o](const std::string& v) { read_keys(o, v); });
    p.toggle("--allow-anonymous", "no key, although others can reach the port",
             [&o](bool v) { o.allow_anonymous = v; });
    p.values("--allowed-hosts", "NAMES",
             "names that requests without a key may use for this machine, beside "
             "addresses and localhost",
             [&o](const std::string& v) {
                 for (const std::string& host : split(v, ',')) o.hosts.push_back(host);
             });
    p.values("--cors-origins,--cors-origin,--allowed-origins", "ORIGINS",
             "web pages that may use this server; *: all; default: none", [&o](const std::string& v) {
                 for (const std::string& origin : split(v, ',')) o.cors_origins.push_back(origin);
             });
    p.value("--max-body", "BYTES", "of a request; default 32Mi", [&o](const std::string& v) {
        o.limits.body_bytes = parse_integer(v, "--max-body", 1024, int64_t{1} << 32);
    });
    p.value("--max-connections", "N", "default 1200", [&o](const std::string& v) {
        o.limits.connections = static_cast<size_t>(parse_integer(v, "--max-connections", 16, 100000));
    });
    p.value("--peer-connections", "N", "of one address; default 400, 0: no limit (behind a proxy)",
            [&o](const std::string& v) {
                o.limits.peer_connections =
                    static_cast<size_t>(parse_integer(v, "--peer-connections", 0, 100000));
            });
    p.value("--queue", "N", "answers that may wait beside those computed; then 429. Default 128",
            [&o](const std::string& v) { o.queue = parse_integer(v, "--queue", 0, 100000); });
    p.value("-to,--timeout", "SECONDS", "for one request, default 3600",
            [&o](const std::string& v) { o.timeout = parse_number(v, "--timeout", 0.001, 1e9); });
    p.value("--drain-timeout", "SECONDS", "for running answers after SIGTERM, default 10",
            [&o](const std::string& v) { o.drain_seconds = parse_number(v, "--drain-timeout", 0, 1e6); });
    p.toggle("--webui,!--no-webui", "the page at /; default on", [&o](bool v) { o.web_page = v; });
    p.toggle("--doctor",
             "examine the loaded model before the first answer (see quern bench --doctor); the result is in "
             "/props "
             "and on stderr",
             [&o](bool v) { o.doctor = v; });
    p.toggle("--strict-params", "unknown fields and model names are errors", [&o](bool v) { o.strict = v; });
    p.value("--log-format", "text|json|none", "a line for each request on stderr",
            [&o](const std::string& v) {
                if (v != "text" && v != "json" && v != "none")
                    FAIL(usage, "--log-format: expected text, json or none, found '{}'", printable(v));
                o.log_json = v == "json";
                o.log_requests = v != "none";
            });
}

void add_settings(ArgParser& p, ServeOptions& o) {
    p.section("What requests get that say nothing else (defaults: the checkpoint's generation_config.json)");
    const auto add = [&](const std::string& flag, const std::string& setting, const std::string& help) {
        p.value(flag, "X", help, [&o, setting, shown = flag.substr(0, flag.find(','))](const std::string& v) {
            check_setting(setting, v, shown);
            o.settings.emplace_back(setting, v);
        });
    };
    add("-n,--predict,--n-predict", "n", "tokens of an answer at most; -1: until it ends");
    add("-s,--seed", "seed", "-1: random");
    add("--temp,--temperature", "temp", "0: always the likeliest token");
    add("--top-k", "top_k", "0: off");
    add("--top-p", "top_p", "1: off");
    add("--min-p", "min_p", "0: off");
    add("--repeat-penalty", "repeat_penalty", "1: off");
    add("--presence-penalty", "presence_penalty", "0: off");
    add("--frequency-penalty", "frequency_penalty", "0: off");
    add("--reasoning", "think", "on, off or auto");
    add("--reasoning-budget", "reasoning_budget", "tokens of thinking at most; -1: no limit");
    p.section("Accepted for llama.cpp's and vLLM's sake, without effect here");
    p.value("-b,--batch-size", "N", "see -ub", [](const std::string& v) { parse_integer(v, "-b", 1); });
    p.ignored("-fa,--flash-attn", "on, off or auto", {"on", "off", "auto"});
    p.ignored("--jinja,--no-jinja", "the chat format is built in");
    p.ignored("--warmup,--no-warmup", "there is nothing to warm up");
    p.ignored("--metrics", "always on");
    p.ignored("--cache-prompt,--enable-prefix-caching", "always on; -cram 0: off");
    p.ignored("--reasoning-format", "thinking always comes apart", {"auto", "deepseek"});
    p.ignored("--offline", "no network is used but the port");
    p.ignored("--props", "always on");
    p.ignored("--slots,--no-slots", "always on");
    p.ignored("-cb,--cont-batching", "always on");
}

bool is_loopback(const std::string& host) {
    return host == "localhost" || host == "::1" || host.compare(0, 4, "127.") == 0;
}

}  // namespace

bool parse_serve_options(int argc, char** argv, ServeOptions& options) {
    ArgParser parser("serve", "answer many clients through the OpenAI and Anthropic APIs", "[MODEL] [FLAGS]");
    add_model(parser, options);
    add_speculation_flags(parser, options.speculation);
    add_vision_flags(parser, options.vision);
    add_network(parser, options);
    add_settings(parser, options);
    std::string client;
    parser.section("Setting up a client");
    parser.value("--print-config", "CLIENT",
                 std::string("prints what ") + kClientNames +
                     " needs to use a server with these flags, and ends; its context with -c N",
                 [&client](const std::string& v) { client = v; });
    parser.footer(kFooter);
    if (!parser.parse(argc, argv)) return false;
    if (!options.synthetic.empty() && !options.model.empty())
        FAIL(usage, "--synthetic {} and the checkpoint {}: name one of them", printable(options.synthetic),
             printable(options.model));
    if (options.replicas > 1) require_whole_replicas(options.devices);
    if (options.doctor) require_real_weights(options.synthetic);
    if (!options.cache_dir.empty() && options.cache_bytes == 0)
        FAIL(usage, "--cache-dir {}: -cram 0 keeps no states that could be saved",
             printable(options.cache_dir));
    if (!is_loopback(options.host) && options.keys.empty() && !options.allow_anonymous)
        FAIL(
            usage,
            "--host {}: others can reach this address, and there is no key. Give one with --api-key-file, or "
            "say --allow-anonymous if anybody may use this server",
            printable(options.host));
    if (client.empty()) return true;
    print(client_config(client, options));
    return false;
}

}  // namespace quern
