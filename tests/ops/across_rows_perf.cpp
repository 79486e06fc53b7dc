// Times of the ops that look across rows, in the 35B's shape: a table. Several nodes a plan, each with state
// of its own, so that launches overlap and caches are as cold as in a model.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ggml-like/ops/gated_attention.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr int kRuns = 12;

/// Microseconds a node: the median of some runs.
double time_of(const Device& device, Graph g, const Batch& b, const Layout& l, int nodes) {
    Plan plan(std::move(g), *device.backend);
    std::vector<double> times;
    for (int run = 0; run < kRuns; ++run) {
        fill_batch(plan, b, l);
        device.backend->synchronize();
        const auto start = std::chrono::steady_clock::now();
        plan.run();
        device.backend->synchronize();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
        times.push_back(took.count() / nodes);
    }
    std::nth_element(times.begin() + 2, times.begin() + 2 + (kRuns - 2) / 2, times.end());
    return times[2 + (kRuns - 2) / 2];
}

Layout layout_of(StepKind kind, int sequences, int rows, int before) {
    const auto count = static_cast<size_t>(sequences);
    Layout l{.rows = std::vector<int>(count, rows),
             .before = std::vector<int>(count, before),
             .slots = {},
             .committed = std::vector<int>(count, 0),
             .journal = std::vector<int>(count, 0),
             .pages_each = (before + rows) / kPageTokens + 1,
             .kind = kind};
    for (int s = 0; s < sequences; ++s) l.slots.push_back(s);
    return l;
}

void fill_random(Guarded& g, unsigned seed) {
    const auto some = Random(seed).normals(65'521);
    std::vector<float> all(static_cast<size_t>(g.tensor().elements()));
    for (size_t i = 0; i < all.size(); ++i) all[i] = some[i % some.size()];
    g.set(all);
}

double attention_time(const Device& device, const Layout& l, int nodes) {
    constexpr int64_t kHeads = 16, kKv = 2, kWidth = 256, kColumns = (2 * kHeads + 2 * kKv) * kWidth;
    const auto pages = static_cast<int64_t>(l.rows.size()) * l.pages_each;
    std::deque<Guarded> memory;
    const auto tensor = [&](DType type, Place place, std::initializer_list<int64_t> shape) {
        fill_random(memory.emplace_back(device, "t", type, place, shape), 5);
        return memory.back().tensor();
    };
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor* in = g.external(tensor(DType::BF16, Place::state, {l.tokens(), kColumns}));
    const auto heads = [&](const char* name, int64_t begin, int64_t count, int64_t step) {
        return g.view(name, in, begin, {l.tokens(), count, kWidth}, {kColumns, step, 1});
    };
    const AttentionInputs inputs{.q = heads("q", 0, kHeads, 2 * kWidth),
                                 .gate = heads("gate", kWidth, kHeads, 2 * kWidth),
                                 .k = heads("k", 2 * kHeads * kWidth, kKv, kWidth),
                                 .v = heads("v", (2 * kHeads + kKv) * kWidth, kKv, kWidth),
                                 .q_norm = g.external(tensor(DType::F32, Place::weight, {kWidth})),
                                 .k_norm = g.external(tensor(DType::F32, Place::weight, {kWidth}))};
    Tensor* y = nullptr;
    std::vector<std::pair<Tensor*, Tensor*>> caches;
    for (int i = 0; i < std::min(nodes, 4); ++i) {
        Tensor* k = g.external(tensor(DType::BF16, Place::state, {pages, kKv, kPageTokens, kWidth}));
        Tensor* v = g.external(tensor(DType::BF16, Place::state, {pages, kKv, kPageTokens, kWidth}));
        caches.emplace_back(k, v);
    }
    for (int i = 0; i < nodes; ++i) {
        const auto& [k, v] = caches[static_cast<size_t>(i) % caches.size()];
        y = gated_attention(g, fmt::format("a{}", i), inputs, k, v, b,
                            {.eps = 1e-6f, .theta = 1e7f, .rotary_dims = 64});
    }
    g.output(y);
    return time_of(device, std::move(g), b, l, nodes);
}

double delta_time(const Device& device, const Layout& l, int nodes, int entries) {
    constexpr int64_t kKeyHeads = 16, kValueHeads = 32, kDim = 128, kTaps = 4;
    constexpr int64_t kChannels = (2 * kKeyHeads + kValueHeads) * kDim,
                      kColumns = kChannels + 2 * kValueHeads + kValueHeads * kDim;
    const auto slots = static_cast<int64_t>(l.rows.size());
    std::deque<Guarded> memory;
    const auto tensor = [&](DType type, Place place, std::initializer_list<int64_t> shape) {
        fill_random(memory.emplace_back(device, "t", type, place, shape), 6);
        return memory.back().tensor();
    };
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor* in = g.external(tensor(DType::BF16, Place::state, {l.tokens(), kColumns}));
    std::vector<float> rates(kValueHeads, -0.2f);
    Guarded& rate = memory.emplace_back(device, "rate", DType::F32, Place::weight,
                                        std::initializer_list<int64_t>{kValueHeads});
    rate.set(rates);
    const DeltaInputs inputs{.u = g.columns("u", in, 0, kChannels),
                             .a = g.columns("a", in, kChannels, kValueHeads),
                             .b = g.columns("b", in, kChannels + kValueHeads, kValueHeads),
                             .conv = g.external(tensor(DType::F32, Place::weight, {kChannels, kTaps})),
                             .decay_rate = g.external(rate.tensor()),
                             .dt_bias = g.external(tensor(DType::F32, Place::weight, {kValueHeads})),
                             .z = g.view("z", in, kChannels + 2 * kValueHeads,
                                         {l.tokens(), kValueHeads, kDim}, {kColumns, kDim, 1}),
                             .norm = g.external(tensor(DType::F32, Place::weight, {kDim}))};
    std::vector<DeltaState> states;
    for (int i = 0; i < std::min(nodes, 8); ++i) {
        DeltaState s;
        s.conv = g.external(
            tensor(DType::BF16, Place::state, {slots, kTaps - 1 + std::max(entries, 1), kChannels}));
        s.delta = g.external(tensor(DType::F32, Place::state, {slots, kValueHeads, kDim, kDim}));
        if (entries > 0) {
            s.journal_k = g.external(tensor(DType::F32, Place::state, {slots, entries, kKeyHeads, kDim}));
            s.journal_u = g.external(tensor(DType::F32, Place::state, {slots, entries, kValueHeads, kDim}));
            s.journal_g = g.external(tensor(DType::F32, Place::state, {slots, entries, kValueHeads, 1}));
        }
        states.push_back(s);
    }
    Tensor* y = nullptr;
    for (int i = 0; i < nodes; ++i)
        y = conv_gated_delta_net(g, fmt::format("d{}", i), inputs,
                                 states[static_cast<size_t>(i) % states.size()], b,
                                 {16, 32, 128, 128, 1e-6f});
    g.output(y);
    return time_of(device, std::move(g), b, l, nodes);
}

void print(const char* op, const Layout& l, const char* remark, double time) {
    fmt::print("{:<10} {:<7} sequences {:>3}  rows {:>5}  after {:>6} {:<24} {:>9.2f} us\n", op,
               l.kind == StepKind::answer ? "answer" : "prompt", l.rows.size(), l.tokens(), l.before[0],
               remark, time);
    std::fflush(stdout);
}

void across_rows(Device& device) {
    for (const auto& [rows, depth] : {std::pair{1, 0},
                                      {1, 200},
                                      {8, 200},
                                      {32, 200},
                                      {64, 200},
                                      {16, 4000},
                                      {64, 2000},
                                      {1, 32000},
                                      {8, 32000}}) {
        const Layout l = layout_of(StepKind::answer, rows, 1, depth);
        print("attention", l, "", attention_time(device, l, 40));
    }
    for (const auto& [rows, depth] : {std::pair{2048, 0},
                                      {2048, 8192},
                                      {2048, 32768},
                                      {512, 30720},
                                      {200, 30720},
                                      {128, 30720},
                                      {60, 30720},
                                      {1, 30720},
                                      {128, 0},
                                      {1, 0}}) {
        const Layout l = layout_of(StepKind::prompt, 1, rows, depth);
        print("attention", l, "", attention_time(device, l, 8));
    }
    for (const int rows : {1, 8, 32, 64}) {
        const Layout l = layout_of(StepKind::answer, rows, 1, 200);
        print("delta", l, "", delta_time(device, l, 40, 0));
    }
    for (const auto& [sequences, committed] : {std::pair{1, 0}, {1, 3}, {8, 3}}) {
        Layout l = layout_of(StepKind::answer, sequences, 4, 200);
        std::fill(l.journal.begin(), l.journal.end(), 1);
        std::fill(l.committed.begin(), l.committed.end(), committed);
        try {
            print("delta", l, committed > 0 ? "journal, 3 committed" : "journal",
                  delta_time(device, l, 40, 4));
        } catch (const std::exception& e) {
            fmt::print("delta: {}\n", e.what());
        }
    }
    for (const int rows : {1, 64, 128, 2048}) {
        const Layout l = layout_of(StepKind::prompt, 1, rows, 64);
        print("delta", l, "", delta_time(device, l, 8, 0));
    }
}

}  // namespace

TEST_SUITE("perf") {
    TEST_CASE("gated_attention, conv_gated_delta_net: times (CUDA)") { on_cuda(across_rows); }
}
