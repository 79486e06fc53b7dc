// all_reduce over ranks, against sums in the order of the ranks; residual_add after it, against plain sums and double.
#include "ggml-like/ops/all_reduce.h"

#include <array>
#include <chrono>
#include <thread>

#include "ggml-like/backend_group.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "ggml-like/ops/residual_add.h"
#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

/// Numbers of many sizes, so that another order of additions has other bits.
std::vector<std::vector<float>> parts_of(int ranks, int64_t count, unsigned seed) {
    std::vector<std::vector<float>> parts;
    for (int r = 0; r < ranks; ++r) {
        parts.push_back(Random(seed + static_cast<unsigned>(r)).normals(count));
        for (size_t i = 0; i < parts.back().size(); ++i)
            parts.back()[i] = std::ldexp(parts.back()[i], static_cast<int>(i * 7 % 24));
    }
    return parts;
}

std::vector<double> sum_of(const std::vector<std::vector<float>>& parts) {
    std::vector<double> sum;
    for (size_t i = 0; i < parts[0].size(); ++i) {
        float total = parts[0][i];
        for (size_t r = 1; r < parts.size(); ++r) total += parts[r][i];
        sum.push_back(total);
    }
    return sum;
}

/// A chain of sums on all ranks: of the parts, and of that sum again.
void check_sums(Backend& group, int64_t rows, int64_t width) {
    const int ranks = group.ranks();
    CAPTURE(ranks);
    CAPTURE(rows);
    const auto parts = parts_of(ranks, rows * width, static_cast<unsigned>(rows));
    const std::vector<double> expected = sum_of(parts);
    std::vector<std::vector<double>> once(static_cast<size_t>(ranks)), twice(once);
    std::vector<std::unique_ptr<Plan>> plans(static_cast<size_t>(ranks));
    std::vector<std::array<Tensor*, 3>> tensors(static_cast<size_t>(ranks));
    group.on_ranks([&](int rank) {
        const auto r = static_cast<size_t>(rank);
        Graph g;
        Tensor* x = g.input("x", DType::F32, {rows, width});
        Tensor* y = all_reduce(g, "y", x);
        Tensor* z = all_reduce(g, "z", y);
        g.output(y);
        g.output(z);
        plans[r] = std::make_unique<Plan>(std::move(g), group.of_rank(rank));
        tensors[r] = {x, y, z};
    });
    for (int turn = 0; turn < 3; ++turn) {
        group.on_ranks([&](int rank) {
            const auto r = static_cast<size_t>(rank);
            if (turn == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3 * rank));
            set_input(*plans[r], tensors[r][0], parts[r]);
            plans[r]->run();
            once[r] = download(group.of_rank(rank), *tensors[r][1]);
            twice[r] = download(group.of_rank(rank), *tensors[r][2]);
        });
        for (int rank = 0; rank < ranks; ++rank) {
            CAPTURE(rank);
            const auto r = static_cast<size_t>(rank);
            check_bits("sum", "added in the order of the ranks", once[r].data(), expected.data(),
                       rows * width);
            std::vector<std::vector<float>> again(static_cast<size_t>(ranks));
            for (auto& part : again) part.assign(expected.begin(), expected.end());
            check_bits("sum of sums", "expected", twice[r].data(), sum_of(again).data(), rows * width);
        }
    }
}

/// The outputs of residual_add for these rows: x', h, squares and, with a router, logits.
struct AddTest {
    AddTest(const Device& d, StepKind k, int64_t width, int64_t experts, int64_t most)
        : device(d), kind(k), store(7), norm(d, 3, width), y(1, width, most), residual(2, width, most) {
        if (experts > 0) router.emplace(d, store, experts, width);
    }

    StepOutputs run(const std::vector<int64_t>& rows) const {
        const auto n = static_cast<int64_t>(rows.size()), width = static_cast<int64_t>(norm.values().size());
        Graph g;
        Tensor *part = g.input("y", DType::F32, {n, width}),
               *before = g.input("residual", DType::F32, {n, width});
        const Residual out = residual_add(g, "x", part, before, norm.next(g, device, kind),
                                          router ? &router->weight : nullptr);
        for (Tensor* t : {out.x, out.h, out.squares}) g.output(t);
        if (router) g.output(out.logits);
        StepOutputs found = run_graph(device, std::move(g), [&](Plan& p) {
            set_input(p, part, y.pick(rows));
            set_input(p, before, residual.pick(rows));
        });
        if (router) found[3] = read_logits(device, kind, found[3], n, router->experts);
        return found;
    }

    void check(int64_t n) {
        const auto rows = step_rows(n);
        const StepOutputs out = run(rows);
        std::vector<double> expected;
        const std::vector<float> a = residual.pick(rows), b = y.pick(rows);
        for (size_t i = 0; i < a.size(); ++i) expected.push_back(a[i] + b[i]);
        check_bits("x'", "the sum is", out[0].data(), expected.data(), static_cast<int64_t>(expected.size()));
        check_deferred(device, kind, norm, n, out[0], out[1], out[2]);
        if (router) check_logits(device, *router, n, out[1], out[3]);
        std::vector<const char*> names = {"x'", "h", "squares"};
        if (router) names.push_back("logits");
        AloneRows(names, [&](const auto& r) { return run(r); }).check(n, out);
    }

    const Device& device;
    StepKind kind;
    WeightStore store;
    Norm norm;
    RowPool y, residual;
    std::optional<Router> router;
};

void residual_add_rows(Device& device) {
    for (const StepKind kind : kKinds)
        for (const auto& [width, experts] :
             {std::pair<int64_t, int64_t>{256, 0}, {48, 7}, {2048, 256}, {5120, 0}}) {
            CAPTURE(kind_name(kind));
            CAPTURE(width);
            const auto counts = row_counts(device, kind, device.exact() && width > 256 ? 17 : 130);
            AddTest test(device, kind, width, experts, 130);
            for (const int64_t n : counts) {
                CAPTURE(n);
                test.check(n);
            }
        }
}

}  // namespace

DEVICE_TEST_CASE("residual_add: the sum, what the norm and the router need of it, and rows alone",
                 residual_add_rows)

TEST_SUITE("cpu") {
    TEST_CASE("all_reduce adds in the order of the ranks, whoever comes last") {
        for (const int ranks : {2, 3, 4}) {
            const auto group = make_cpu_backends(2, ranks);
            for (const int64_t rows : {1, 5}) check_sums(*group, rows, 50);
        }
    }

    TEST_CASE("all_reduce: a rank that fails wakes those that wait, and the next step works") {
        const auto group = make_cpu_backends(3, 3);
        const auto begun = std::chrono::steady_clock::now();
        CHECK_THROWS_WITH_AS(group->on_ranks([&](int rank) {
            if (rank == 1) throw Error(ErrorKind::runtime, "no part");
            Graph g;
            Tensor* x = g.input("x", DType::F32, {1, 16});
            g.output(all_reduce(g, "y", x));
            Plan(std::move(g), group->of_rank(rank)).run();
        }),
                             "no part", Error);
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(1));
        check_sums(*group, 2, 16);
    }

    TEST_CASE("all_reduce: a backend that is no rank, and what is no F32 matrix, are refused") {
        const auto alone = make_cpu_backend(1);
        Graph g;
        g.output(all_reduce(g, "y", g.input("x", DType::F32, {1, 16})));
        Plan plan(std::move(g), *alone);
        CHECK_THROWS_WITH_AS(plan.run(), doctest::Contains("is no rank of several"), Error);
        Graph other;
        CHECK_THROWS_AS(all_reduce(other, "y", other.input("x", DType::BF16, {1, 16})), Error);
    }
}

TEST_SUITE("cuda") {
    /// On one GPU both ranks are on it; with several each has its own.
    TEST_CASE("all_reduce on GPUs: small and large messages, bit for bit (CUDA)") {
        REQUIRE_NOTHROW(make_test_cuda_backend());
        std::vector<int> devices = {0};
        while (devices.size() < 4 && cuda_unavailable(static_cast<int>(devices.size())).empty())
            devices.push_back(static_cast<int>(devices.size()));
        if (devices.size() == 1) devices.push_back(0);
        const auto group = make_cuda_backends(devices);
        MESSAGE(group->description());
        for (const int64_t rows : {1, 3, 64, 65, 500, 2048}) check_sums(*group, rows, 2048);
        for (const int64_t rows : {1, 64, 65, 1000}) check_sums(*group, rows, 5120);
    }
}
