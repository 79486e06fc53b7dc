#include "tools/bench/roofline.h"

#include <algorithm>
#include <chrono>
#include <string_view>

#include "ggml-like/backend.h"
#include "ggml-like/ops/norm_linear.h"
#include "models/model.h"
#include "tools/bench/measure.h"
#include "tools/common/copy_speed.h"

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

double product_flops(Backend& backend, int64_t rows, int64_t size) {
    Weight weight("ceiling", {{.name = "ceiling", .dtype = DType::BF16, .rows = size, .cols = size}});
    backend.place_weight(weight, RowOrder::stacked);
    backend.weights_complete();
    Graph g;
    const DType activation = backend.activation_dtype();
    const Residual in{.h = g.input("h", activation, {rows, size}),
                      .squares = g.input("squares", DType::F32, {rows, 1})};
    g.output(norm_linear(g, "y", in, weight, 1e-6f, StepKind::prompt, activation));
    Plan plan(std::move(g), backend);
    plan.run();
    const double seconds = fastest(backend, 5, [&] { backend.run(plan); });
    return 2.0 * static_cast<double>(rows) * static_cast<double>(size * size) / seconds;
}

}  // namespace

Ceilings measure_ceilings(Backend& backend) {
    if (!backend.memory_info().exact)
        return {read_bandwidth(backend.threads()), product_flops(backend, 256, 2048)};
    return {measure_copy_speed(backend), product_flops(backend, 4096, 4096)};
}

double token_flops(const Model& model) {
    double flops = 0;
    for (const WeightUse& use : model.weights().uses) {
        const std::string_view group = use.group;
        if (use.vector != nullptr || group == "embedding" || group == "head") continue;
        flops += 2 * use.share(1) * static_cast<double>(use.parameters());
    }
    return flops;
}

}  // namespace quern
