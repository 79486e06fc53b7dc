// moe_gate_up and moe_down, against sums in double over weights decoded by the test; a row's bits, whoever is
// beside it.
#include "ggml-like/error.h"
#include "ops/moe_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::moe;

namespace {

struct MoeCase {
    StepKind kind;
    std::vector<int64_t> counts;  // rows of the steps
    bool crowded = false;         // all rows choose expert 0
};

/// gate_up on rows under a norm and on logits, then down on what came out of it.
class MoeTest {
  public:
    MoeTest(const Device& device, const Layer& layer, MoeCase c, unsigned seed)
        : device_(device),
          layer_(layer),
          s_(layer.s),
          c_(std::move(c)),
          norm_(device, seed + 4, s_.model),
          x_(seed, s_.model, most()),
          residual_(seed + 1, s_.model, most()),
          logits_(make_logits(seed + 2, kWatched + most(), s_.experts)) {
        for (int64_t row = 0; row < kWatched + most(); ++row) {
            float* logits = logits_.data() + row * (s_.experts + 1);
            if (s_.experts > s_.used) logits[s_.experts - 1] = -20;  // nobody's
            if (c_.crowded) logits[0] = 20;
        }
    }

    void check() {
        CAPTURE(kind_name(c_.kind));
        CAPTURE(s_.name());
        AloneRows alone(names(), [&](const auto& rows) { return run(rows); });
        for (const int64_t n : c_.counts) {
            CAPTURE(n);
            const StepOutputs out = run(step_rows(n));
            check_values(n, out);
            alone.check(n, out);
        }
    }
    StepOutputs run(const std::vector<int64_t>& rows) const {
        const NormedInput made = input(rows);
        Graph g;
        Residual in = made.declare(g, device_.activation);
        in.logits = declare_logits(g, device_, c_.kind, made.rows, s_.experts);
        Tensor* residual = g.input("residual", DType::F32, {made.rows, s_.model});
        const auto up = moe_gate_up(g, "up", in, layer_.gate_up, layer_.shared_gate_up,
                                    static_cast<int>(s_.used), kEps, c_.kind);
        const Residual y =
            moe_down(g, "y", up, residual, layer_.down, layer_.shared_down, norm_.next(g, device_, c_.kind));
        add_outputs(g, up, {y.x, y.h, y.squares});
        StepOutputs out = run_graph(device_, std::move(g), [&](Plan& p) {
            made.fill(p, in);
            set_input(p, residual, residual_.pick(rows));
            set_logits(p, in.logits, logits_of(rows), s_.experts);
        });
        return by_pair(device_, c_.kind, s_, 0, std::move(out));
    }

  private:
    static std::vector<const char*> names() {
        auto all = kChosenNames;
        for (const char* name : {"x'", "h'", "squares'"}) all.push_back(name);
        return all;
    }
    int64_t most() const { return *std::max_element(c_.counts.begin(), c_.counts.end()); }
    NormedInput input(const std::vector<int64_t>& rows) const {
        // gates of about 1, where silu is no line
        const std::vector<float> small(static_cast<size_t>(s_.model),
                                       1 / std::sqrt(static_cast<float>(s_.model)));
        return {device_, c_.kind, x_.pick(rows), small};
    }
    std::vector<float> logits_of(const std::vector<int64_t>& rows) const {
        std::vector<float> all;
        for (const int64_t r : rows) {
            const auto row = rows_of(logits_, s_.experts + 1, r, 1);
            all.insert(all.end(), row.begin(), row.end());
        }
        return all;
    }
    void check_values(int64_t n, const StepOutputs& out) {
        const auto rows = step_rows(n);
        const NormedInput in = input(rows);
        const std::vector<float> made = logits_of(rows);
        const std::vector<double> logits(made.begin(), made.end()), h(in.h.begin(), in.h.end());
        const Chosen chosen = Chosen::from(out, 0);
        for (int64_t t = 0; t < n; ++t) {
            CAPTURE(t);
            const double r = in.factor(t);
            check_choice(device_, s_.used, logits.data() + t * (s_.experts + 1), s_.experts, r,
                         chosen.ids.data() + t * s_.used, chosen.weights.data() + t * s_.used,
                         chosen.gate[static_cast<size_t>(t)]);
            check_gate_up(device_, layer_, n, t, h.data() + t * s_.model, r, factor_error(in.parts), chosen);
            check_down(device_, layer_, n, t, residual_.pick({rows[static_cast<size_t>(t)]}).data(), chosen,
                       out[5].data() + t * s_.model);
        }
        check_deferred(device_, c_.kind, norm_, n, out[5], out[6], out[7]);
        check_groups(device_, chosen, s_.experts);
    }

    const Device& device_;
    const Layer& layer_;
    const Shape s_;
    const MoeCase c_;
    Norm norm_;
    RowPool x_, residual_;
    std::vector<float> logits_;
};

/// The layer is made once for both kinds.
void check_moe(const Device& device, const Shape& shape, unsigned seed, int64_t most = 2100) {
    CAPTURE(seed);
    const Layer layer(device, shape, seed);
    for (const StepKind kind : kKinds)
        MoeTest(device, layer, {kind, row_counts(device, kind, most)}, seed).check();
}

void moe_forms(Device& device) {
    unsigned seed = 40;
    for (const Form form : kForms) {
        check_moe(device, {64, 48, 32, 6, 2, form, form}, ++seed, 64);
        check_moe(device, {48, 16, 80, 9, 3, form, Form::bf16}, ++seed, 17);
    }
    for (const Form shared : {Form::nvfp4, Form::f8_row, Form::bf16})
        check_moe(device, {144, 48, 80, 7, 3, Form::nvfp4, shared}, ++seed, 130);
    check_moe(device, {32, 32, 16, 4, 3, Form::nvfp4, Form::nvfp4}, ++seed, 33);
    for (const Form form : {Form::nvfp4, Form::bf16}) {  // down of the other of two formats, then of the same
        check_moe(device, {64, 32, 32, 5, 3, Form::nvfp4, Form::nvfp4, form}, ++seed, 130);
        check_moe(device, {64, 32, 32, 5, 3, Form::bf16, Form::bf16, form}, ++seed, 130);
    }
    // more experts than a block of a GPU has rows of
    check_moe(device, {64, 16, 16, 500, 8, Form::nvfp4, Form::nvfp4}, ++seed, 64);
    for (const int64_t experts : {180, 256})  // as every block of gate and up chooses from
        check_moe(device, {64, 16, 16, experts, 8, Form::nvfp4, Form::nvfp4}, ++seed, 64);
    // as many as Qwen3.5-397B has, and a model that was pruned to 180
    check_moe(device, {64, 16, 16, 512, 10, Form::nvfp4, Form::bf16}, ++seed, 33);
    check_moe(device, {64, 16, 16, 180, 8, Form::bf16, Form::bf16}, ++seed, 33);
    for (const int64_t experts : {384, 400})  // FP8: as many as threads of a block of prompts, and more
        check_moe(device, {64, 16, 16, experts, 8, Form::f8_block, Form::f8_block}, ++seed, 64);
}

void moe_large(Device& device) {
    unsigned seed = 70;
    check_moe(device, {256, 144, 272, 20, 8, Form::nvfp4, Form::bf16}, ++seed);
    for (const Form form : {Form::bf16, Form::nvfp4})  // few rows of each expert, more than a ring of columns
        check_moe(device, {656, 208, 80, 24, 3, form, form}, ++seed);
    // so many tiles that warps share them: 10 columns of chunks, 8, and 32
    if (device.exact()) return;
    check_moe(device, {640, 336, 400, 20, 8, Form::nvfp4, Form::nvfp4}, ++seed, 300);
    for (const Form form : {Form::bf16, Form::nvfp4})  // many tiles of few columns
        check_moe(device, {128, 128, 128, 9, 3, form, form}, ++seed);
    check_moe(device, {512, 512, 512, 20, 8, Form::nvfp4, Form::nvfp4}, ++seed, 300);
    check_moe(device, {2048, 512, 512, 12, 8, Form::nvfp4, Form::nvfp4}, ++seed);
    check_moe(device, {2048, 512, 512, 8, 6, Form::f8_block, Form::f8_block}, ++seed, 130);
    check_moe(device, {4096, 64, 64, 12, 8, Form::nvfp4, Form::nvfp4}, ++seed, 64);  // splits of four chunks
    for (const Form form : {Form::f8_row, Form::f8_block}) {  // tiles of the tour in FP8
        check_moe(device, {656, 208, 80, 24, 3, form, form}, ++seed);
        check_moe(device, {128, 128, 128, 9, 3, form, form}, ++seed);
    }
}

/// All rows choose the same expert.
void moe_crowded(Device& device) {
    unsigned seed = 85;
    for (const Form form : {Form::nvfp4, Form::bf16, Form::f8_block}) {
        const Layer layer(device, {208, 80, 336, 9, 4, form, form}, ++seed);
        for (const StepKind kind : kKinds)
            MoeTest(device, layer, {kind, row_counts(device, kind, 130), true}, seed).check();
    }
}

}  // namespace

DEVICE_TEST_CASE("moe: gate_up and down in every form, alone and beside others", moe_forms)
DEVICE_TEST_CASE("moe: many rows, many tiles", moe_large)
DEVICE_TEST_CASE("moe: an expert that every row chooses", moe_crowded)

TEST_SUITE("cpu") {
    TEST_CASE("moe: odd widths") {
        check_moe(cpu_device(), {48, 17, 5, 3, 1, Form::bf16, Form::f8_row}, 90, 9);
    }

    TEST_CASE("moe: one thread and many give the same bits") {
        const auto run = [](int threads) {
            const Device device = cpu_device(threads);
            const Layer layer(device, {144, 96, 64, 6, 3, Form::nvfp4, Form::bf16}, 77);
            return MoeTest(device, layer, {StepKind::answer, {5}}, 77).run(step_rows(5));
        };
        const StepOutputs one = run(1);
        for (const int threads : {2, 4}) {
            const StepOutputs many = run(threads);
            for (size_t i = 0; i + 1 < one.size(); ++i) CHECK(many[i] == one[i]);
        }
    }

    TEST_CASE("moe: weights that do not fit are errors") {
        const Device device = cpu_device();
        Layer layer(device, {32, 16, 16, 4, 2, Form::bf16, Form::bf16}, 6);
        const Norm norm(device, 6, 32), narrow_norm(device, 6, 31);
        Graph g;
        Tensor *narrow = g.input("h", DType::F32, {2, 31}), *h = g.input("h", DType::F32, {2, 32}),
               *squares = g.input("squares", DType::F32, {2, 1}),
               *logits = g.input("logits", DType::F32, {2, 8});
        const auto up_of = [&](Tensor* in, Tensor* router, const ExpertWeights& w, int used) {
            return moe_gate_up(g, "up", {.h = in, .squares = squares, .logits = router}, w,
                               layer.shared_gate_up, used, kEps, StepKind::prompt);
        };
        CHECK_THROWS_AS(up_of(narrow, logits, layer.gate_up, 2), Error);
        CHECK_THROWS_AS(up_of(h, logits, layer.down, 2), Error);
        CHECK_THROWS_AS(up_of(h, nullptr, layer.gate_up, 2), Error);
        CHECK_THROWS_AS(up_of(h, g.input("logits", DType::F32, {2, 4}), layer.gate_up, 2), Error);  // no gate
        CHECK_THROWS_AS(up_of(h, g.input("logits", DType::F32, {3, 8}), layer.gate_up, 2), Error);
        CHECK_THROWS_AS(up_of(h, logits, layer.gate_up, 5), Error);
        CHECK_THROWS_AS(up_of(h, logits, layer.gate_up, 0), Error);
        const auto up = up_of(h, logits, layer.gate_up, 2);
        const auto down = [&](Tensor* residual, const ExpertWeights& w, const Norm& next) {
            return moe_down(g, "y", up, residual, w, layer.shared_down,
                            next.next(g, device, StepKind::prompt));
        };
        CHECK_NOTHROW(down(h, layer.down, norm));
        CHECK_THROWS_AS(down(narrow, layer.down, norm), Error);
        CHECK_THROWS_AS(down(h, layer.gate_up, norm), Error);
        CHECK_THROWS_AS(down(h, layer.down, narrow_norm), Error);
        layer.down.expert[2].rows = 31;
        CHECK_THROWS_AS(down(h, layer.down, norm), Error);
    }
}
