// moe_route: the norm, the choice of experts, and the groups made of it.
#include <algorithm>
#include <limits>

#include "ggml-like/error.h"
#include "ggml-like/ops/moe_route.h"
#include "ops/harness.h"
#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;

/// A router [E + 1, D] of F32 rows that BF16 can hold, so that every device sees the same values.
struct Router {
    int64_t experts, width;
    std::vector<float> values;
    std::vector<float> norm;

    Router(int64_t e, int64_t d, unsigned seed) : experts(e), width(d) {
        Random random(seed);
        values = random.normals((e + 1) * d);
        for (float& v : values) v = bf16_to_float(float_to_bf16(0.3f * v));
        norm = random.normals(d);
    }
    void copy_row(int64_t from, int64_t to) {
        std::copy_n(values.begin() + from * width, width, values.begin() + to * width);
    }
    Weight weight() const {
        const auto segment = [&](const char* name, int64_t begin, int64_t rows) {
            return WeightSegment{.name = name,
                                 .dtype = DType::F32,
                                 .rows = rows,
                                 .cols = width,
                                 .data = values.data() + begin * width};
        };
        return Weight("router", {segment("gate", 0, experts), segment("shared_gate", experts, 1)});
    }
};

struct Routed {
    std::vector<double> h, ids, weights, shared, groups;
};

Routed run_route(const Device& device, const Router& router, const std::vector<float>& x, int used) {
    const Weight w = placed(device, router.weight());
    Guarded norm(device, "norm", DType::F32, Place::weight, {router.width});
    norm.set(router.norm);
    Graph g;
    Tensor* in = g.input("x", DType::F32, {static_cast<int64_t>(x.size()) / router.width, router.width});
    const auto r = moe_route(g, "r", in, g.external(norm.tensor()), w, used, kEps, device.activation);
    for (Tensor* t : {r.h, r.ids, r.weights, r.shared, r.groups}) g.output(t);
    auto out = run_graph(device, std::move(g), [&](Plan& p) { set_input(p, in, x); });
    return {out[0], out[1], out[2], out[3], out[4]};
}

std::vector<double> expected_h(const Router& router, const std::vector<float>& x) {
    std::vector<double> h;
    const auto width = static_cast<size_t>(router.width);
    for (size_t begin = 0; begin < x.size(); begin += width) {
        double sum = 0;
        for (size_t i = 0; i < width; ++i) sum += static_cast<double>(x[begin + i]) * x[begin + i];
        const double rms = std::sqrt(sum / static_cast<double>(width) + kEps);
        for (size_t i = 0; i < width; ++i) h.push_back(x[begin + i] / rms * router.norm[i]);
    }
    return h;
}

/// Experts in falling order of logit, ties to the lower id.
std::vector<size_t> order_of(const std::vector<double>& logits) {
    std::vector<size_t> order(logits.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    return order;
}

/// One row, given the h that the op made of it.
void check_row(const Device& device, const Router& router, const double* h, int used, const double* ids,
               const double* weights, double shared) {
    std::vector<double> logits;
    for (int64_t e = 0; e <= router.experts; ++e) {
        double sum = 0;
        for (int64_t i = 0; i < router.width; ++i)
            sum += static_cast<double>(router.values[static_cast<size_t>(e * router.width + i)]) * h[i];
        logits.push_back(sum);
    }
    CHECK(shared == doctest::Approx(1 / (1 + std::exp(-logits.back()))).epsilon(device.bound(1e-5)));
    logits.pop_back();
    const auto order = order_of(logits);
    double total = 0;
    for (int j = 0; j < used; ++j) {
        const double gap = logits[order[static_cast<size_t>(j)]] - logits[order[static_cast<size_t>(j) + 1]];
        if (gap != 0 && gap < 1e-4) return;  // too near for FP32 to tell
        total += std::exp(logits[order[static_cast<size_t>(j)]]);
    }
    for (int j = 0; j < used; ++j) {
        const size_t expert = order[static_cast<size_t>(j)];
        CHECK(ids[j] == static_cast<double>(expert));
        CHECK(weights[j] == doctest::Approx(std::exp(logits[expert]) / total).epsilon(device.bound(1e-5)));
    }
}

std::vector<double> expected_groups(const std::vector<double>& ids, int64_t experts) {
    std::vector<double> offsets = {0}, pairs;
    for (int64_t e = 0; e < experts; ++e) {
        for (size_t i = 0; i < ids.size(); ++i)
            if (ids[i] == static_cast<double>(e)) pairs.push_back(static_cast<double>(i));
        offsets.push_back(static_cast<double>(pairs.size()));
    }
    offsets.insert(offsets.end(), pairs.begin(), pairs.end());
    return offsets;
}

void check_route(const Device& device, const Router& router, int64_t tokens, int used, unsigned seed) {
    CAPTURE(tokens);
    CAPTURE(router.experts);
    const auto x = Random(seed).normals(tokens * router.width);
    const Routed r = run_route(device, router, x, used);
    CHECK(relative_error(r.h, expected_h(router, x)) < device.bound(1e-6));
    for (int64_t t = 0; t < tokens; ++t)
        check_row(device, router, r.h.data() + t * router.width, used, r.ids.data() + t * used,
                  r.weights.data() + t * used, r.shared[static_cast<size_t>(t)]);
    CHECK(r.groups == expected_groups(r.ids, router.experts));
    if (!device.same_bits(tokens)) return;
    for (const int64_t t : some_rows(tokens)) {
        const Routed alone = run_route(device, router, rows_of(x, router.width, t, 1), used);
        CHECK(alone.h == rows_of(r.h, router.width, t, 1));
        CHECK(alone.ids == rows_of(r.ids, used, t, 1));
        CHECK(alone.weights == rows_of(r.weights, used, t, 1));
        CHECK(alone.shared == rows_of(r.shared, 1, t, 1));
    }
}

void route_shapes(Device& device) {
    for (const int64_t tokens : {1, 2, 7, 8, 9, 33, 64, 130}) {
        check_route(device, Router(16, 144, 1), tokens, 4, 5);
        check_route(device, Router(5, 48, 2), tokens, 2, 6);
    }
    for (const int64_t tokens : {9, 64, 65}) check_route(device, Router(256, 256, 3), tokens, 8, 7);
    check_route(device, Router(512, 64, 3), 40, 12, 7);
    check_route(device, Router(3, 32, 4), 3, 1, 8);
}

void route_ties(Device& device) {
    Router twins(12, 64, 9);
    for (const int64_t e : {3, 7, 11}) twins.copy_row(1, e);
    check_route(device, twins, 33, 5, 10);
    Router zero(9, 64, 9);
    std::fill(zero.values.begin(), zero.values.end(), 0.0f);
    const Routed r = run_route(device, zero, Random(11).normals(2 * 64), 4);
    CHECK(r.ids == std::vector<double>{0, 1, 2, 3, 0, 1, 2, 3});
    CHECK(r.weights == std::vector<double>(8, 0.25));
    CHECK(r.shared == std::vector<double>(2, 0.5));
}

void route_nan(Device& device) {
    Router router(6, 64, 12);
    router.values[2 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
    const Routed r = run_route(device, router, Random(13).normals(4 * 64), 5);
    for (int t = 0; t < 4; ++t) {
        auto ids = rows_of(r.ids, 5, t, 1);
        std::sort(ids.begin(), ids.end());
        CHECK(ids == std::vector<double>{0, 1, 3, 4, 5});
    }
}

}  // namespace

DEVICE_TEST_CASE("moe_route: choice, weights and groups", route_shapes)
DEVICE_TEST_CASE("moe_route: ties go to the lower id", route_ties)
DEVICE_TEST_CASE("moe_route: NaN is never chosen", route_nan)

TEST_SUITE("cpu") {
    TEST_CASE("moe_route: fewer finite logits than experts used is an error") {
        Router router(3, 32, 14);
        router.values[5] = std::numeric_limits<float>::quiet_NaN();
        CHECK_THROWS_AS(run_route(cpu_device(), router, Random(15).normals(32), 3), Error);
    }
}
