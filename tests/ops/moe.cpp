// moe_gate_up and moe_down, against sums in double.
#include "ggml-like/error.h"
#include "ops/moe_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::moe;

namespace {

/// gate_up on h, then down on what came out of it. `groups`: those of the ids unless given.
Outputs run_moe(const Device& device, const Case& c, const PlacedLayer& w, const Inputs& in,
                std::vector<int32_t> groups = {}) {
    if (groups.empty()) groups = group(in.ids, c.experts);
    const int64_t tokens = static_cast<int64_t>(in.gate.size());
    Graph g;
    Tensor* h = g.input("h", device.activation, {tokens, c.model});
    Tensor* residual = g.input("residual", DType::F32, {tokens, c.model});
    Tensor* ids = g.input("ids", DType::I32, {tokens, c.used});
    Tensor* weights = g.input("weights", DType::F32, {tokens, c.used});
    Tensor* gate = g.input("gate", DType::F32, {tokens});
    Tensor* grouped = g.input("groups", DType::I32, {c.experts + 1 + tokens * c.used});
    const auto up = moe_gate_up(g, "up", h, ids, grouped, w.gate_up, w.shared_gate_up);
    Tensor* y = moe_down(g, "y", {up.routed, up.shared, ids, weights, gate, grouped, residual}, w.down,
                         w.shared_down);
    for (Tensor* t : {up.routed, up.shared, y}) g.output(t);
    auto out = run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, h, in.h);
        set_input(p, residual, in.residual);
        set_input(p, weights, in.weights);
        set_input(p, gate, in.gate);
        std::copy(in.ids.begin(), in.ids.end(), p.input<int32_t>(ids));
        std::copy(groups.begin(), groups.end(), p.input<int32_t>(grouped));
    });
    return {out[0], out[1], out[2]};
}

void check_case(const Device& device, const Case& c, unsigned seed) {
    CAPTURE(seed);
    CAPTURE(c.tokens);
    CAPTURE(std::string(form_name(c.form)));
    Layer layer(c, seed);
    const PlacedLayer w(device, layer);
    const Inputs in = make_inputs(device, layer);
    const Outputs out = run_moe(device, c, w, in);
    Expected routed, shared, y;
    for (int64_t t = 0; t < c.tokens; ++t) {
        const float* h = in.h.data() + t * c.model;
        for (int64_t j = 0; j < c.used; ++j) {
            const auto expert = static_cast<size_t>(in.ids[static_cast<size_t>(t * c.used + j)]);
            expect_gate_up(c, layer.gate_up_values[expert], c.width, h, routed);
        }
        expect_gate_up(c, layer.gate_up_values.back(), c.shared_width, h, shared);
        expect_down(layer, in, out, t, y);
    }
    check_close(device, out.routed, routed);
    check_close(device, out.shared, shared);
    check_close(device, out.y, y);
    if (!c.same_bits(device)) return;
    for (const int64_t t : some_rows(c.tokens)) {  // the same bits without the others
        const Outputs alone = run_moe(device, c, w, in.row(c, t));
        CHECK(alone.routed == rows_of(out.routed, c.used * c.width, t, 1));
        CHECK(alone.shared == rows_of(out.shared, c.shared_width, t, 1));
        CHECK(alone.y == rows_of(out.y, c.model, t, 1));
    }
}

void moe_forms(Device& device) {
    unsigned seed = 40;
    for (const Form form : kForms) {
        check_case(device, {1, 64, 48, 32, 5, 2, form, form}, ++seed);
        check_case(device, {7, 48, 16, 80, 9, 3, form, Form::bf16}, ++seed);
        check_case(device, {33, 64, 48, 32, 6, 2, form, form}, ++seed);
    }
    for (const int64_t tokens : {1, 2, 7, 8, 9, 33, 64, 130})
        check_case(device, {tokens, 144, 48, 80, 7, 3, Form::nvfp4, Form::nvfp4}, ++seed);
    check_case(device, {33, 32, 32, 16, 4, 3, Form::nvfp4, Form::nvfp4}, ++seed);
    check_case(device, {3, 256, 144, 272, 20, 8, Form::nvfp4, Form::bf16}, ++seed);
    check_case(device, {130, 256, 144, 272, 20, 8, Form::nvfp4, Form::bf16}, ++seed);
    for (const Form form : {Form::bf16, Form::nvfp4})  // few rows of each expert, more than a ring of columns
        check_case(device, {40, 656, 208, 80, 24, 3, form, form}, ++seed);
    for (const int64_t tokens : {16, 17, 32, 64})
        check_case(device, {tokens, 208, 80, 336, 9, 4, Form::nvfp4, Form::nvfp4, true}, ++seed);
    // more experts than a block of a GPU has rows of
    check_case(device, {64, 64, 16, 16, 500, 8, Form::nvfp4, Form::nvfp4}, ++seed);
}

}  // namespace

DEVICE_TEST_CASE("moe: gate_up and down in every form, alone and in a batch", moe_forms)

TEST_SUITE("cuda") {  // other kernels than for one op alone
    TEST_CASE("moe: so many tiles that warps share them (CUDA)") {
        on_cuda([](Device& device) {
            // 10 columns of chunks, 8, and 32
            check_case(device, {64, 640, 336, 400, 20, 8, Form::nvfp4, Form::nvfp4}, 70);
            check_case(device, {64, 512, 512, 512, 20, 8, Form::nvfp4, Form::nvfp4}, 71);
            check_case(device, {40, 2048, 512, 512, 8, 6, Form::nvfp4, Form::nvfp4}, 72);
        });
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("moe: odd widths") {
        check_case(cpu_device(), {2, 48, 17, 5, 3, 1, Form::bf16, Form::f8_row}, 90);
    }

    TEST_CASE("moe: one thread and many give the same bits") {
        const Case c{5, 144, 96, 64, 6, 3, Form::nvfp4, Form::bf16};
        Layer layer(c, 77);
        const Device first = cpu_device(1);
        const PlacedLayer w(first, layer);
        const Inputs in = make_inputs(first, layer);
        const Outputs one = run_moe(first, c, w, in);
        for (const int threads : {2, 4}) CHECK((run_moe(cpu_device(threads), c, w, in) == one));
    }

    TEST_CASE("moe: groups that are none are errors, not crashes") {
        const Device device = cpu_device();
        const Case c{2, 32, 16, 16, 4, 2, Form::bf16, Form::bf16};
        Layer layer(c, 5);
        const PlacedLayer w(device, layer);
        const Inputs in = make_inputs(device, layer);
        const std::vector<int32_t> good = group(in.ids, c.experts);
        CHECK_NOTHROW(run_moe(device, c, w, in, good));
        for (size_t at = 0; at < good.size(); ++at) {
            for (const int32_t bad : {-1, 5, 2000000000}) {
                CAPTURE(at);
                std::vector<int32_t> groups = good;
                groups[at] = bad;
                CHECK_THROWS_AS(run_moe(device, c, w, in, groups), Error);
            }
        }
    }

    TEST_CASE("moe: weights that do not fit are errors") {
        Layer layer({2, 32, 16, 16, 4, 2, Form::bf16, Form::bf16}, 6);
        Graph g;
        Tensor* narrow = g.input("h", DType::F32, {2, 31});
        Tensor* h = g.input("h", DType::F32, {2, 32});
        Tensor* ids = g.input("ids", DType::I32, {2, 2});
        Tensor* groups = g.input("groups", DType::I32, {4 + 1 + 4});
        const auto up_of = [&](Tensor* in, Tensor* chosen, Tensor* grouped, const ExpertWeights& w) {
            return moe_gate_up(g, "up", in, chosen, grouped, w, layer.shared_gate_up);
        };
        CHECK_THROWS_AS(up_of(narrow, ids, groups, layer.gate_up), Error);
        CHECK_THROWS_AS(up_of(h, ids, groups, layer.down), Error);
        CHECK_THROWS_AS(up_of(h, h, groups, layer.gate_up), Error);
        CHECK_THROWS_AS(up_of(h, ids, ids, layer.gate_up), Error);
        const auto up = up_of(h, ids, groups, layer.gate_up);
        Tensor* weights = g.input("weights", DType::F32, {2, 2});
        Tensor* gate = g.input("gate", DType::F32, {2});
        const auto down = [&](Tensor* shared_gate, Tensor* residual, const ExpertWeights& w) {
            return moe_down(g, "y", {up.routed, up.shared, ids, weights, shared_gate, groups, residual}, w,
                            layer.shared_down);
        };
        CHECK_NOTHROW(down(gate, h, layer.down));
        CHECK_THROWS_AS(down(weights, h, layer.down), Error);
        CHECK_THROWS_AS(down(gate, narrow, layer.down), Error);
        CHECK_THROWS_AS(down(gate, h, layer.gate_up), Error);
        layer.down.expert[2].rows = 31;
        CHECK_THROWS_AS(down(gate, h, layer.down), Error);
    }
}
