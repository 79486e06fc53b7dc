// Rows of a step: those that also run alone and must have the same bits, and checks of values against double.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "ops/harness.h"
#include "ops/weights.h"

namespace quern::test {

inline constexpr StepKind kKinds[] = {StepKind::prompt, StepKind::answer};

inline std::string kind_name(StepKind kind) { return kind == StepKind::prompt ? "prompt" : "answer"; }

/// Numbers of rows to test for steps of one kind, up to `most`.
inline std::vector<int64_t> row_counts(const Device& device, StepKind kind, int64_t most = 2100) {
    std::vector<int64_t> counts = {1, 2, 7, 8, 9, 16, 17, 33, 64};
    if (kind == StepKind::prompt) counts = {1, 2, 9, 17, 64, 65, 130};
    if (kind == StepKind::prompt && !device.exact()) counts.insert(counts.end(), {300, 1000, 2100});
    std::erase_if(counts, [&](int64_t n) { return n > most; });
    return counts;
}

/// Rows 0 .. kWatched - 1 also run alone; the others only fill the step.
inline constexpr int64_t kWatched = 5;

/// The places of watched rows in a step of n rows.
inline std::vector<int64_t> watched_places(int64_t n) {
    std::vector<int64_t> places;
    for (const int64_t p : {int64_t{0}, int64_t{1}, n / 2, n * 3 / 4, n - 1})
        if (p < n && (places.empty() || places.back() < p)) places.push_back(p);
    return places;
}

/// The rows of a step of n rows; watched ones change places from step to step.
inline std::vector<int64_t> step_rows(int64_t n) {
    std::vector<int64_t> rows(static_cast<size_t>(n));
    for (int64_t p = 0; p < n; ++p) rows[static_cast<size_t>(p)] = kWatched + p;
    const auto places = watched_places(n);
    for (size_t i = 0; i < places.size(); ++i)
        rows[static_cast<size_t>(places[i])] = (static_cast<int64_t>(i) + n) % kWatched;
    return rows;
}

/// Random rows for steps of up to `most` rows.
class RowPool {
  public:
    RowPool(unsigned seed, int64_t width, int64_t most)
        : width_(width), values_(Random(seed).normals((kWatched + most) * width)) {}

    std::vector<float>& values() { return values_; }
    float* row(int64_t i) { return values_.data() + i * width_; }
    std::vector<float> pick(const std::vector<int64_t>& rows) const {
        std::vector<float> all;
        for (const int64_t r : rows)
            all.insert(all.end(), values_.begin() + r * width_, values_.begin() + (r + 1) * width_);
        return all;
    }

  private:
    int64_t width_;
    std::vector<float> values_;
};

/// The outputs of a step, each row after row.
using StepOutputs = std::vector<std::vector<double>>;

/// The first `keep` columns of n rows.
inline std::vector<double> first_columns(const std::vector<double>& v, int64_t n, int64_t keep) {
    std::vector<double> out;
    const int64_t width = static_cast<int64_t>(v.size()) / n;
    for (int64_t t = 0; t < n; ++t)
        out.insert(out.end(), v.begin() + t * width, v.begin() + t * width + keep);
    return out;
}

/// Compares the bits of a row with expected ones; `whose`: where these come from, "alone" for example.
inline void check_bits(const char* what, const char* whose, const double* got, const double* expected,
                       int64_t width) {
    for (int64_t i = 0; i < width; ++i) {
        if (std::memcmp(got + i, expected + i, sizeof(double)) == 0) continue;
        FAIL_CHECK(fmt::format("{}: column {} of {} is {:.9g}, {} {:.9g}", what, i, width, got[i], whose,
                               expected[i]));
        return;
    }
}

/// Compares watched rows of a step with the same rows alone. Outputs beyond `names` are not compared.
class AloneRows {
  public:
    using Run = std::function<StepOutputs(const std::vector<int64_t>& rows)>;
    AloneRows(std::vector<const char*> names, Run run) : names_(std::move(names)), run_(std::move(run)) {}

    StepOutputs run(const std::vector<int64_t>& rows) const { return run_(rows); }
    /// outputs: those of step_rows(n).
    void check(int64_t n, const StepOutputs& outputs) {
        REQUIRE(outputs.size() >= names_.size());
        const auto rows = step_rows(n);
        for (const int64_t place : watched_places(n)) {
            CAPTURE(place);
            const StepOutputs& alone = of(rows[static_cast<size_t>(place)]);
            for (size_t i = 0; i < names_.size(); ++i) {
                const auto width = static_cast<int64_t>(alone[i].size());
                REQUIRE(static_cast<int64_t>(outputs[i].size()) == n * width);
                check_bits(names_[i], "alone", outputs[i].data() + place * width, alone[i].data(), width);
            }
        }
    }

  private:
    const StepOutputs& of(int64_t row) {
        const auto found = known_.find(row);
        return found != known_.end() ? found->second : known_.emplace(row, run_({row})).first->second;
    }

    std::vector<const char*> names_;
    Run run_;
    std::map<int64_t, StepOutputs> known_;
};

/// Expected values of some columns of one row, each with the largest error that FP32 may have.
struct Expected {
    int64_t width;  // of the row
    std::vector<int64_t> column;
    std::vector<double> value, bound;

    void add(int64_t c, double v, double b) {
        column.push_back(c);
        value.push_back(v);
        bound.push_back(b);
    }
};

/// `tolerance`: relative, of the row in the L2 sense, for devices that FP32's bounds do not fit; 0: the device's own.
inline void check_row(const Device& device, const char* what, const double* got, const Expected& e,
                      double tolerance = 0) {
    if (tolerance == 0) tolerance = device.tolerance;
    double difference = 0, norm = 0, whole = 0;
    for (size_t i = 0; i < e.column.size(); ++i) {
        const double d = got[e.column[i]] - e.value[i];
        difference += d * d;
        norm += e.value[i] * e.value[i];
        if (!device.exact() || std::fabs(d) <= e.bound[i]) continue;
        FAIL_CHECK(fmt::format("{}: column {} of {} is {:.9g}, expected {:.9g} to within {:.2g}", what,
                               e.column[i], e.width, got[e.column[i]], e.value[i], e.bound[i]));
        return;
    }
    // A few checked columns may all be small: then the whole row's size counts.
    for (int64_t c = 0; c < e.width; ++c) whole += got[c] * got[c];
    norm = std::max(norm, whole * static_cast<double>(e.column.size()) / static_cast<double>(e.width));
    if (device.exact() || std::sqrt(difference) <= tolerance * std::sqrt(norm)) return;
    FAIL_CHECK(fmt::format("{}: the row is off by {:.2g}, at most {:.2g}", what, std::sqrt(difference / norm),
                           tolerance));
}

/// Columns of row t of n that are computed in double: all, if that is cheap, else every so manyth, different ones in
/// each row.
inline std::vector<int64_t> checked_columns(int64_t t, int64_t n, int64_t columns, int64_t products_each) {
    constexpr double kCheap = 4e6;
    const double all =
        static_cast<double>(n) * static_cast<double>(columns) * static_cast<double>(products_each);
    const auto step = static_cast<int64_t>(1 + all / kCheap);
    std::vector<int64_t> some;
    for (int64_t c = t % step; c < columns; c += step) some.push_back(c);
    return some;
}

/// Row `row` of a decoded matrix times x.
template <typename T>
Sum row_product(const std::vector<double>& w, int64_t row, int64_t cols, const T* x) {
    Sum sum;
    for (int64_t k = 0; k < cols; ++k)
        sum.add(w[static_cast<size_t>(row * cols + k)], static_cast<double>(x[k]));
    return sum;
}

/// The relative error of a GPU's products of these forms: where products are exact only the sum is rounded.
inline double product_tolerance(const Device& device, const std::vector<Form>& forms) {
    for (const Form f : forms)
        if (f == Form::f32 || f == Form::f16 || f == Form::f8_block) return device.tolerance;
    return 5e-4;
}

}  // namespace quern::test
