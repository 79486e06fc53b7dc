// quern quantize-inspect: what a checkpoint holds and whether it can be trusted.
#include <algorithm>
#include <thread>

#include "ggml-like/check.h"
#include "tools/commands.h"
#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/common/kv_flags.h"
#include "tools/common/loading.h"
#include "tools/common/split_flags.h"
#include "tools/engine/atomic_file.h"
#include "tools/inspect/health.h"
#include "tools/inspect/plan.h"
#include "tools/inspect/report.h"
#include "tools/quantize/compare.h"
#include "tools/quantize/write_checkpoint.h"

namespace quern {
namespace {

struct Options {
    std::string model, tensors, against;
    bool audit = false, plan = false, health = false, json = false;
    std::string html;
    int threads = 0;
    PlanOptions cost;
    WriteOptions write;
};

CheckpointFormat parse_format(const std::string& name) {
    for (const CheckpointFormat f : {CheckpointFormat::compressed_tensors, CheckpointFormat::modelopt})
        if (name == format_name(f)) return f;
    FAIL(usage, "--format '{}': expected compressed-tensors or modelopt", printable(name));
}

void add_plan_flags(ArgParser& p, Options& o) {
    PlanOptions& w = o.cost;
    p.section("Flags of --plan");
    p.value("-c,--ctx-size", "N", "context of one sequence; 0 (default): the largest that fits",
            [&w](const std::string& v) { w.engine.context = parse_integer(v, "-c", 0, INT32_MAX); });
    p.value("-np,--parallel", "N", "sequences at the same time; default 1",
            [&w](const std::string& v) { w.engine.sequences = parse_integer(v, "-np", 1, 1024); });
    add_kv_flags(p, w.engine.kv_type, w.engine.kv_type_v);
    p.value("--dense", "FORMAT", "what changes under this flag of run and serve: fp8, nvfp4",
            [&w](const std::string& v) { w.dense = parse_dense(v); });
    p.value("--bandwidth", "GB/s", "a card of this memory bandwidth beside those of the table",
            [&w](const std::string& v) { w.bandwidth = parse_number(v, "--bandwidth", 0.001, 1e6); });
    p.values("--card", "NAME", "this card instead of the usual ones, such as rtx-3090; may be repeated",
             [&w](const std::string& v) { w.cards.push_back(v); });
    p.value("-tp,--tensor-parallel-size", "N", "so many cards that share every layer",
            [&w](const std::string& v) { w.ranks = static_cast<int>(parse_integer(v, "-tp", 1, 16)); });
    p.value("-ts,--tensor-split", "N,N[,...]", "so many cards that have such shares of the layers",
            [&w](const std::string& v) { w.shares = parse_shares(v); });
    p.value("--synthetic", "NAME", "shapes of a model that is not here: qwen3.6-35b-a3b, qwen3.6-27b-shape",
            [&w](const std::string& v) { w.synthetic = v; });
    p.value("--mix", "NAME", "formats of --synthetic: aeon (default), fp8-head, xs, nvidia, qwen-fp8",
            [&w](const std::string& v) { w.mix = v; });
}

void add_write_flags(ArgParser& p, Options& o) {
    WriteOptions& w = o.write;
    p.section("Flags of --write");
    p.value("--recipe", "NAME",
            "aeon (default), xs, fp8-head, or a recipe file; a source in NVFP4 needs none",
            [&w](const std::string& v) { w.recipe = v; });
    p.value("--format", "NAME", "compressed-tensors (default) or modelopt",
            [&w](const std::string& v) { w.format = parse_format(v); });
    p.value("--shard-size", "GB", "largest weight file; default 5", [&w](const std::string& v) {
        w.shard_bytes = static_cast<uint64_t>(1e9 * parse_number(v, "--shard-size", 1e-6, 1e6));
    });
}

/// JSON of untrusted names is printed whatever bytes they have.
void print_json(const nlohmann::ordered_json& j, Output& out) {
    out.write(j.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

int print_plan(Options& o, Output& out) {
    if (o.cost.synthetic.empty()) o.cost.model = model_or_demo(o.model);
    const CostPlan plan = make_cost_plan(o.cost);
    if (o.json)
        print_json(to_json(plan), out);
    else
        out.write(describe(plan));
    return 0;
}

int thread_count(const Options& o) {
    return o.threads > 0 ? o.threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int print_health(const Inspection& in, const Options& o, Output& out) {
    const HealthReport report = measure_health(in, thread_count(o));
    if (!o.html.empty()) {
        AtomicFile page(o.html, 0644);
        page.write(to_html(report, in.checkpoint.files().directory));
        page.commit();
    }
    if (o.json)
        print_json(to_json(report), out);
    else
        out.write(describe(report));
    return in.clean() && report.clean() ? 0 : static_cast<int>(ErrorKind::model);
}

int print_comparison(const Options& o, Output& out) {
    constexpr size_t kListed = 10;
    const Checkpoint checkpoint = Checkpoint::open(model_or_demo(o.model)),
                     original = Checkpoint::open(o.against);
    const Comparison c = compare_checkpoints(checkpoint, original, thread_count(o));
    if (o.json)
        print_json(to_json(c), out);
    else
        out.write(describe(c, kListed));
    return c.clean() ? 0 : static_cast<int>(ErrorKind::model);
}

int write_and_report(Options& o, Output& out) {
    const Checkpoint source = Checkpoint::open(model_or_demo(o.model));
    if (o.write.recipe.empty() && source.quant().method.empty()) o.write.recipe = "aeon";
    o.write.threads = thread_count(o);
    const WriteReport report = write_checkpoint(source, o.write);
    if (o.json)
        print_json(to_json(report), out);
    else
        out.write(describe(report));
    return 0;
}

}  // namespace

int cmd_quantize_inspect(int argc, char** argv) {
    open_standard_descriptors();
    Options o;
    ArgParser parser("quantize-inspect",
                     "list a checkpoint's tensors and check that every byte is accounted for",
                     "[MODEL] [FLAGS]");
    parser.section("Flags");
    parser.positional(
        "MODEL", "directory, a file in it, or a repo id in the local Hugging Face cache; left out: the demo",
        [&](const std::string& v) { o.model = v; });
    parser.value("-m,--model", "PATH", "as MODEL", [&](const std::string& v) { o.model = v; });
    parser.value("--tensors", "REGEX", "list the tensors whose name matches; . for all",
                 [&](const std::string& v) { o.tensors = v; });
    parser.toggle(
        "--audit",
        "every tensor in one class, the configuration against the tensors, all scales that are floats",
        [&](bool v) { o.audit = v; });
    parser.toggle("--plan",
                  "what it costs to run: bytes a token, memory, ceilings of the speed on known cards",
                  [&](bool v) { o.plan = v; });
    parser.toggle("--health",
                  "reads all weights: what is wrong with their quantization, a grade for each layer",
                  [&](bool v) { o.health = v; });
    parser.value("--html", "FILE", "with --health: a page with heat maps, too",
                 [&](const std::string& v) { o.html = v; });
    parser.value(
        "-t,--threads", "N", "of --health, --against and --write; default: all cores",
        [&](const std::string& v) { o.threads = static_cast<int>(parse_integer(v, "-t", 0, 4096)); });
    parser.toggle("--json", "everything as one JSON object", [&](bool v) { o.json = v; });
    parser.value("--against", "DIR",
                 "the error of every matrix against its BF16 original, or another checkpoint",
                 [&](const std::string& v) { o.against = v; });
    parser.value("--write", "DIR",
                 "quantizes a BF16 checkpoint, or converts a quantized one, into a new directory",
                 [&](const std::string& v) { o.write.directory = v; });
    add_plan_flags(parser, o);
    add_write_flags(parser, o);
    parser.footer("Reads headers only unless it is told more. Exit codes: 0 clean, 2 usage, 3 not clean.\n");
    if (!parser.parse(argc, argv)) return 0;
    const bool write = !o.write.directory.empty();
    const bool against = !o.against.empty();
    if (o.plan + o.health + o.audit + against + write > 1)
        FAIL(usage, "--audit, --health, --plan, --against and --write are one command each");
    if (!o.html.empty() && !o.health) FAIL(usage, "--html FILE is a report of --health");

    Output out(1);
    if (o.plan) return print_plan(o, out);
    if (against) return print_comparison(o, out);
    if (write) return write_and_report(o, out);
    const Inspection in(model_or_demo(o.model), o.audit ? ReadMode::values : ReadMode::headers);
    if (o.health && in.failure.empty()) return print_health(in, o, out);
    if (o.json) {
        print_json(inspection_json(in, o.tensors), out);
    } else {
        if (!o.tensors.empty()) print_tensors(in, o.tensors, out);
        if (o.audit)
            print_audit(in, out);
        else if (o.tensors.empty())
            print_summary(in, out);
    }
    return in.clean() ? 0 : static_cast<int>(ErrorKind::model);
}

}  // namespace quern
