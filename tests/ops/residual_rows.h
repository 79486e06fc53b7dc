// The residual stream of a test: the norm after it, a router, and checks of h, squares and logits (ops/residual.h).
#pragma once

#include "ggml-like/ops/residual.h"
#include "ops/step_rows.h"

namespace quern::test {

inline constexpr float kEps = 1e-6f;
inline constexpr int64_t kSquareColumns = 16;  // of one number of squares

/// A norm's weight on a device.
class Norm {
  public:
    Norm(const Device& device, unsigned seed, int64_t width, float size = 1)
        : values_(Random(seed).normals(width)), memory_(device, "norm", DType::F32, Place::weight, {width}) {
        for (float& v : values_) v *= size;
        memory_.set(values_);
    }
    NextNorm next(Graph& g, const Device& device, StepKind kind) const {
        return {g.external(memory_.tensor()), device.activation, kind};
    }
    const std::vector<float>& values() const { return values_; }

  private:
    std::vector<float> values_;
    Guarded memory_;
};

/// 1 / rms of a row of `squares`.
inline double norm_factor(const double* squares, int64_t parts, int64_t width) {
    double sum = 0;
    for (int64_t i = 0; i < parts; ++i) sum += squares[i];
    return 1 / std::sqrt(sum / static_cast<double>(width) + kEps);
}

/// A residual stream that the test makes: inputs of a graph.
struct NormedInput {
    std::vector<float> h, squares;
    int64_t rows, width, parts;

    /// x [rows, width] under a norm.
    NormedInput(const Device& device, StepKind kind, const std::vector<float>& x,
                const std::vector<float>& norm)
        : rows(static_cast<int64_t>(x.size() / norm.size())),
          width(static_cast<int64_t>(norm.size())),
          parts(kind == StepKind::prompt ? 1 : (width + kSquareColumns - 1) / kSquareColumns) {
        const int64_t each = kind == StepKind::prompt ? width : kSquareColumns;
        squares.assign(static_cast<size_t>(rows * parts), 0.0f);
        for (size_t i = 0; i < x.size(); ++i) {
            const auto t = static_cast<int64_t>(i) / width, c = static_cast<int64_t>(i) % width;
            h.push_back(x[i] * norm[static_cast<size_t>(c)]);
            squares[static_cast<size_t>(t * parts + c / each)] += x[i] * x[i];
        }
        h = device.rounded(std::move(h));
    }
    Residual declare(Graph& g, DType activation) const {
        return {.h = g.input("h", activation, {rows, width}),
                .squares = g.input("squares", DType::F32, {rows, parts})};
    }
    void fill(Plan& plan, const Residual& in) const {
        set_input(plan, in.h, h);
        set_input(plan, in.squares, squares);
    }
    double factor(int64_t t) const {
        const std::vector<double> row(squares.begin() + t * parts, squares.begin() + (t + 1) * parts);
        return norm_factor(row.data(), parts, width);
    }
};

/// How far the factor may be off if its squares are summed one by one in FP32.
inline double factor_error(int64_t parts) { return std::ldexp(static_cast<double>(parts) + 8, -24); }

/// Checks h and squares of n rows of x'. The bits of h follow from those of x'; squares are sums of F32 squares. in_parts: of prompts,
/// over 8 columns each (residual.h).
inline void check_deferred(const Device& device, StepKind kind, const Norm& norm, int64_t n,
                           const std::vector<double>& x, const std::vector<double>& h,
                           const std::vector<double>& squares, bool in_parts = false) {
    const auto width = static_cast<int64_t>(norm.values().size()),
               parts = static_cast<int64_t>(squares.size()) / n,
               columns = kind == StepKind::answer ? kSquareColumns
                         : in_parts               ? 8
                                                  : width;
    REQUIRE(parts == (width + columns - 1) / columns);
    const bool apart = !device.exact() && columns < width;  // the CPU's first number has them all
    std::vector<float> product;
    std::vector<double> sums(static_cast<size_t>(apart ? n * parts : n)), found(sums.size());
    for (int64_t i = 0; i < n * width; ++i) {
        const double v = x[static_cast<size_t>(i)];
        product.push_back(static_cast<float>(v) * norm.values()[static_cast<size_t>(i % width)]);
        sums[static_cast<size_t>(i / (apart ? columns : width))] += v * v;
    }
    product = device.rounded(std::move(product));
    const std::vector<double> expected(product.begin(), product.end());
    for (int64_t t = 0; t < n; ++t) {
        CAPTURE(t);
        check_bits("h", "x' times the norm's weight is", h.data() + t * width, expected.data() + t * width,
                   width);
    }
    for (int64_t i = 0; i < n * parts; ++i)
        found[static_cast<size_t>(apart ? i : i / parts)] += squares[static_cast<size_t>(i)];
    const double most = std::ldexp(static_cast<double>(apart ? columns : width) + 2, -24);
    for (size_t i = 0; i < sums.size(); ++i)
        if (!(std::fabs(found[i] - sums[i]) <= most * sums[i] + 1e-37))
            FAIL_CHECK("squares: number " << i << " is " << found[i] << ", expected " << sums[i]);
}

/// A router of E experts and the shared expert's gate, BF16.
struct Router {
    int64_t experts = 0;
    std::vector<double> values;
    Weight weight;

    /// twins: all experts have one of two rows.
    Router(const Device& device, WeightStore& store, int64_t count, int64_t width, bool twins = false)
        : experts(count) {
        std::vector<WeightSegment> rows;
        for (int64_t e = 0; e <= count; ++e) {
            const bool twin = twins && e >= 2 && e < count;
            if (!twin) rows.push_back(store.segment(fmt::format("gate{}", e), Form::bf16, 1, width, values));
            if (!twin) continue;
            rows.push_back(rows[static_cast<size_t>(e % 2)]);
            const std::vector<double> first = rows_of(values, width, e % 2, 1);
            values.insert(values.end(), first.begin(), first.end());
        }
        weight = placed(device, Weight("router", rows));
    }
};

/// Whether linear_add makes logits in units of 2^-32.
inline bool fixed_point(const Device& device, StepKind kind) {
    return kind == StepKind::answer && device.activation == DType::BF16;
}

/// Logits of n rows as an op made them -> [n, E + 1], in units of 1.
inline std::vector<double> read_logits(const Device& device, StepKind kind, const std::vector<double>& raw,
                                       int64_t n, int64_t experts) {
    auto logits = first_columns(raw, n, experts + 1);
    if (fixed_point(device, kind))
        for (double& v : logits) v = std::ldexp(v, -32);
    return logits;
}

/// Checks logits [n, E + 1] of the rounded h.
inline void check_logits(const Device& device, const Router& router, int64_t n, const std::vector<double>& h,
                         const std::vector<double>& logits) {
    const auto width = static_cast<int64_t>(h.size()) / n, count = router.experts + 1;
    // Tensor cores sum in their own order and truncate; sums over 16 columns are rounded to 2^-32.
    const double loose = device.exact() ? 1 : 4, parts = std::ldexp(static_cast<double>(width), -36);
    for (int64_t t = 0; t < n; ++t)
        for (const int64_t e : checked_columns(t, n, count, width)) {
            const Sum sum = row_product(router.values, e, width, h.data() + t * width);
            const double got = logits[static_cast<size_t>(t * count + e)];
            if (!(std::fabs(got - sum.value) <= loose * sum_bound(sum, width) + parts))
                FAIL_CHECK("logit " << e << " of row " << t << " is " << got << ", expected " << sum.value);
        }
}

}  // namespace quern::test
