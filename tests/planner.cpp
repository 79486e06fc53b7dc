// The planner's arena: lifetimes apart share memory; tensors that are zeros when a run begins share it with
// nobody.
#include "ggml-like/planner.h"

#include <doctest/doctest.h>

#include <algorithm>

#include "ggml-like/backend.h"
#include "ggml-like/error.h"
#include "lazy_backend.h"

namespace quern {
namespace {

/// outputs[0] += inputs[0]
void run_add(const Node& node, cpu::Context&) {
    const Tensor &x = *node.inputs[0], &sum = *node.outputs[0];
    for (int64_t i = 0; i < sum.elements(); ++i) sum.as<float>()[i] += x.as<float>()[i];
}
/// outputs[0] = 2 inputs[0]
void run_double(const Node& node, cpu::Context&) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    for (int64_t i = 0; i < y.elements(); ++i) y.as<float>()[i] = 2 * x.as<float>()[i];
}
Cost no_cost(const Node&) { return {}; }

const Op kAdd{"add", run_add, no_cost};
const Op kDouble{"double", run_double, no_cost};

void add(Graph& g, const Op& op, Tensor* x, Tensor* y) {
    g.add({.op = &op, .name = y->name, .inputs = {x}, .outputs = {y}});
}

/// y = 8 x: three times a product into scratch, added into zeros.
struct Chain {
    Graph graph;
    Tensor *x = nullptr, *y = nullptr;
    std::vector<Tensor*> scratch, zeros;

    explicit Chain(int64_t width) {
        y = x = graph.input("x", DType::F32, {width});
        for (int i = 0; i < 3; ++i) {
            scratch.push_back(graph.scratch("twice", DType::F32, {width}));
            zeros.push_back(graph.zeros("sum", DType::F32, {width}));
            add(graph, kDouble, y, scratch.back());
            add(graph, kAdd, scratch.back(), y = zeros.back());
        }
        graph.zeros("nobody's", DType::F32, {width});
        graph.output(y);
    }
    std::vector<int64_t> offsets(const ArenaPlan& plan, const std::vector<Tensor*>& of) const {
        std::vector<int64_t> list;
        for (size_t i = 0; i < graph.tensors().size(); ++i)
            if (std::find(of.begin(), of.end(), &graph.tensors()[i]) != of.end())
                list.push_back(plan.offset[i]);
        std::sort(list.begin(), list.end());
        return list;
    }
};

/// A plan of a chain; `run` gives y.
struct ChainPlan {
    Backend& backend;
    Tensor *x, *y;
    Plan plan;

    ChainPlan(Chain chain, Backend& b, Workspace& workspace)
        : backend(b),
          x(chain.x),
          y(chain.y),
          plan(std::move(chain.graph), b, workspace, PlanUse::repeatedly) {}

    void fill(float value) { std::fill_n(plan.input<float>(x), x->elements(), value); }
    std::vector<float> result() const {
        backend.synchronize();
        return {y->as<float>(), y->as<float>() + y->elements()};
    }
    std::vector<float> run(float value) {
        fill(value);
        plan.run();
        return result();
    }
};

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("planner: zeros are the arena's first bytes, side by side, and nobody else's") {
        const Chain chain(100);
        const ArenaPlan plan = plan_memory(chain.graph);
        constexpr int64_t each = 2 * kPlanAlignment;  // of 400 bytes
        CHECK(plan.zero_bytes == 3 * each);
        CHECK(chain.offsets(plan, chain.zeros) == std::vector<int64_t>{0, each, 2 * each});
        // scratch lives apart and shares what comes after
        CHECK(chain.offsets(plan, chain.scratch) == std::vector<int64_t>(3, 3 * each));
        CHECK(plan.arena_bytes == 4 * each);
    }

    TEST_CASE("planner: a graph without zeros has none to make") {
        Graph g;
        Tensor *x = g.input("x", DType::F32, {100}), *y = g.scratch("y", DType::F32, {100});
        add(g, kDouble, x, y);
        g.output(y);
        CHECK(plan_memory(g).zero_bytes == 0);
    }

    TEST_CASE("plan: what is added into zeros is the same in every run, whoever used the memory before") {
        const auto backend = make_cpu_backend(1);
        Workspace workspace(*backend, 1 << 14, 1 << 12);
        std::fill_n(workspace.arena(), workspace.arena_bytes(), std::byte{0xff});
        ChainPlan one(Chain(100), *backend, workspace), other(Chain(333), *backend, workspace);
        CHECK(one.plan.zeros() == workspace.arena());
        for (const float value : {1.0f, -2.5f, 1.0f}) {
            CHECK(one.run(value) == std::vector<float>(100, 8 * value));
            CHECK(one.run(value) == std::vector<float>(100, 8 * value));
            CHECK(other.run(value) == std::vector<float>(333, 8 * value));
        }
    }

    TEST_CASE(
        "plan: the inputs of two plans come together, and the second is run and filled again when it is "
        "time") {
        test::LazyBackend backend;  // what is queued is done as late as it may be
        Workspace workspace(backend, 1 << 14, 1 << 12), behind(backend, 1 << 14, 1 << 12, 1);
        ChainPlan one(Chain(100), backend, workspace), other(Chain(333), backend, behind);
        for (const float value : {1.0f, -2.5f}) {
            one.fill(value);
            other.fill(2 * value);
            one.plan.run_before(other.plan);
            other.plan.run_uploaded();
            other.plan.await_inputs();
            other.fill(77);
            CHECK(one.result() == std::vector<float>(100, 8 * value));
            CHECK(other.result() == std::vector<float>(333, 16 * value));
        }
        ChainPlan same(Chain(100), backend, workspace);
        CHECK_THROWS_AS(one.plan.run_before(same.plan), Error);
    }
}

}  // namespace quern
