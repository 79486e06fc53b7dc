#include "tools/bench/rows.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "models/model.h"
#include "tools/engine/kv_types.h"
#include "tools/engine/memory_plan.h"

namespace quern {

using Json = nlohmann::ordered_json;

BenchRow make_row(const BenchTest& test, const Samples& samples, const Engine& engine,
                  const Ceilings& ceilings) {
    BenchRow row{.test = test, .samples = samples, .bytes = {}};
    const double rate = samples.median_rate();
    if (test.prompt == 0 && test.drafts.kind == DrafterKind::none) {
        const double depth =
            static_cast<double>(std::max<int64_t>(test.depth, 1)) + static_cast<double>(test.answer) / 2;
        row.bytes = token_bytes(engine.model(), engine.memory_plan(), test.parallel, depth);
        row.limit = rate * total(row.bytes) / ceilings.bytes_per_second;
        row.kernels = engine.kernels(test.parallel);
    } else if (test.answer == 0) {
        row.limit = rate * token_flops(engine.model()) / ceilings.flops;
    }
    return row;
}

std::string md_header() {
    return "| model | size | params | backend | threads | test | t/s | median | of limit | kernels | output "
           "|\n"
           "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n";
}

std::string md_footer(const std::vector<BenchRow>& rows, const Ceilings& c) {
    std::string text = fmt::format(
        "\nLimits, measured here: memory {:.1f} GB/s (decoding); BF16 product by the same kernels "
        "{:.3g} TFLOP/s, a lower bound (prompts).\n",
        c.bytes_per_second / 1e9, c.flops / 1e12);
    std::string header, line, body;
    for (const BenchRow& r : rows) {
        if (r.bytes.empty()) continue;
        header = "| MB a token", line = "| ---", body += "| " + r.test.name();
        for (const auto& [name, value] : r.bytes) {
            header += " | " + name, line += " | ---:";
            body += fmt::format(" | {:.2f}", value / 1e6);
        }
        body += fmt::format(" | {:.2f} |\n", total(r.bytes) / 1e6);
    }
    return body.empty() ? text : text + "\n" + header + " | all |\n" + line + " | ---: |\n" + body;
}

std::string md_drafts(const std::vector<BenchRow>& rows) {
    std::string text;
    for (const BenchRow& r : rows) {
        if (r.test.drafts.kind == DrafterKind::none) continue;
        const Samples& s = r.samples;
        if (text.empty())
            text =
                "\n| drafts | t/s | without | gain | tokens a round | a round, in plain steps | drafted | "
                "accepted |\n"
                "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        text += fmt::format("| {} | {:.2f} | {:.2f} | {:.2f}x | {:.2f} | {:.2f} | {} | {} |\n", r.test.name(),
                            s.median_rate(), s.plain_rate, s.gain(), s.round_tokens(),
                            s.round_tokens() / s.gain(), s.drafted, s.accepted);
    }
    return text;
}

std::string md_row(const BenchRow& r, const Engine& engine) {
    const Backend& backend = engine.backend();
    const ModelInfo& i = engine.model().info();
    const std::string limit = r.limit > 0 ? fmt::format("{:.1f} %", 100 * r.limit) : "";
    const std::string kernels = r.kernels > 0 ? std::to_string(r.kernels) : "";
    const std::string taint = r.taint.empty()        ? ""
                              : r.taint == "unknown" ? " (clocks unknown)"
                                                     : " (tainted: " + r.taint + ")";
    return fmt::format(
        "| {} {} | {:.2f} MiB | {:.2f} M | {} | {} | {}{} | {:.2f} ± {:.2f} | {:.2f} | {} | {} | {} |\n",
        i.architecture, i.formats, static_cast<double>(i.weight_bytes) / 1048576.0,
        static_cast<double>(i.parameters) / 1e6, backend.name(), backend.threads(), r.test.name(), taint,
        r.samples.mean_rate(), r.samples.stddev_rate(), r.samples.median_rate(), limit, kernels,
        r.samples.output_hash);
}

Json json_row(const BenchRow& r, const Engine& engine, const Ceilings& ceilings) {
    const Backend& backend = engine.backend();
    const ModelInfo& i = engine.model().info();
    Json parts = Json::object();
    for (const auto& [name, value] : r.bytes) parts[name] = std::llround(value);
    std::vector<int64_t> ns;
    std::vector<double> rates;
    double all = 0, deviation = 0;
    for (double s : r.samples.seconds) {
        ns.push_back(static_cast<int64_t>(s * 1e9));
        rates.push_back(static_cast<double>(r.samples.tokens) / s);
        all += s * 1e9;
    }
    const double average = all / static_cast<double>(ns.size());
    for (int64_t v : ns) deviation += (static_cast<double>(v) - average) * (static_cast<double>(v) - average);
    return {
        {"build_commit", QUERN_VERSION},
        {"cpu_info", backend.description()},
        {"backends", backend.name()},
        {"model_filename", i.name},
        {"model_type", i.architecture + " " + i.formats},
        {"dense", dense_format_name(i.dense)},
        {"model_size", i.weight_bytes},
        {"model_n_params", i.parameters},
        {"n_ubatch", engine.memory_plan().steps.prompt_rows},
        {"type_k", kv_name(engine.memory_plan().kv_types.k)},
        {"type_v", kv_name(engine.memory_plan().kv_types.v)},
        {"n_prompt", r.test.prompt},
        {"n_gen", r.test.answer},
        {"n_depth", r.test.depth},
        {"n_parallel", r.test.parallel},
        {"avg_ns", static_cast<int64_t>(average)},
        {"stddev_ns",
         ns.size() > 1 ? static_cast<int64_t>(std::sqrt(deviation / static_cast<double>(ns.size() - 1))) : 0},
        {"avg_ts", r.samples.mean_rate()},
        {"stddev_ts", r.samples.stddev_rate()},
        {"samples_ns", ns},
        {"samples_ts", rates},
        {"median_ts", r.samples.median_rate()},
        {"draft_n", r.samples.drafted},
        {"draft_n_accepted", r.samples.accepted},
        {"plain_ts", r.samples.plain_rate},
        {"output_hash", r.samples.output_hash},
        {"bytes_per_token", std::llround(total(r.bytes))},
        {"bytes_by_component", parts},
        {"limit_percent", 100 * r.limit},
        {"memory_bytes_per_second", ceilings.bytes_per_second},
        {"bf16_product_flops", ceilings.flops},
        {"kernels_per_token", r.kernels},
        {"tainted", r.taint}};
}

std::string csv_line(const Json& row, bool header) {
    std::string line;
    for (const auto& [key, value] : row.items()) {
        if (value.is_structured()) continue;
        line += fmt::format("{}{}", line.empty() ? "" : ",", header ? key : value.dump());
    }
    return line + "\n";
}

}  // namespace quern
