// quern bench: llama-bench's tests and tables for a checkpoint on this machine.
#include <algorithm>
#include <fstream>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "models/model.h"
#include "models/weight_placement.h"
#include "tools/bench/kl_table.h"
#include "tools/bench/measure.h"
#include "tools/bench/own_server.h"
#include "tools/bench/quality.h"
#include "tools/bench/roofline.h"
#include "tools/bench/rows.h"
#include "tools/bench/serve_load.h"
#include "tools/bench/suite.h"
#include "tools/bench/watched.h"
#include "tools/commands.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/command.h"
#include "tools/common/kv_flags.h"
#include "tools/common/loading.h"
#include "tools/common/output.h"
#include "tools/common/speculation_flags.h"
#include "tools/common/split_flags.h"
#include "tools/engine/atomic_file.h"
#include "tools/engine/defaults.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
    std::string kl_text;  // a file: bench_kl
    std::string model, format = "md", kv_type = "auto", kv_type_v, synthetic, mix = "aeon";
    GpuOptions gpu = GpuOptions::automatic;
    DenseFormat dense = DenseFormat::as_stored;
    std::vector<int64_t> prompts, answers, depths;
    std::vector<std::pair<int64_t, int64_t>> both;
    std::vector<int64_t> parallel = {1};
    bool parallel_given = false, repetitions_given = false;
    SpeculationOptions speculation;
    std::vector<int64_t> draft_lengths;  // a row for each; empty: one row, as pays
    std::vector<double> acceptance;      // of drafts made up for it; empty: --spec's own drafters
    bool tests_given = false, linear = false, ops = false, verbose = false;
    bool allow_loss = false;
    int repetitions = 5, threads = 0;
    int64_t step_tokens = 0;  // 0: what suits the backend
    DeviceChoice devices;
    DoctorFlags doctor;
    std::string serve_url, serve_key, questions, trace, report;
    int64_t requests = 0;
    uint64_t seed = random_seed();
    bool suite = false;
};

/// "512,1024" and ranges "128-1024+128" or "128-4096*2".
std::vector<int64_t> parse_list(const std::string& text, const std::string& flag) {
    std::vector<int64_t> list;
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        const std::string part = text.substr(at, comma - at);
        at = comma + 1;
        const size_t dash = part.find('-', 1), step = part.find_first_of("+*", 1);
        const int64_t first = parse_integer(part.substr(0, std::min(dash, part.size())), flag, 0, 1 << 24);
        if (dash == std::string::npos) {
            list.push_back(first);
            continue;
        }
        const int64_t last = parse_integer(
            part.substr(dash + 1, step == std::string::npos ? step : step - dash - 1), flag, first, 1 << 24);
        const int64_t by =
            step == std::string::npos ? 1 : parse_integer(part.substr(step + 1), flag, 1, 1 << 24);
        const bool times = step != std::string::npos && part[step] == '*';
        if (times && (by < 2 || first < 1)) FAIL(usage, "{}: '{}' never ends", flag, printable(part));
        for (int64_t v = first; v <= last && list.size() < 1000; v = times ? v * by : v + by)
            list.push_back(v);
    }
    return list;
}

/// Probabilities that fall: "0.85,0.77,0.71".
std::vector<double> parse_acceptance(const std::string& text) {
    std::vector<double> list;
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        list.push_back(parse_number(text.substr(at, comma - at), "--accept", 0, 1));
        at = comma + 1;
    }
    if (static_cast<int64_t>(list.size()) > kMaxDraft)
        FAIL(usage, "--accept: {} positions; drafts have at most {} tokens", list.size(), kMaxDraft);
    if (!std::is_sorted(list.rbegin(), list.rend()))
        FAIL(usage,
             "--accept {}: each is the probability that a position and all before it are right, so they "
             "cannot rise",
             printable(text));
    return list;
}

void add_draft_flags(ArgParser& p, Options& o) {
    p.section("Speculation: a row with drafts of each length, and the same without");
    p.value(kSpecNames, "auto|none|lookup|mtp|dflash", "as of quern run; default none",
            [&](const std::string& v) { o.speculation.kind = parse_drafter(v, "--spec"); });
    p.value(kDraftMaxNames, "N", "tokens of every draft; lists and ranges; left out: as many as pay",
            [&](const std::string& v) {
                o.draft_lengths = parse_list(v, "--draft-max");
                for (const int64_t n : o.draft_lengths)
                    if (n < 1 || n > kMaxDraft)
                        FAIL(usage, "--draft-max: expected 1 to {}, found {}", kMaxDraft, n);
            });
    add_draft_head_flag(p, o.speculation);
    p.value(kDraftModelNames, "DIR",
            "as of quern run; with --synthetic the shape of its drafter: new (default) or old, of April 2026",
            [&](const std::string& v) { name_draft_model(v, o.speculation); });
    p.value(
        "--accept", "P,P,...",
        "in place of the drafters, with --spec mtp or dflash at its cost: drafts that are right with these "
        "probabilities, by position "
        "(0.85,0.77,0.71), "
        "each for its position and all before it",
        [&](const std::string& v) { o.acceptance = parse_acceptance(v); });
}

/// The engine's longest draft.
int64_t longest_draft(const Options& o) {
    if (!o.draft_lengths.empty()) return *std::max_element(o.draft_lengths.begin(), o.draft_lengths.end());
    return o.acceptance.empty() ? o.speculation.draft_max : static_cast<int64_t>(o.acceptance.size());
}

bool parse(int argc, char** argv, Options& o) {
    ArgParser p("bench", "measure prompt and answer speed", "[MODEL] [FLAGS]");
    const auto number = [](const std::string& v, const char* flag, int64_t low, int64_t high) {
        return parse_integer(v, flag, low, high);
    };
    p.section("Flags (as llama-bench's)");
    p.positional("MODEL", "checkpoint; left out: the demo checkpoint",
                 [&](const std::string& v) { o.model = v; });
    p.value("-m,--model", "PATH", "as MODEL", [&](const std::string& v) { o.model = v; });
    p.value("-p,--n-prompt", "N", "prompt tokens; lists 512,1024 and ranges 128-1024*2 (default 512)",
            [&](const std::string& v) {
                o.prompts = parse_list(v, "-p");
                o.tests_given = true;
            });
    p.value("-n,--n-gen", "N", "answer tokens (default 128)", [&](const std::string& v) {
        o.answers = parse_list(v, "-n");
        o.tests_given = true;
    });
    p.values("-pg", "PP,TG", "prompt and answer together", [&](const std::string& v) {
        const auto pair = parse_list(v, "-pg");
        if (pair.size() != 2) FAIL(usage, "-pg: expected PP,TG, found '{}'", printable(v));
        o.both.emplace_back(pair[0], pair[1]);
        o.tests_given = true;
    });
    p.value("-d,--n-depth", "N", "tokens in the context before the test (default 0)",
            [&](const std::string& v) { o.depths = parse_list(v, "-d"); });
    p.value("-r,--repetitions", "N", "runs of each test (default 5)", [&](const std::string& v) {
        o.repetitions = static_cast<int>(number(v, "-r", 1, 10000));
        o.repetitions_given = true;
    });
    p.value("-np,--n-parallel", "N",
            "sequences that answer at the same time, or without answers have prompts; lists and ranges "
            "(default 1)",
            [&](const std::string& v) {
                o.parallel = parse_list(v, "-np");
                o.parallel_given = true;
            });
    p.value("-t,--threads", "N", "threads",
            [&](const std::string& v) { o.threads = static_cast<int>(number(v, "-t", 1, 1024)); });
    p.value("-ub,--ubatch-size", "N", "prompt tokens run at a time (default 512, on a GPU 8192; at least 64)",
            [&](const std::string& v) { o.step_tokens = number(v, "-ub", 1, 65536); });
    p.value("-b,--batch-size", "N", "accepted, see -ub", [](const std::string&) {});
    p.toggle("-v,--verbose", "the memory plan, before the load and measured after it",
             [&](bool v) { o.verbose = v; });
    p.value("-ngl,--gpu-layers,--n-gpu-layers", "N", "0, auto, all, or as many as the model has layers",
            [&](const std::string& v) { o.gpu = parse_gpu_layers(v); });
    add_device_flags(p, o.devices);
    p.value("--synthetic", "NAME",
            "random weights instead of a checkpoint: qwen3.6-35b-a3b, qwen3.6-27b-shape, tiny, tiny-dense",
            [&](const std::string& v) { o.synthetic = v; });
    p.value("--mix", "NAME", "formats of synthetic weights: aeon (default), fp8-head, xs, nvidia, qwen-fp8",
            [&](const std::string& v) { o.mix = v; });
    p.value("--dense", "FORMAT", kDenseHelp, [&](const std::string& v) { o.dense = parse_dense(v); });
    p.toggle("--ops", "also a table of the time that each kind of node takes", [&](bool v) { o.ops = v; });
    add_kv_flags(p, o.kv_type, o.kv_type_v);
    add_allow_loss_flag(p, o.allow_loss);
    p.value("-o,--output", "FORMAT", "md, csv, json, jsonl", [&](const std::string& v) {
        if (v != "md" && v != "csv" && v != "json" && v != "jsonl")
            FAIL(usage, "-o: expected md, csv, json or jsonl, found '{}'", printable(v));
        o.format = v;
    });
    add_draft_flags(p, o);
    p.section("Quality");
    p.value(
        "--perplexity", "FILE",
        "instead: questions of a JSONL file (models/demo/eval.jsonl); how many of the greedy answers, of at "
        "most -n tokens (512), are the expected ones, and nats per token of those",
        [&](const std::string& v) { o.questions = v; });
    p.value("--kl", "FILE",
            "instead: how far -ctk and -ctv (default: every packed format) and --dense move the model's "
            "predictions on "
            "this text",
            [&](const std::string& v) { o.kl_text = v; });
    add_doctor_flags(p, o.doctor);
    p.section("A running server");
    p.value("--serve", "URL",
            "instead: load on the server at http://HOST:PORT, with -np people at once, -p words and -n "
            "tokens of answer",
            [&](const std::string& v) { o.serve_url = v; });
    p.value("--requests", "N", "for each -np; default: eight each, 50 at least",
            [&](const std::string& v) { o.requests = number(v, "--requests", 1, 1 << 24); });
    p.value("--trace", "FILE",
            "with --serve: replay agents' turns, JSON lines of session, shared, shared_words, words, answer, "
            "wait, or "
            "of timestamp, input_length, output_length, hash_ids; -np sessions at once",
            [&](const std::string& v) { o.trace = v; });
    p.value("--seed", "N", "of the prompts for a server; left out: others in every run",
            [&](const std::string& v) { o.seed = static_cast<uint64_t>(number(v, "--seed", 0, INT64_MAX)); });
    p.toggle("--suite",
             "instead: six kinds of prompt, 1 to 64 people, 25 readers of long texts, depths to 128K, on the "
             "server of "
             "--serve or one of its own; -np, -n, -d and -r choose others",
             [&](bool v) { o.suite = v; });
    p.value("--report", "DIR", "also write the suite there as suite.md, .csv, .json and .svg",
            [&](const std::string& v) { o.report = v; });
    p.value("--api-key", "KEY", "of that server", [&](const std::string& v) { o.serve_key = v; });
    p.section("Other");
    p.toggle("--linear",
             "instead: matrix products on matrices beyond the caches, against this machine's memory",
             [&](bool v) { o.linear = v; });
    p.footer("Rates include greedy sampling and exclude tokenization.\n");
    if (!p.parse(argc, argv)) return false;
    check_doctor_flags(o.doctor);
    if (!o.speculation.on() && (!o.acceptance.empty() || !o.draft_lengths.empty()))
        FAIL(usage, "--accept and --draft-max need drafts; add --spec auto");
    o.speculation.draft_max = longest_draft(o);
    if (o.devices.named() && o.gpu == GpuOptions::automatic) o.gpu = GpuOptions::all;
    return true;
}

std::vector<BenchTest> tests_of(const Options& o) {
    std::vector<BenchTest> tests;
    const std::vector<int64_t> prompts = o.tests_given ? o.prompts : std::vector<int64_t>{512};
    const std::vector<int64_t> answers = o.tests_given ? o.answers : std::vector<int64_t>{128};
    const bool only_prompts = std::all_of(answers.begin(), answers.end(), [](int64_t n) { return n == 0; });
    for (int64_t depth : o.depths.empty() ? std::vector<int64_t>{0} : o.depths) {
        for (int64_t p : prompts) {
            if (p <= 0) continue;
            tests.push_back({p, 0, depth, 1});
            for (int64_t np : o.parallel)
                if (np > 1 && depth == 0 && only_prompts) tests.push_back({p, 0, 0, np});
        }
        for (int64_t np : o.parallel)
            for (int64_t n : answers)
                if (n > 0) tests.push_back({0, n, depth, np});
        for (const auto& [p, n] : o.both) tests.push_back({p, n, depth, 1});
    }
    return o.speculation.on() ? with_drafts(tests, o.draft_lengths) : tests;
}

int bench_linear(const Options& o, Backend& backend) {
    const double limit = read_bandwidth(o.threads);
    std::string text = fmt::format(
        "{}: memory read {:.2f} GB/s\n\n| linear, one row | matrix | ms | GB/s | of memory |\n"
        "| --- | ---: | ---: | ---: | ---: |\n",
        backend.description(), limit / 1e9);
    for (const LinearRow& r : measure_linear(backend))
        text += fmt::format("| {} | {}x{} | {:.2f} | {:.2f} | {:.0f} % |\n", r.format, r.rows, r.columns,
                            r.seconds * 1e3, r.bytes / r.seconds / 1e9, 100 * r.bytes / r.seconds / limit);
    Output(1).write(text);
    return 0;
}

/// For measurements of speed and of quality.
LoadOptions load_options(const Options& o, const EngineOptions& engine, bool tokenizer) {
    return {.model = o.model,
            .synthetic = o.synthetic,
            .mix = o.mix,
            .gpu = o.gpu,
            .devices = o.devices,
            .threads = o.threads,
            .tokenizer = tokenizer,
            .dense = o.dense,
            .engine = engine,
            .allow_loss = o.allow_loss,
            .verbose = o.verbose};
}

int bench_quality(const Options& o) {
    constexpr int64_t kParallel = 8, kAnswer = 512;
    const std::vector<Question> questions = read_questions(o.questions);
    const int64_t limit = o.answers.empty() ? kAnswer : o.answers.front();
    EngineOptions settings{.step_tokens = o.step_tokens, .kv_type = o.kv_type, .kv_type_v = o.kv_type_v};
    settings.sequences = o.parallel == std::vector<int64_t>{1} ? kParallel : o.parallel.front();
    const LoadedModel loaded = load_and_start(load_options(o, settings, true));
    const QualityReport report = measure_quality(*loaded.engine, questions, limit);
    Output(1).write(o.format == "json" ? to_json(report).dump(2) + "\n" : describe(report));
    return 0;
}

int bench_kl(const Options& o) {
    if (!o.synthetic.empty()) FAIL(usage, "--kl: random weights predict nothing; name a checkpoint");
    const auto backend = make_backend(o.gpu, o.threads, o.devices);
    const auto model = load_model(model_or_demo(o.model), *backend, {.tokenizer = true, .dense = o.dense}, {},
                                  o.devices.shares);
    std::vector<std::pair<std::string, std::string>> kv = {{o.kv_type, o.kv_type_v}};
    if (o.kv_type == "auto" && o.kv_type_v.empty())
        kv = {{"fp8", ""}, {"fp8", "nvfp4"}, {"k8v4", ""}, {"nvfp4", ""}, {"tq4", ""}};
    const KlTable table = measure_kl(*model, *backend, kl_tokens(*model, o.kl_text), kv);
    Output(1).write(o.format == "json" ? to_json(table).dump(2) + "\n" : describe(table));
    return 0;
}

int bench_doctor(const Options& o) {
    DoctorFlags flags = o.doctor;
    flags.json |= o.format == "json";
    const EngineOptions settings{
        .step_tokens = o.step_tokens, .kv_type = o.kv_type, .kv_type_v = o.kv_type_v};
    return run_doctor(load_options(o, settings, true), flags);
}

/// Of a server of its own: what was given here.
std::vector<std::string> server_flags(const Options& o) {
    std::vector<std::string> flags;
    const auto add = [&](const char* name, const std::string& value) {
        flags.emplace_back(name);
        flags.push_back(value);
    };
    if (!o.model.empty()) flags.push_back(o.model);
    if (!o.synthetic.empty()) {
        add("--synthetic", o.synthetic);
        add("--mix", o.mix);
    }
    if (o.gpu != GpuOptions::automatic) add("-ngl", o.gpu == GpuOptions::all ? "all" : "0");
    if (o.devices.named()) add("--device", fmt::format("{}", fmt::join(o.devices.devices, ",")));
    if (o.devices.ranks > 1) add("-tp", fmt::format("{}", o.devices.ranks));
    if (o.devices.by_layers) add("-sm", "layer");
    if (!o.devices.shares.empty()) add("-ts", fmt::format("{}", fmt::join(o.devices.shares, ",")));
    if (o.threads > 0) add("-t", fmt::format("{}", o.threads));
    if (o.step_tokens > 0) add("-ub", fmt::format("{}", o.step_tokens));
    if (o.dense != DenseFormat::as_stored) add("--dense", dense_format_name(o.dense));
    if (o.speculation.on()) {
        add("--spec", drafter_name(o.speculation.kind));
        add("--draft-max", fmt::format("{}", o.speculation.draft_max));
    }
    add("-ctk", o.kv_type);
    return flags;
}

/// Depths have a server to themselves, since a long context leaves no room for others.
Json suite_rows(const Options& o, SuitePlan plan, const std::function<void(const Json&)>& tell) {
    if (!o.serve_url.empty()) return run_suite({o.serve_url, o.serve_key}, plan, tell);
    const auto most = std::max(*std::max_element(plan.people.begin(), plan.people.end()), plan.readers);
    const auto measure = [&](int64_t sequences) {
        std::vector<std::string> flags = server_flags(o);
        flags.insert(flags.end(), {"-np", fmt::format("{}", sequences)});
        const OwnServer server(flags);
        return run_suite({server.url(), ""}, plan, tell);
    };
    plan.depths = false;
    Json rows = measure(most);
    plan = {.kinds = false,
            .crowd = false,
            .retrieval = false,
            .depth_tokens = plan.depth_tokens,
            .repetitions = plan.repetitions,
            .seed = plan.seed + (uint64_t{1} << 32)};
    for (Json& row : measure(1)) rows.push_back(std::move(row));
    return rows;
}

int bench_suite(const Options& o) {
    SuitePlan plan;
    plan.seed = o.seed;
    if (o.parallel_given) plan.people = o.parallel;
    if (!o.depths.empty()) plan.depth_tokens = o.depths;
    if (!o.answers.empty()) plan.answer_tokens = std::max<int64_t>(o.answers.front(), 2);
    if (o.repetitions_given) plan.repetitions = o.repetitions;
    const Json rows = suite_rows(o, plan, [](const Json& row) {
        note(fmt::format("{}: {}\n", row["section"].get<std::string>(), row["name"].get<std::string>()));
    });
    const std::string json = rows.dump(2) + "\n";
    std::string out = o.format == "json" ? json : o.format == "csv" ? suite_csv(rows) : suite_markdown(rows);
    if (o.format == "jsonl") {
        out.clear();
        for (const Json& row : rows) out += row.dump() + "\n";
    }
    Output(1).write(out);
    const std::string title = !o.serve_url.empty()  ? o.serve_url
                              : o.synthetic.empty() ? o.model
                                                    : o.synthetic;
    const std::pair<const char*, std::string> files[] = {
        {"suite.md", suite_markdown(rows)},
        {"suite.csv", suite_csv(rows)},
        {"suite.json", json},
        {"suite.svg", suite_plot(rows, "quern bench --suite " + title)}};
    for (const auto& [name, text] : files) {
        if (o.report.empty()) break;
        AtomicFile file(o.report + "/" + name, 0644);
        file.write(text);
        file.commit();
    }
    int64_t failed = 0;
    for (const Json& row : rows) failed += row.value("failed", int64_t{0});
    return failed > 0;
}

int bench_serve(const Options& o) {
    Json rows = Json::array();
    const ServerAddress server{o.serve_url, o.serve_key};
    if (!o.trace.empty()) {
        const Trace trace = Trace::read(o.trace);
        for (const int64_t people : o.parallel_given ? o.parallel : std::vector<int64_t>{INT64_MAX})
            rows.push_back(replay(server, trace, people, o.seed + rows.size()));
    } else {
        ServeLoad load{.server = server, .requests = o.requests, .seed = o.seed};
        if (o.parallel_given) load.concurrency = o.parallel;
        if (!o.prompts.empty()) load.prompt_words = o.prompts.front();
        if (!o.answers.empty()) load.answer_tokens = o.answers.front();
        rows = measure_server(load);
    }
    Output(1).write(o.format == "json" ? rows.dump(2) + "\n" : server_table(rows));
    int64_t failed = 0;
    for (const Json& row : rows) failed += row["failed"].get<int64_t>();
    return failed > 0;
}

}  // namespace

int cmd_bench(int argc, char** argv) {
    open_standard_descriptors();
    Options o;
    if (!parse(argc, argv, o)) return 0;
    if (o.suite) return bench_suite(o);
    if (!o.serve_url.empty()) return bench_serve(o);
    if (!o.trace.empty()) FAIL(usage, "--trace needs a server: --serve http://HOST:PORT");
    if (o.doctor.wanted) return bench_doctor(o);
    if (!o.questions.empty()) return bench_quality(o);
    if (!o.kl_text.empty()) return bench_kl(o);
    if (o.linear) require_no_split(o.devices, "--linear");
    if (o.linear) return bench_linear(o, *make_backend(o.gpu, o.threads, o.devices));
    const std::vector<BenchTest> tests = tests_of(o);
    if (tests.empty())
        FAIL(usage,
             "nothing to measure: give -p N (tokens of a prompt), -n N (tokens of an answer) or -pg P,N");
    EngineOptions settings{
        .context = 1, .step_tokens = o.step_tokens, .kv_type = o.kv_type, .kv_type_v = o.kv_type_v};
    // Rows of prompts between two answer steps: 128 on a CPU, more on a GPU.
    constexpr int64_t kLeastGap = 128;
    const int64_t gap = o.step_tokens > 0 ? std::max<int64_t>(o.step_tokens, kPageTokens) : kLeastGap;
    settings.speculation = o.speculation;
    for (const BenchTest& t : tests) {
        settings.context = std::max(settings.context, t.context(std::min(gap, kLeastGap), o.repetitions));
        settings.sequences = std::max(settings.sequences, t.parallel);
    }
    std::shared_ptr<ReplayDrafter> drafter;
    if (!o.acceptance.empty()) drafter = std::make_shared<ReplayDrafter>(o.acceptance);
    settings.drafter = drafter;
    const LoadedModel loaded = load_and_start(load_options(o, settings, false));
    Engine& engine = *loaded.engine;
    Backend& backend = *loaded.backend;

    const Ceilings ceilings = measure_ceilings(backend.of_rank(0));
    Output out(1);
    std::vector<BenchRow> rows;
    Json all = Json::array();
    std::string ops_text;
    if (o.format == "md") out.write(md_header());
    for (const BenchTest& test : tests) {
        std::string taint;
        const Samples samples = run_watched(engine, test, o.repetitions, drafter.get(), taint);
        BenchRow& row = rows.emplace_back(make_row(test, samples, engine, ceilings));
        row.taint = taint;
        if (o.ops) ops_text += op_table(engine, test);
        if (const auto report = engine.speculation(); report && o.verbose)
            std::fputs(describe(*report).c_str(), stderr);
        const Json json = json_row(row, engine, ceilings);
        if (o.format == "md") out.write(md_row(row, engine));
        if (o.format == "csv") out.write((all.empty() ? csv_line(json, true) : "") + csv_line(json, false));
        if (o.format == "jsonl") out.write(json.dump() + "\n");
        all.push_back(json);
    }
    if (o.format == "json") out.write(all.dump(2) + "\n");
    if (o.format == "md") out.write(md_footer(rows, ceilings) + md_drafts(rows));
    if (o.ops) out.write(ops_text);
    return 0;
}

}  // namespace quern
