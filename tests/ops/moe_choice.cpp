// moe_gate_up: the choice of experts, their weights and the groups made of them.
#include <cmath>
#include <cstring>
#include <limits>

#include "ggml-like/ops/linear_add.h"
#include "ggml-like/safetensors.h"
#include "ops/moe_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::moe;

namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Small experts under logits that the test gives.
class ChoiceTest {
  public:
    ChoiceTest(const Device& device, StepKind kind, int64_t experts, int64_t used, Form form = Form::bf16,
               int64_t width = 32)
        : device_(device),
          kind_(kind),
          layer_(device, {width, 16, 16, experts, used, form, form}, 3),
          x_(5, width, 2100) {}

    /// logits [n, E + 1]; rows of x by number.
    Chosen run(const std::vector<int64_t>& rows, const std::vector<float>& logits) const {
        return Chosen::from(outputs(rows, logits), 0);
    }
    StepOutputs outputs(const std::vector<int64_t>& rows, const std::vector<float>& logits) const {
        const NormedInput made = input(rows);
        const Shape& s = layer_.s;
        Graph g;
        Residual in = made.declare(g, device_.activation);
        in.logits = declare_logits(g, device_, kind_, made.rows, s.experts);
        add_outputs(g, moe_gate_up(g, "up", in, layer_.gate_up, layer_.shared_gate_up,
                                   static_cast<int>(s.used), kEps, kind_));
        StepOutputs out = run_graph(device_, std::move(g), [&](Plan& p) {
            made.fill(p, in);
            set_logits(p, in.logits, logits, s.experts);
        });
        return by_pair(device_, kind_, s, 0, std::move(out));
    }
    /// All rows but `except`.
    void check(int64_t n, const std::vector<float>& logits, const Chosen& out, int64_t except = -1) const {
        CAPTURE(kind_name(kind_));
        CAPTURE(layer_.s.name());
        CAPTURE(n);
        const NormedInput in = input(step_rows(n));
        const std::vector<double> exact(logits.begin(), logits.end());
        const int64_t used = layer_.s.used, experts = layer_.s.experts;
        for (int64_t t = 0; t < n; ++t) {
            CAPTURE(t);
            if (t == except) continue;
            check_choice(device_, used, exact.data() + t * (experts + 1), experts, in.factor(t),
                         out.ids.data() + t * used, out.weights.data() + t * used,
                         out.gate[static_cast<size_t>(t)]);
        }
        check_groups(device_, out, experts);
    }
    void check(int64_t n, const std::vector<float>& logits) const {
        check(n, logits, run(step_rows(n), logits));
    }
    int64_t experts() const { return layer_.s.experts; }

  private:
    NormedInput input(const std::vector<int64_t>& rows) const {
        return {device_, kind_, x_.pick(rows), std::vector<float>(static_cast<size_t>(layer_.s.model), 0.5f)};
    }

    const Device& device_;
    StepKind kind_;
    Layer layer_;
    RowPool x_;
};

void check_shapes(const Device& device, StepKind kind, int64_t experts, int64_t used) {
    const ChoiceTest test(device, kind, experts, used);
    for (const int64_t n : row_counts(device, kind)) {
        const auto rows = step_rows(n);
        std::vector<float> logits;  // of rows by number
        for (const int64_t r : rows) {
            const auto row = make_logits(static_cast<unsigned>(r) + 1, 1, experts);
            logits.insert(logits.end(), row.begin(), row.end());
        }
        const StepOutputs all = test.outputs(rows, logits);
        test.check(n, logits, Chosen::from(all, 0));
        for (const int64_t place : watched_places(n)) {
            CAPTURE(place);
            const StepOutputs alone =
                test.outputs({rows[static_cast<size_t>(place)]}, rows_of(logits, experts + 1, place, 1));
            for (size_t i = 0; i < kChosenNames.size(); ++i) {
                const auto width = static_cast<int64_t>(alone[i].size());
                check_bits(kChosenNames[i], "alone", all[i].data() + place * width, alone[i].data(), width);
            }
        }
    }
}

void choice_shapes(Device& device) {
    for (const StepKind kind : kKinds)
        for (const auto& [experts, used] :
             {std::pair{16, 4}, {5, 2}, {256, 8}, {512, 12}, {300, 4}, {3, 1}, {4, 4}})
            check_shapes(device, kind, experts, used);
}

void choice_ties(Device& device) {
    for (const StepKind kind : kKinds) {
        const ChoiceTest twins(device, kind, 12, 5), all(device, kind, 9, 4);
        for (const int64_t n : {1, 8, 33}) {
            auto logits = make_logits(10, n, 12);
            for (size_t row = 0; row < logits.size(); row += 13)
                for (const size_t e : {3, 7, 11}) logits[row + e] = logits[row + 1];
            twins.check(n, logits);
            for (const float same : {0.0f, -3.5f}) {
                const Chosen out =
                    all.run(step_rows(n), std::vector<float>(static_cast<size_t>(n) * 10, same));
                for (size_t i = 0; i < out.ids.size(); ++i) CHECK(out.ids[i] == static_cast<double>(i % 4));
                CHECK(out.weights == std::vector<double>(static_cast<size_t>(n) * 4, 0.25));
                if (same == 0) CHECK(out.gate == std::vector<double>(static_cast<size_t>(n), 0.5));
            }
        }
    }
}

/// Kernels of NVFP4 experts that choose for themselves rank those that may be among the best, of which ties make many. `width`: those
/// of up to 8 rows want more than 1,024.
void check_many_ties(const Device& device, int64_t width, const std::vector<int64_t>& counts) {
    for (const StepKind kind : kKinds) {
        const ChoiceTest test(device, kind, 256, 8, Form::nvfp4, width);
        for (const int64_t n : counts) {
            for (const float step : {1.0f, 2.0f}) {
                auto logits = make_logits(16, n, 256);
                for (float& logit : logits) logit = step * std::round(logit / step);
                test.check(n, logits);
            }
            const Chosen out =
                test.run(step_rows(n), std::vector<float>(static_cast<size_t>(n) * 257, -1.5f));
            for (size_t i = 0; i < out.ids.size(); ++i) CHECK(out.ids[i] == static_cast<double>(i % 8));
            check_groups(device, out, 256);
        }
    }
}

void choice_many_ties(Device& device) {
    check_many_ties(device, 32, {1, 2, 8, 9, 16, 17, 33, 64});
    if (!device.exact()) check_many_ties(device, 1280, {1, 2, 5, 8});
}

/// Where logits are floats: whole numbers of 2^-32 have no NaN.
void choice_nan(Device& device) {
    for (const StepKind kind : kKinds) {
        if (fixed_point(device, kind)) continue;
        const ChoiceTest test(device, kind, 6, 5), few(device, kind, 300, 8);
        for (const int64_t n : {1, 4, 17}) {
            auto logits = make_logits(13, n, 6);
            for (size_t row = 0; row < logits.size(); row += 7) logits[row + 2] = kNan;
            test.check(n, logits);
            auto many = make_logits(14, n, 300);
            for (size_t i = 0; i < many.size(); ++i)
                if (i % 301 != 300 && i % 301 % 7 < 5) many[i] = kNan;
            few.check(n, many);
        }
    }
}

/// A row that has too few numbers gets experts nevertheless, and the rows beside it get their own.
void choice_too_few(Device& device) {
    for (const StepKind kind : kKinds) {
        if (fixed_point(device, kind)) continue;
        const ChoiceTest test(device, kind, 5, 4);
        const auto all = make_logits(15, 17, 5);
        for (const int64_t n : {1, 3, 17}) {
            auto logits = rows_of(all, 6, 0, n);
            const int64_t broken = n / 2;
            const std::vector<float> few = {kNan, 2, kNan, 3, kNan, 0}, none(6, kNan);
            for (const auto& row : {few, none}) {
                std::copy(row.begin(), row.end(), logits.begin() + broken * 6);
                const Chosen out = test.run(step_rows(n), logits);
                CHECK(
                    rows_of(out.ids, 4, broken, 1) ==
                    (std::isnan(row[1]) ? std::vector<double>{0, 1, 2, 3} : std::vector<double>{3, 1, 0, 2}));
                for (const double weight : rows_of(out.weights, 4, broken, 1)) CHECK(std::isnan(weight));
                test.check(n, logits, out, broken);
            }
        }
    }
}

// ---- the reference's router

template <typename T>
std::vector<T> values(const SafetensorsFile& file, const char* name) {
    const SafeTensor* t = file.find(name);
    REQUIRE_MESSAGE(t != nullptr, name);
    std::vector<T> list((t->end - t->begin) / sizeof(T));
    std::memcpy(list.data(), t->data, list.size() * sizeof(T));
    return list;
}

/// h through a router: x' = h + 0 under a norm of ones gives logits of h; squares of rms 1 leave them as they
/// are.
StepOutputs run_vector(const Device& device, StepKind kind, const std::vector<float>& h, const Weight& router,
                       const Layer& layer) {
    const int64_t width = layer.s.model, n = static_cast<int64_t>(h.size()) / width;
    WeightSegment nothing{.name = "nothing", .dtype = DType::F32, .rows = width, .cols = 16};
    const std::vector<float> zeros(static_cast<size_t>(width * 16));
    nothing.data = zeros.data();
    const Weight none("nothing", {nothing});
    Guarded ones(device, "ones", DType::F32, Place::weight, {width});
    ones.fill(1);
    Graph g;
    Tensor *x = g.input("x", DType::F32, {n, 16}), *residual = g.input("residual", DType::F32, {n, width}),
           *squares = g.input("squares", DType::F32, {n, 1});
    Residual y =
        linear_add(g, "y", x, none, residual, {g.external(ones.tensor()), DType::F32, kind}, &router);
    g.output(y.logits);
    y.squares = squares;
    add_outputs(g, moe_gate_up(g, "up", y, layer.gate_up, layer.shared_gate_up,
                               static_cast<int>(layer.s.used), kEps, kind));
    return run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, x, std::vector<float>(static_cast<size_t>(n * 16)));
        set_input(p, residual, h);
        set_input(p, squares,
                  std::vector<float>(static_cast<size_t>(n), static_cast<float>(width) * (1 - kEps)));
    });
}

}  // namespace

DEVICE_TEST_CASE("moe_gate_up: choice, weights and groups", choice_shapes)
DEVICE_TEST_CASE("moe_gate_up: ties go to the lower id", choice_ties)
DEVICE_TEST_CASE("moe_gate_up: ties among many NVFP4 experts", choice_many_ties)
DEVICE_TEST_CASE("moe_gate_up: NaN is never chosen where there are enough numbers", choice_nan)
DEVICE_TEST_CASE("moe_gate_up: too few numbers: the lowest other ids, weights NaN, in that row only",
                 choice_too_few)

TEST_SUITE("cpu") {
    TEST_CASE("linear_add, moe_gate_up: logits, choice and weights of transformers' router") {
        const Device device = cpu_device();
        const SafetensorsFile file =
            SafetensorsFile::open(std::string(QUERN_SOURCE_DIR) + "/tests/vectors/ops/moe_route.safetensors");
        const auto h = values<float>(file, "h"), weight = values<float>(file, "weight"),
                   logits = values<float>(file, "logits"), weights = values<float>(file, "weights");
        const auto experts = values<int32_t>(file, "experts");
        const int64_t width = 24, count = 16, used = 4, n = 33;
        auto rows = weight;
        rows.resize(static_cast<size_t>((count + 1) * width));  // a gate of zeros
        const Weight router(
            "router",
            {{.name = "gate", .dtype = DType::F32, .rows = count + 1, .cols = width, .data = rows.data()}});
        const Layer layer(device, {width, 16, 16, count, used, Form::bf16, Form::bf16}, 1);
        for (const StepKind kind : kKinds) {
            const StepOutputs out = run_vector(device, kind, h, router, layer);
            CHECK(relative_error(first_columns(out[0], n, count), {logits.begin(), logits.end()}) < 1e-6);
            const Chosen chosen = Chosen::from(out, 1);
            CHECK(chosen.ids == std::vector<double>(experts.begin(), experts.end()));
            CHECK(relative_error(chosen.weights, {weights.begin(), weights.end()}) < 1e-6);
            CHECK(chosen.gate == std::vector<double>(static_cast<size_t>(n), 0.5));
            check_groups(device, chosen, count);
        }
    }
}
