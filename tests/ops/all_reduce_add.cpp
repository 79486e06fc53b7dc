// all_reduce_add: sums over ranks in their order, what follows them against plain sums and double, and ranks that fail.
#include "ggml-like/ops/all_reduce_add.h"

#include <chrono>
#include <thread>

#include "ggml-like/backend_group.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
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

/// residual + (the parts in the order of the ranks), in FP32; `rounded`: each part is rounded to BF16 first.
std::vector<float> sum_of(const std::vector<float>& residual, const std::vector<std::vector<float>>& parts,
                          bool rounded) {
    const auto part = [&](float v) { return rounded ? bf16_to_float(float_to_bf16(v)) : v; };
    std::vector<float> sum;
    for (size_t i = 0; i < residual.size(); ++i) {
        float total = part(parts[0][i]);
        for (size_t r = 1; r < parts.size(); ++r) total += part(parts[r][i]);
        sum.push_back(residual[i] + total);
    }
    return sum;
}

std::vector<float> norm_of(int64_t width) {
    std::vector<float> norm;
    for (int64_t i = 0; i < width; ++i) norm.push_back(0.5f + static_cast<float>(i % 7) / 8);
    return norm;
}

/// A rank's plan: x' of its part, and x'' of x' as the part.
struct TwoSums {
    TwoSums(Backend& backend, StepKind kind, int64_t rows, int64_t width) {
        Graph g;
        part = g.input("part", DType::F32, {rows, width});
        residual = g.input("residual", DType::F32, {rows, width});
        norm = g.input("norm", DType::F32, {width});
        const NextNorm next{norm, backend.activation_dtype(), kind};
        const Residual sum = all_reduce_add(g, "first", part, residual, next);
        first = sum.x;
        ended = {sum.x, sum.h, sum.squares};
        second = all_reduce_add(g, "second", first, residual, next).x;
        for (Tensor* t : ended) g.output(t);
        g.output(second);
        plan = std::make_unique<Plan>(std::move(g), backend);
    }
    void fill(const std::vector<float>& own, const std::vector<float>& before) {
        set_input(*plan, part, own);
        set_input(*plan, residual, before);
        set_input(*plan, norm, norm_of(norm->shape[0]));
    }

    Tensor *part, *residual, *norm, *first, *second;
    std::vector<Tensor*> ended;  // x' and what the next norm needs of it
    std::unique_ptr<Plan> plan;
};

void check_numbers(const char* what, const std::vector<double>& found, const std::vector<float>& expected) {
    REQUIRE(found.size() == expected.size());
    const std::vector<double> wide(expected.begin(), expected.end());
    check_bits(what, "the sum is", found.data(), wide.data(), static_cast<int64_t>(wide.size()));
}

void check_sums(Backend& group, StepKind kind, int64_t rows, int64_t width) {
    const int ranks = group.ranks();
    CAPTURE(ranks);
    CAPTURE(kind_name(kind));
    CAPTURE(rows);
    const auto parts = parts_of(ranks, rows * width, static_cast<unsigned>(rows));
    const bool rounded = kind == StepKind::prompt && group.of_rank(0).activation_dtype() == DType::BF16;
    const std::vector<float> residual = Random(99).normals(rows * width),
                             expected = sum_of(residual, parts, rounded),
                             again = sum_of(residual, std::vector(parts.size(), expected), rounded);
    std::vector<std::vector<double>> first(parts.size()), second(parts.size());
    std::vector<std::unique_ptr<TwoSums>> sums(parts.size());
    group.on_ranks([&](int rank) {
        sums[static_cast<size_t>(rank)] = std::make_unique<TwoSums>(group.of_rank(rank), kind, rows, width);
    });
    for (int turn = 0; turn < 3; ++turn) {
        group.on_ranks([&](int rank) {
            const auto r = static_cast<size_t>(rank);
            if (turn == 1) std::this_thread::sleep_for(std::chrono::milliseconds(3 * rank));
            sums[r]->fill(parts[r], residual);
            sums[r]->plan->run();
            first[r] = download(group.of_rank(rank), *sums[r]->first);
            second[r] = download(group.of_rank(rank), *sums[r]->second);
        });
        for (size_t r = 0; r < parts.size(); ++r) {
            CAPTURE(r);
            check_numbers("x'", first[r], expected);
            check_numbers("x''", second[r], again);
        }
    }
}

using Rows = std::vector<std::vector<double>>;  // of each tensor of TwoSums::ended

/// The first rows of a prompt, of the last rank, where `rows` of them are added up.
Rows first_rows(Backend& group, int64_t rows, int64_t width, int64_t first,
                const std::vector<std::vector<float>>& parts, const std::vector<float>& residual) {
    Rows found;
    group.on_ranks([&](int rank) {
        Backend& own = group.of_rank(rank);
        const auto head = [&](const std::vector<float>& all) {
            return std::vector<float>(all.begin(), all.begin() + rows * width);
        };
        TwoSums sums(own, StepKind::prompt, rows, width);
        sums.fill(head(parts[static_cast<size_t>(rank)]), head(residual));
        sums.plan->run();
        if (rank != group.ranks() - 1) return;
        for (const Tensor* t : sums.ended) {
            found.push_back(download(own, *t));
            found.back().resize(static_cast<size_t>(first * t->elements() / rows));
        }
    });
    return found;
}

/// h and squares of a prompt's rows are those of their x'.
void check_ended(const Rows& rows, int64_t width, bool rounded) {
    const std::vector<double>&x = rows[0], &h = rows[1], &squares = rows[2];
    const std::vector<float> norm = norm_of(width);
    for (size_t t = 0; t < squares.size(); ++t) {
        double sum = 0;
        for (size_t i = 0; i < norm.size(); ++i) {
            const size_t at = t * norm.size() + i;
            const float scaled = static_cast<float>(x[at]) * norm[i];
            const double expected = rounded ? bf16_to_float(float_to_bf16(scaled)) : scaled;
            if (h[at] != expected) FAIL_CHECK("h " << at << " is " << h[at] << ", expected " << expected);
            sum += x[at] * x[at];
        }
        if (!(std::fabs(squares[t] - sum) <= 1e-5 * sum))
            FAIL_CHECK("squares " << t << " are " << squares[t] << ", expected " << sum);
    }
}

/// A row's x', h and squares are the same bits beside few rows and beside many.
void check_rows_alone(Backend& group, int64_t few, int64_t many, int64_t width) {
    CAPTURE(many);
    CAPTURE(width);
    const auto parts = parts_of(group.ranks(), many * width, 5);
    const std::vector<float> residual = Random(98).normals(many * width);
    const Rows found = first_rows(group, few, width, few, parts, residual);
    CHECK(found == first_rows(group, many, width, few, parts, residual));
    const bool rounded = group.of_rank(0).activation_dtype() == DType::BF16;
    check_ended(found, width, rounded);
    check_ended(first_rows(group, many, width, many, parts, residual), width, rounded);
}

/// The outputs of all_reduce_add for these rows: x', h, squares and, with a router, logits.
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
        const Residual out = all_reduce_add(g, "x", part, before, norm.next(g, device, kind),
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

void add_rows(Device& device) {
    for (const StepKind kind : kKinds)
        for (const auto& shape : {std::pair<int64_t, int64_t>{256, 0}, {48, 7}, {2048, 256}, {5120, 0}}) {
            const int64_t width = shape.first, experts = shape.second;
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

DEVICE_TEST_CASE("all_reduce_add: the sum, what the norm and the router need of it, and rows alone", add_rows)

TEST_SUITE("cpu") {
    TEST_CASE("all_reduce_add adds in the order of the ranks, whoever comes last") {
        for (const int ranks : {2, 3, 4}) {
            const auto group = make_cpu_backends(2, ranks);
            for (const StepKind kind : kKinds)
                for (const int64_t rows : {1, 5}) check_sums(*group, kind, rows, 50);
            check_rows_alone(*group, 3, 20, 50);
        }
    }

    TEST_CASE("all_reduce_add: a rank that fails wakes those that wait, and the next step works") {
        const auto group = make_cpu_backends(3, 3);
        const auto begun = std::chrono::steady_clock::now();
        CHECK_THROWS_WITH_AS(group->on_ranks([&](int rank) {
            if (rank == 1) throw Error(ErrorKind::runtime, "no part");
            TwoSums(group->of_rank(rank), StepKind::answer, 1, 16).plan->run();
        }),
                             "no part", Error);
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(1));
        check_sums(*group, StepKind::answer, 2, 16);
    }

    TEST_CASE("all_reduce_add: parts and residuals that do not fit are refused") {
        Graph g;
        const NextNorm next{g.input("norm", DType::F32, {16}), DType::F32, StepKind::answer};
        Tensor* x = g.input("x", DType::F32, {2, 16});
        CHECK_THROWS_AS(all_reduce_add(g, "y", g.input("a", DType::BF16, {2, 16}), x, next), Error);
        CHECK_THROWS_AS(all_reduce_add(g, "y", g.input("b", DType::F32, {3, 16}), x, next), Error);
        CHECK_THROWS_AS(all_reduce_add(g, "y", x, g.input("c", DType::F32, {2, 32}), next), Error);
    }
}

TEST_SUITE("gpus") {
    TEST_CASE("all_reduce_add on two to four GPUs: messages in packets and in chunks") {
        std::vector<int> devices = {0, 1};
        while (devices.size() < 4 && cuda_unavailable(static_cast<int>(devices.size())).empty())
            devices.push_back(static_cast<int>(devices.size()));
        for (const bool peer_access : {true, false}) {
            const auto group = make_cuda_backends(devices, {.peer_access = peer_access});
            const std::string description = group->description();
            MESSAGE(description);
            CHECK((description.find("host memory") == std::string::npos) == peer_access);
            // Kinds and sizes take turns, since they share mailboxes.
            for (const int64_t rows : {1, 64, 3, 65, 1, 500, 2, 2048, 64})
                for (const StepKind kind : kKinds)
                    for (const int64_t width : {2048, 5120})
                        if (kind == StepKind::prompt || rows <= 65) check_sums(*group, kind, rows, width);
            if (!peer_access) continue;
            for (const int64_t width : {2048, 5120})
                for (const int64_t rows : {200, 1001, 4100}) check_rows_alone(*group, 60, rows, width);
        }
    }
}
