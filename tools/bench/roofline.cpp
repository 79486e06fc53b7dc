#include "tools/bench/roofline.h"

#include <algorithm>
#include <chrono>
#include <string_view>

#include "ggml-like/backend.h"
#include "ggml-like/ops/linear_add.h"
#include "models/model.h"
#include "tools/bench/measure.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;

/// Seconds of the fastest of a few runs: ceilings are what is possible, not what is usual.
template <typename F>
double fastest(Backend& backend, int runs, F&& run) {
    double best = 1e30;
    for (int i = 0; i <= runs; ++i) {
        const auto begin = Clock::now();
        run();
        backend.synchronize();
        const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
        if (i > 0) best = std::min(best, seconds);
    }
    return best;
}

double copy_bandwidth(Backend& backend) {
    constexpr int kCopies = 10;
    const int64_t bytes = std::clamp<int64_t>(backend.memory_info().free_bytes / 4, 1 << 20, 1 << 30);
    const auto take = [&](const char* what) {
        return std::shared_ptr<void>(backend.alloc(bytes, what), [&backend](void* m) { backend.free(m); });
    };
    const auto from = take("a measured copy"), to = take("a measured copy");
    const double seconds = fastest(backend, 3, [&] {
        for (int i = 0; i < kCopies; ++i) backend.copy(to.get(), from.get(), bytes);
    });
    return 2.0 * kCopies * static_cast<double>(bytes) / seconds;
}

double product_flops(Backend& backend, int64_t rows, int64_t size) {
    Weight weight("ceiling", {{.name = "ceiling", .dtype = DType::BF16, .rows = size, .cols = size}});
    backend.place_weight(weight, RowOrder::stacked);
    backend.weights_complete();
    Graph g;
    Tensor* x = g.input("x", backend.activation_dtype(), {rows, size});
    g.output(linear_add(g, "y", x, weight, g.input("residual", DType::F32, {rows, size})));
    Plan plan(std::move(g), backend);
    plan.run();
    const double seconds = fastest(backend, 5, [&] { backend.run(plan); });
    return 2.0 * static_cast<double>(rows) * static_cast<double>(size * size) / seconds;
}

}  // namespace

Ceilings measure_ceilings(Backend& backend) {
    if (!backend.memory_info().exact)
        return {read_bandwidth(backend.threads()), product_flops(backend, 256, 2048)};
    return {copy_bandwidth(backend), product_flops(backend, 4096, 4096)};
}

TokenBytes token_bytes(const Engine& engine, int64_t sequences, double depth) {
    TokenBytes bytes;
    const auto add = [&](const char* name, double value) {
        const auto same = [&](const auto& part) { return part.first == name; };
        const auto part = std::find_if(bytes.begin(), bytes.end(), same);
        if (part == bytes.end())
            bytes.emplace_back(name, value);
        else
            part->second += value;
    };
    for (const WeightUse& use : engine.model().weight_uses())
        add(use.group,
            use.share(sequences) * static_cast<double>(use.bytes()) / static_cast<double>(sequences));
    const MemoryPlan& plan = engine.memory_plan();
    add("KV cache", depth * static_cast<double>(plan.token_bytes));
    add("recurrent state", 2.0 * static_cast<double>(plan.slot_bytes));
    return bytes;
}

double total(const TokenBytes& bytes) {
    double sum = 0;
    for (const auto& [name, value] : bytes) sum += value;
    return sum;
}

double token_flops(const Model& model) {
    double flops = 0;
    for (const WeightUse& use : model.weight_uses()) {
        const std::string_view group = use.group;
        if (use.vector != nullptr || group == "embedding" || group == "head") continue;
        flops += 2 * use.share(1) * static_cast<double>(use.parameters());
    }
    return flops;
}

}  // namespace quern
