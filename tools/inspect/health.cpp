#include "tools/inspect/health.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/parallel.h"
#include "models/scale_rules.h"
#include "models/tensor_names.h"
#include "tools/common/loading.h"

namespace quern {
namespace {

// Shares above which something is worth a word.
constexpr double kManySubnormal = 0.01, kManySaturated = 0.01, kManyOutliers = 0.001, kManyZero = 0.1;
// A sound quantizer leaves no block unfilled, and signs balance but for chance.
constexpr double kManyUnfilled = 0.001, kLopsided = 0.05, kOddUse = 0.25;
constexpr int64_t kEnoughValues = 4096;  // for a judgement on the use of codes
constexpr float kUnusedRange = nvfp4::kMaxScale / 16;

double share(int64_t part, int64_t all) {
    return all == 0 ? 0 : static_cast<double>(part) / static_cast<double>(all);
}

std::string percent(int64_t part, int64_t all) { return fmt::format("{:.2f} %", 100 * share(part, all)); }

/// All matrices with their places.
std::vector<MatrixHealth> list_matrices(const Qwen36MoeWeights& w) {
    std::vector<MatrixHealth> out;
    const auto add = [&](const Weight& weight, int64_t layer, Role role, bool expert = false) {
        for (const WeightSegment& s : weight.segments) {
            MatrixHealth& m = out.emplace_back();
            m.segment = &s;
            m.layer = layer;
            m.role = role;
            m.expert = expert;
        }
    };
    for (size_t i = 0; i < w.layers.size(); ++i) {
        const LayerWeights& l = w.layers[i];
        const auto layer = static_cast<int64_t>(i);
        add(l.attention.in_proj, layer, Role::in);
        add(l.delta.in_proj, layer, Role::in);
        add(l.attention.out_proj, layer, Role::out);
        add(l.delta.out_proj, layer, Role::out);
        add(l.moe.router, layer, Role::router);
        for (const Weight& e : l.moe.gate_up.expert) add(e, layer, Role::expert_gate_up, true);
        for (const Weight& e : l.moe.down.expert) add(e, layer, Role::expert_down, true);
        add(l.moe.shared_gate_up, layer, Role::shared);
        add(l.moe.shared_down, layer, Role::shared);
        add(l.mlp.gate_up, layer, Role::mlp);
        add(l.mlp.down, layer, Role::mlp);
    }
    add(w.embedding, -1, Role::ends);
    if (w.head.segments[0].data != w.embedding.segments[0].data) add(w.head, -1, Role::ends);
    return out;
}

const SafeTensor* tensor(const Checkpoint& c, const std::string& name) {
    const uint32_t i = c.find(name);
    return i == Checkpoint::kNone ? nullptr : c.tensors()[i].tensor;
}

std::vector<float> floats_of(const SafeTensor& t) {
    std::vector<float> floats(static_cast<size_t>(t.elements()));
    to_floats(t, floats.data());
    return floats;
}

/// The global scale of an NVFP4 matrix; the segments of a stacked tensor are called "module[number]...".
std::string judge_nvfp4_scale(const Checkpoint& c, MatrixHealth& m) {
    const WeightSegment& s = *m.segment;
    const size_t bracket = s.name.find('[');
    const std::string module = s.name.substr(0, bracket);
    const size_t number = bracket == std::string::npos ? 0 : std::stoul(s.name.substr(bracket + 1));
    const SafeTensor* divisor = tensor(c, module + ".weight_global_scale");
    const std::vector<float> scales =
        floats_of(divisor != nullptr ? *divisor : *tensor(c, module + ".weight_scale_2"));
    return read_global_scale(
        scales[std::min(number, scales.size() - 1)],
        {static_cast<const std::byte*>(s.data), static_cast<size_t>(s.rows * s.cols / 2)},
        divisor != nullptr ? GlobalForm::divisor : GlobalForm::multiplier, m.global_scale);
}

void judge_global_scale(const Checkpoint& c, MatrixHealth& m) {
    const std::string& name = m.segment->name;
    std::string problem;
    if (m.segment->scale_kind == ScaleKind::nvfp4) {
        problem = judge_nvfp4_scale(c, m);
    } else if (m.segment->dtype == DType::F8_E4M3) {
        const SafeTensor* scale = tensor(c, name + ".weight_scale");
        if (scale == nullptr) scale = tensor(c, name + ".weight_scale_inv");
        const std::vector<float> floats = floats_of(*scale);
        problem = check_fp8_scales(*m.segment, floats);
        m.global_scale = *std::max_element(floats.begin(), floats.end());
    }
    if (!problem.empty()) m.findings.push_back({Grade::f, "scale: " + problem});
}

void judge_blocks(MatrixHealth& m) {
    const SegmentStats& s = m.stats;
    const auto say = [&](Grade grade, std::string text) { m.findings.push_back({grade, std::move(text)}); };
    if (s.bad_scales > 0) say(Grade::f, fmt::format("{} block scales are NaN or negative", s.bad_scales));
    if (s.erased > 0)
        say(s.erased == s.blocks ? Grade::f : Grade::d,
            fmt::format("{} of the blocks have a zero scale over codes that are not zero",
                        percent(s.erased, s.blocks)));
    if (share(s.unfilled, s.blocks) > kManyUnfilled)
        say(Grade::d,
            fmt::format("{} of the blocks do not use their range: codes shifted against their blocks, or "
                        "permuted?",
                        percent(s.unfilled, s.blocks)));
    if (share(s.subnormal, s.blocks) > kManySubnormal)
        say(Grade::c, fmt::format("{} of the block scales are subnormal: few bits left",
                                  percent(s.subnormal, s.blocks)));
    if (share(s.saturated, s.blocks) > kManySaturated && s.blocks >= 1000)
        say(Grade::c, fmt::format("{} of the block scales are saturated at 448: clipped weights",
                                  percent(s.saturated, s.blocks)));
    if (share(s.outliers, s.blocks) > kManyOutliers)
        say(Grade::b,
            fmt::format("{} of the blocks are more than 16 times the median", percent(s.outliers, s.blocks)));
    if (share(s.zero_scales - s.erased, s.blocks) > kManyZero && !s.dead())
        say(Grade::b, fmt::format("{} of the blocks are zero", percent(s.zero_scales, s.blocks)));
    if (s.largest_scale < kUnusedRange && !s.dead())
        say(Grade::c,
            fmt::format("the largest block scale is {:.3g} of 448: the range of the scales is not used",
                        s.largest_scale));
}

void judge_codes(MatrixHealth& m) {
    const SegmentStats& s = m.stats;
    if (s.values < kEnoughValues || s.dead()) return;
    const double chance = 5 / std::sqrt(static_cast<double>(s.values));
    if (s.sign_bias() > std::max(kLopsided, chance))
        m.findings.push_back(
            {Grade::d, fmt::format("one sign outnumbers the other by {:.0f} % of the codes: permuted "
                                   "nibbles?",
                                   100 * s.sign_bias())});
    if (s.code_distance() > kOddUse)
        m.findings.push_back(
            {Grade::c, fmt::format("unusual use of the 16 codes (distance {:.2f} from that of normal "
                                   "values): permuted nibbles?",
                                   s.code_distance())});
}

void judge(const Checkpoint& c, MatrixHealth& m) {
    judge_global_scale(c, m);
    if (m.segment->scale_kind == ScaleKind::nvfp4) {
        judge_blocks(m);
        judge_codes(m);
    }
    if (m.stats.bad_values > 0)
        m.findings.push_back({Grade::f, fmt::format("{} values are NaN or Inf", m.stats.bad_values)});
    if (m.stats.dead()) m.findings.push_back({Grade::c, "dead: all values are zero"});
    if (m.role == Role::ends && m.segment->scale_kind == ScaleKind::nvfp4 &&
        m.segment->name.ends_with("embed_tokens"))
        m.findings.push_back({Grade::c, "the embedding is quantized to 4 bits"});
}

/// Projections that other engines fuse should share a global scale: those take one for all.
void judge_siblings(std::vector<MatrixHealth>& all) {
    for (size_t i = 1; i < all.size(); ++i) {
        MatrixHealth &a = all[i - 1], &b = all[i];
        if (a.segment->scale_kind != ScaleKind::nvfp4 || b.segment->scale_kind != ScaleKind::nvfp4) continue;
        if (a.global_scale == b.global_scale) continue;
        if (fused_name(a.segment->name) != fused_name(b.segment->name)) continue;
        b.findings.push_back(
            {Grade::b,
             fmt::format("global scale {:.3g}, of {} {:.3g}: engines that fuse them take one", b.global_scale,
                         a.segment->name.substr(a.segment->name.rfind('.') + 1), a.global_scale)});
    }
}

void find_duplicates(HealthReport& report) {
    std::map<std::tuple<uint64_t, int64_t, int64_t>, const MatrixHealth*> seen;
    for (MatrixHealth& m : report.matrices) {
        if (!m.expert || m.stats.hash == 0) continue;
        if (m.stats.dead()) {
            ++report.dead;
            continue;
        }
        const auto [at, fresh] = seen.emplace(std::tuple{m.stats.hash, m.segment->rows, m.segment->cols}, &m);
        if (fresh) continue;
        ++report.duplicates;
        m.findings.push_back({Grade::d, "the same codes and scales as " + at->second->segment->name});
    }
}

void measure_all(const Checkpoint& checkpoint, HealthReport& report, int threads) {
    std::vector<size_t> order(report.matrices.size());  // largest first: none is left for the end
    std::iota(order.begin(), order.end(), size_t{0});
    const auto bytes = [&](size_t i) { return report.matrices[i].segment->bytes(); };
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return bytes(a) > bytes(b); });
    ProgressBar bar("reading");
    std::mutex mutex;
    LoadProgress progress{.bytes_done = 0, .bytes_total = report.bytes};
    for_each_parallel(threads, order.size(), [&](size_t i) {
        MatrixHealth& m = report.matrices[order[i]];
        m.stats = measure_segment(*m.segment);
        judge(checkpoint, m);
        const std::lock_guard lock(mutex);
        progress.bytes_done += bytes(order[i]);
        bar.update(progress);
    });
}

}  // namespace

Grade MatrixHealth::grade() const {
    Grade worst = Grade::a;
    for (const Finding& f : findings) worst = std::max(worst, f.grade);
    return worst;
}

float MatrixHealth::amax() const {
    if (segment->scale_kind == ScaleKind::nvfp4) return nvfp4::kMaxCode * stats.largest_scale * global_scale;
    return stats.largest_value * global_scale;
}

Grade HealthReport::grade(int64_t layer) const {
    Grade worst = Grade::a;
    for (const MatrixHealth& m : matrices)
        if (m.layer == layer) worst = std::max(worst, m.grade());
    return worst;
}

bool HealthReport::cell(int64_t layer, Role role, Grade& grade) const {
    bool found = false;
    grade = Grade::a;
    for (const MatrixHealth& m : matrices) {
        if (m.layer != layer || m.role != role) continue;
        found = true;
        grade = std::max(grade, m.grade());
    }
    return found;
}

bool HealthReport::clean() const {
    return std::none_of(matrices.begin(), matrices.end(),
                        [](const auto& m) { return m.grade() == Grade::f; });
}

std::vector<size_t> HealthReport::worst(size_t count) const {
    std::vector<size_t> order;
    for (size_t i = 0; i < matrices.size(); ++i)
        if (!matrices[i].findings.empty()) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        const MatrixHealth &x = matrices[a], &y = matrices[b];
        return std::pair(x.grade(), x.findings.size()) > std::pair(y.grade(), y.findings.size());
    });
    if (order.size() > count) order.resize(count);
    return order;
}

HealthReport measure_health(const Inspection& in, int threads) {
    CHECK(in.failure.empty(), "[measure_health] the checkpoint was not read");
    const auto start = std::chrono::steady_clock::now();
    HealthReport report{.matrices = list_matrices(in.weights), .layers = in.config.layers};
    for (const MatrixHealth& m : report.matrices) report.bytes += m.segment->bytes();
    measure_all(in.checkpoint, report, threads);
    judge_siblings(report.matrices);
    find_duplicates(report);
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report;
}

}  // namespace quern
