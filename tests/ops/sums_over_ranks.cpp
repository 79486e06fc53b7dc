// linear_add and moe_down that add up over ranks, against the same products whose parts all_reduce_add adds up: the same bits,
// on every rank, for every number of rows.
#include <array>
#include <chrono>

#include "ggml-like/backend_group.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "ggml-like/ops/all_reduce_add.h"
#include "ggml-like/ops/linear_add.h"
#include "ops/matrix.h"
#include "ops/moe_layer.h"

using namespace quern;
using namespace quern::test;

namespace {

/// A rank's backend as the tests' helpers take one.
class RankDevice {
  public:
    RankDevice(Backend& group, int rank) {
        Backend& own = group.of_rank(rank);
        const DType activation = own.activation_dtype();
        device_ = {std::unique_ptr<Backend>(&own), activation, activation == DType::F32 ? 0 : 1e-2};
    }
    ~RankDevice() { (void)device_.backend.release(); }
    RankDevice(const RankDevice&) = delete;
    const Device& operator*() const { return device_; }

  private:
    Device device_;
};

/// x', h, squares and logits, by both ways.
using BothWays = std::array<std::vector<std::vector<double>>, 2>;

/// Columns of an output that are compared: logits are followed by what nobody reads.
struct Output {
    const Tensor* tensor;
    int64_t columns;

    std::vector<double> read(Backend& backend) const {
        return first_columns(download(backend, *tensor), tensor->shape[0], columns);
    }
};
using Outputs = std::vector<Output>;

Outputs outputs_of(Graph& g, const Residual& r, int64_t logits = 0) {
    Outputs all;
    for (Tensor* t : {r.x, r.h, r.squares}) all.push_back({t, t->shape[1]});
    if (r.logits != nullptr) all.push_back({r.logits, logits});
    for (Tensor* t : {r.x, r.h, r.squares, r.logits})
        if (t != nullptr) g.output(t);
    return all;
}

/// A product that adds up over ranks, whole and with x' of own rows only, and its part that all_reduce_add adds up: x', h, squares
/// and logits, then what each rank's part added to the first and to the second gives.
std::array<Outputs, 2> both_ways(Graph& g, const Residual& whole, const Residual& own, Tensor* part,
                                 const Residual& sum, const NextNorm& next, int64_t logits = 0) {
    std::array<Outputs, 2> ways = {outputs_of(g, whole, logits), outputs_of(g, sum, logits)};
    const Outputs h_of_all = ways[0], h_of_own = outputs_of(g, own, logits);
    for (size_t i = 1; i < h_of_all.size(); ++i) {
        ways[0].push_back(h_of_all[i]);
        ways[1].push_back(h_of_own[i]);
    }
    // Messages of more rows are cut in another way where x' is whole.
    for (size_t w = 0; w < 2 && part->shape[0] <= 300; ++w) {
        Tensor* before = (w == 0 ? whole : own).x;
        for (const Output& o :
             outputs_of(g, all_reduce_add(g, fmt::format("again{}", w), part, before, next)))
            ways[w].push_back(o);
    }
    return ways;
}

/// Runs a graph that has both ways in it, three times: both places of a mailbox, one of them again.
template <typename Fill>
BothWays run_both(Backend& backend, Graph g, const std::array<Outputs, 2>& ways, const Fill& fill) {
    backend.weights_complete();
    Plan plan(std::move(g), backend);
    BothWays found;
    for (int turn = 0; turn < 3; ++turn) {
        fill(plan);
        plan.run();
        for (size_t w = 0; w < 2; ++w) {
            found[w].clear();
            for (const Output& o : ways[w]) found[w].push_back(o.read(backend));
        }
        if (turn < 2) CHECK(found[0] == found[1]);
    }
    return found;
}

struct LinearRanks {
    Form form;
    int64_t rows, width, columns, experts;
    StepKind kind = StepKind::answer;

    BothWays run(const Device& device, int rank) const {
        const auto own = static_cast<unsigned>(rank);
        WeightStore store(10 + own), router_store(3);
        const Weight w = placed(device, random_matrix(store, {form}, {width}, columns).weight);
        std::optional<Router> router;
        if (experts > 0) router.emplace(device, router_store, experts, width);
        const Weight* logits = router ? &router->weight : nullptr;
        const Norm norm(device, 4, width);
        Graph g;
        Tensor *x = g.input("x", device.activation, {rows, columns}),
               *residual = g.input("residual", DType::F32, {rows, width}),
               *zeros = g.zeros("zeros", DType::F32, {rows, width});
        const NextNorm next = norm.next(g, device, kind);
        const Residual whole = linear_add(g, "whole", x, w, residual, next, logits, {zeros}),
                       some = linear_add(g, "own", x, w, residual, next, logits, {zeros, false}),
                       part = linear_add(g, "part", x, w, zeros, next),
                       sum = all_reduce_add(g, "sum", part.x, residual, next, logits);
        const auto ways = both_ways(g, whole, some, part.x, sum, next, experts + 1);
        return run_both(*device.backend, std::move(g), ways, [&](Plan& p) {
            set_input(p, x, device.rounded(Random(20 + own).normals(rows * columns)));
            set_input(p, residual, Random(5).normals(rows * width));
        });
    }
};

struct MixtureRanks {
    moe::Shape shape;
    int64_t rows;
    StepKind kind = StepKind::answer;

    BothWays run(const Device& device, int rank) const {
        const auto own = static_cast<unsigned>(rank);
        const moe::Layer layer(device, shape, 30 + own);
        const Norm norm(device, 4, shape.model);
        const std::vector<float> ones(static_cast<size_t>(shape.model), 1.0f);
        const NormedInput in(device, kind, Random(6).normals(rows * shape.model), ones);
        Graph g;
        Residual normed = in.declare(g, device.activation);
        normed.logits = moe::declare_logits(g, device, kind, rows, shape.experts);
        Tensor *residual = g.input("residual", DType::F32, {rows, shape.model}),
               *zeros = g.zeros("zeros", DType::F32, {rows, shape.model});
        const NextNorm next = norm.next(g, device, kind);
        const auto up = moe_gate_up(g, "up", normed, layer.gate_up, layer.shared_gate_up,
                                    static_cast<int>(shape.used), kEps, kind);
        const Residual whole =
                           moe_down(g, "whole", up, residual, layer.down, layer.shared_down, next, {zeros}),
                       some = moe_down(g, "own", up, residual, layer.down, layer.shared_down, next,
                                       {zeros, false}),
                       part = moe_down(g, "part", up, zeros, layer.down, layer.shared_down, next),
                       sum = all_reduce_add(g, "sum", part.x, residual, next);
        const auto ways = both_ways(g, whole, some, part.x, sum, next);
        return run_both(*device.backend, std::move(g), ways, [&](Plan& p) {
            in.fill(p, normed);
            moe::set_logits(p, normed.logits, moe::make_logits(7, rows, shape.experts), shape.experts);
            set_input(p, residual, Random(5).normals(rows * shape.model));
        });
    }
};

template <typename Case>
void check_ranks(Backend& group, const Case& c) {
    std::vector<BothWays> found(static_cast<size_t>(group.ranks()));
    group.on_ranks([&](int rank) {
        const RankDevice device(group, rank);
        found[static_cast<size_t>(rank)] = c.run(*device, rank);
    });
    for (size_t r = 0; r < found.size(); ++r) {
        CAPTURE(r);
        CHECK(found[r][0] == found[r][1]);
        CHECK(found[r][0] == found[0][0]);
    }
}

constexpr auto kAnswer = StepKind::answer, kPrompt = StepKind::prompt;
/// Kinds and sizes take turns, since they share mailboxes.
constexpr std::pair<StepKind, int64_t> kSteps[] = {{kAnswer, 1},  {kAnswer, 2},  {kPrompt, 3},  {kAnswer, 8},
                                                   {kAnswer, 1},  {kAnswer, 9},  {kPrompt, 70}, {kAnswer, 20},
                                                   {kAnswer, 64}, {kPrompt, 300}};

void linear_ranks(Backend& group, const std::vector<std::array<int64_t, 3>>& shapes) {
    for (const Form form : {Form::bf16, Form::nvfp4, Form::f8_row})
        for (const auto& shape : shapes)
            for (const auto& step : kSteps) {
                const StepKind kind = step.first;
                const int64_t rows = step.second;
                CAPTURE(rows);
                CAPTURE(shape_name({form}, {shape[0]}, shape[1]));
                CAPTURE(kind_name(kind));
                check_ranks(group, LinearRanks{form, rows, shape[0], shape[1], shape[2], kind});
            }
}

void mixture_ranks(Backend& group, const std::vector<moe::Shape>& shapes) {
    for (const moe::Shape& shape : shapes)
        for (const auto& step : kSteps) {
            const StepKind kind = step.first;
            const int64_t rows = step.second;
            CAPTURE(rows);
            CAPTURE(shape.name());
            CAPTURE(kind_name(kind));
            check_ranks(group, MixtureRanks{shape, rows, kind});
        }
}

/// x' of each rank against residual + the sum over all ranks' columns, in double.
void check_against_doubles(Backend& group, const LinearRanks& c) {
    std::vector<BothWays> found(static_cast<size_t>(group.ranks()));
    group.on_ranks([&](int rank) {
        const RankDevice device(group, rank);
        found[static_cast<size_t>(rank)] = c.run(*device, rank);
    });
    const std::vector<float> residual = Random(5).normals(c.rows * c.width);
    std::vector<double> sum(residual.begin(), residual.end()), bound(sum.size());
    for (size_t i = 0; i < sum.size(); ++i) bound[i] = 1e-6 * std::fabs(sum[i]);
    for (unsigned rank = 0; rank < found.size(); ++rank) {
        WeightStore store(10 + rank);
        const Matrix m = random_matrix(store, {c.form}, {c.width}, c.columns);
        const std::vector<float> x = Random(20 + rank).normals(c.rows * c.columns);
        const std::vector<double> wide(x.begin(), x.end());
        for (int64_t t = 0; t < c.rows; ++t)
            for (int64_t i = 0; i < c.width; ++i) {
                const Sum s = row_product(m.values, i, c.columns, wide.data() + t * c.columns);
                const auto at = static_cast<size_t>(t * c.width + i);
                sum[at] += s.value;
                bound[at] += sum_bound(s, c.columns) + 1e-6 * s.magnitude;
            }
    }
    for (const BothWays& ways : found)
        for (size_t i = 0; i < sum.size(); ++i)
            if (!(std::fabs(ways[0][0][i] - sum[i]) <= bound[i]))
                FAIL_CHECK(fmt::format("number {} is {}, expected {}", i, ways[0][0][i], sum[i]));
}

/// Microseconds of a product [2,048, 2,048] of one row, of many one after another, over ranks or not.
double chain_time(Backend& group, bool over_ranks) {
    constexpr int kProducts = 100, kTimes = 20;
    constexpr int64_t kWidth = 2048;
    std::vector<double> found(static_cast<size_t>(group.ranks()));
    group.on_ranks([&](int rank) {
        const RankDevice device(group, rank);
        Backend& backend = *(*device).backend;
        WeightStore store(1);
        const Weight w = placed(*device, random_matrix(store, {Form::nvfp4}, {kWidth}, kWidth).weight);
        const Norm norm(*device, 4, kWidth, 1e-3f);
        Graph g;
        Tensor *first = g.input("x", (*device).activation, {1, kWidth}),
               *residual = g.input("residual", DType::F32, {1, kWidth}),
               *zeros = over_ranks ? g.zeros("zeros", DType::F32, {1, kWidth}) : nullptr;
        const NextNorm next = norm.next(g, *device, StepKind::answer);
        Residual x{.x = residual, .h = first};
        for (int i = 0; i < kProducts; ++i)
            x = linear_add(g, fmt::format("y{}", i), x.h, w, x.x, next, nullptr, {zeros});
        g.output(x.x);
        backend.weights_complete();
        Plan plan(std::move(g), backend);
        const std::vector<float> ones(static_cast<size_t>(kWidth), 1.0f);
        double least = 1e9;
        for (int i = 0; i < kTimes; ++i) {
            set_input(plan, first, ones);
            set_input(plan, residual, ones);
            const auto begun = std::chrono::steady_clock::now();
            plan.run();
            backend.synchronize();
            const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begun;
            least = std::min(least, time.count());
        }
        found[static_cast<size_t>(rank)] = least / kProducts;
    });
    return *std::max_element(found.begin(), found.end());
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("sums over ranks: products have the bits of a product and all_reduce_add") {
        for (const int ranks : {2, 3, 4, 8}) {
            CAPTURE(ranks);
            const auto group = make_cpu_backends(2, ranks);
            linear_ranks(*group, {{64, 48, 7}, {80, 128, 0}});
            mixture_ranks(*group, {{64, 32, 32, 8, 2, Form::nvfp4, Form::nvfp4},
                                   {48, 16, 32, 5, 3, Form::bf16, Form::f8_row}});
        }
    }

    TEST_CASE("sums over ranks: products are those of all columns, in double precision") {
        for (const int ranks : {2, 3, 4, 8}) {
            CAPTURE(ranks);
            const auto group = make_cpu_backends(2, ranks);
            for (const Form form : {Form::bf16, Form::nvfp4, Form::f8_row})
                for (const int64_t rows : {64, 1, 7, 2, 33}) {
                    CAPTURE(form_name(form));
                    CAPTURE(rows);
                    check_against_doubles(*group, {form, rows, 80, 48, 0});
                }
        }
    }

    TEST_CASE("sums over ranks: one that fails between two sums of a step wakes the others") {
        for (const int failing : {0, 1, 3}) {
            CAPTURE(failing);
            const auto group = make_cpu_backends(4, 4);
            const LinearRanks c{Form::bf16, 5, 64, 48, 0};
            const auto begun = std::chrono::steady_clock::now();
            CHECK_THROWS_WITH_AS(group->on_ranks([&](int rank) {
                const RankDevice device(*group, rank);
                (*device).backend->after_node = [&, sums = 0](const Node&, double,
                                                              const std::string&) mutable {
                    if (rank == failing && ++sums == 1) throw Error(ErrorKind::runtime, "no part");
                };
                c.run(*device, rank);
            }),
                                 "no part", Error);
            CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(10));
            for (int r = 0; r < 4; ++r) group->of_rank(r).after_node = nullptr;
            check_ranks(*group, c);
        }
    }

    TEST_CASE("sums over ranks: zeros that do not fit are refused") {
        WeightStore store(1);
        const Matrix m = random_matrix(store, {Form::bf16}, {16}, 32);
        for (const StepKind kind : kKinds) {
            Graph g;
            const NextNorm next{g.input("norm", DType::F32, {16}), DType::F32, kind};
            Tensor *x = g.input("x", DType::F32, {2, 32}), *residual = g.input("r", DType::F32, {2, 16});
            CHECK_THROWS_AS(linear_add(g, "y", x, m.weight, residual, next, nullptr,
                                       {g.zeros("zeros", DType::F32, {3, 16})}),
                            Error);
        }
    }
}

TEST_SUITE("gpus") {
    TEST_CASE("sums over ranks on two GPUs: products have the bits of a product and all_reduce_add") {
        for (const bool peer_access : {true, false}) {
            const auto group = make_cuda_backends({0, 1}, {.peer_access = peer_access});
            CAPTURE(peer_access);
            linear_ranks(*group, {{2048, 512, 256}, {64, 64, 7}});
            mixture_ranks(*group, {{512, 128, 128, 16, 4, Form::nvfp4, Form::nvfp4}});
            if (!peer_access) continue;
            linear_ranks(*group, {{512, 2048, 256}, {5120, 192, 0}});
            for (const int64_t rows : {1000, 4100})  // in one round and in several
                check_ranks(*group, LinearRanks{Form::bf16, rows, 5120, 192, 0, kPrompt});
            mixture_ranks(*group, {{512, 256, 256, 16, 8, Form::nvfp4, Form::nvfp4},
                                   {128, 64, 192, 8, 2, Form::nvfp4, Form::nvfp4},
                                   {256, 64, 64, 8, 2, Form::bf16, Form::f8_row}});
        }
    }

    TEST_CASE("sums over ranks on two GPUs: 8 KB take 3 us at most where a product ends with them") {
        const auto group = make_cuda_backends({0, 1});
        const double with = chain_time(*group, true), without = chain_time(*group, false);
        MESSAGE(fmt::format("a product {:.2f} us, with a sum over ranks {:.2f} us: {:.2f} us more", without,
                            with, with - without));
        CHECK(with - without <= 3);
    }
}
