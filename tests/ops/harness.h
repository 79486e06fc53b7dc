// A small bench for op tests: tensors with guards around them, poisoned outputs, one run through Graph and
// Plan.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/ops/batch.h"

namespace quern::test {

/// Memory of a weight or state tensor with a guard on either side, checked when the object goes.
class Guarded {
  public:
    Guarded(const char* name, DType dtype, Place place, std::initializer_list<int64_t> shape)
        : tensor_(make_tensor(name, dtype, place, shape)),
          memory_(static_cast<size_t>(tensor_.bytes()) + 2 * kGuard, std::byte{0xa5}) {
        tensor_.data = memory_.data() + kGuard;
    }
    ~Guarded() {
        for (size_t i = 0; i < kGuard; ++i)
            if (memory_[i] != std::byte{0xa5} || memory_[memory_.size() - 1 - i] != std::byte{0xa5})
                FAIL_CHECK("wrote outside of " << tensor_.name);
    }
    Guarded(const Guarded&) = delete;

    const Tensor& tensor() const { return tensor_; }
    float* data() { return tensor_.as<float>(); }
    std::vector<double> values() const {
        std::vector<float> f(static_cast<size_t>(tensor_.elements()));
        load_floats(tensor_, 0, tensor_.elements(), f.data());
        return {f.begin(), f.end()};
    }

  private:
    static constexpr size_t kGuard = 64;
    Tensor tensor_;
    std::vector<std::byte> memory_;
};

/// Rows of a step: `rows[s]` rows of sequence s, which has `before[s]` tokens already, in slot `slots[s]`.
struct Layout {
    std::vector<int> rows, before, slots;
    std::vector<int> committed = std::vector<int>(4, 0), journal = std::vector<int>(4, 0);
    int64_t pages_each = 4;

    int64_t tokens() const {
        int64_t n = 0;
        for (int r : rows) n += r;
        return n;
    }
};

inline Batch declare_batch(Graph& g, const Layout& l) {
    const auto sequences = static_cast<int64_t>(l.rows.size());
    Batch b;
    b.positions = g.input("positions", DType::I32, {l.tokens()});
    b.row_sequence = g.input("row_sequence", DType::I32, {l.tokens()});
    b.start = g.input("start", DType::I32, {sequences + 1});
    b.slots = g.input("slots", DType::I32, {sequences});
    b.pages = g.input("pages", DType::I32, {sequences, l.pages_each});
    b.committed = g.input("committed", DType::I32, {sequences});
    b.journal = g.input("journal", DType::I32, {sequences});
    return b;
}

/// Page p of sequence s: a fixed permutation, so that pages are neither in order nor neighbours.
inline int page_of(const Layout& l, size_t s, int64_t p) {
    const auto total = static_cast<int64_t>(l.rows.size()) * l.pages_each;
    return static_cast<int>((static_cast<int64_t>(s) * l.pages_each + p) * 7 % total);
}

inline void fill_batch(Plan& plan, const Batch& b, const Layout& l) {
    int row = 0;
    for (size_t s = 0; s < l.rows.size(); ++s) {
        plan.input<int32_t>(b.start)[s] = row;
        plan.input<int32_t>(b.slots)[s] = l.slots[s];
        plan.input<int32_t>(b.committed)[s] = l.committed[s];
        plan.input<int32_t>(b.journal)[s] = l.journal[s];
        for (int64_t p = 0; p < l.pages_each; ++p)
            plan.input<int32_t>(b.pages)[static_cast<int64_t>(s) * l.pages_each + p] = page_of(l, s, p);
        for (int r = 0; r < l.rows[s]; ++r, ++row) {
            plan.input<int32_t>(b.positions)[row] = l.before[s] + r;
            plan.input<int32_t>(b.row_sequence)[row] = static_cast<int32_t>(s);
        }
    }
    plan.input<int32_t>(b.start)[l.rows.size()] = row;
}

/// Runs a graph; `fill` writes the inputs. Returns the outputs as doubles; memory they do not write shows as
/// NaN.
inline std::vector<std::vector<double>> run_graph(Graph graph, const std::function<void(Plan&)>& fill,
                                                  int threads = 2) {
    const auto backend = make_cpu_backend(threads);
    const std::vector<Tensor*> outputs = graph.outputs();
    Plan plan(std::move(graph), *backend);
    fill(plan);
    for (Tensor* t : outputs) std::memset(t->data, 0xff, static_cast<size_t>(t->bytes()));
    plan.run();
    std::vector<std::vector<double>> all;
    for (Tensor* t : outputs) {
        std::vector<double> values;
        for (int64_t i = 0; i < t->elements(); ++i) {
            if (t->dtype == DType::I32) {
                values.push_back(t->as<int32_t>()[i]);
                continue;
            }
            float f;
            load_floats(*t, i, 1, &f);
            values.push_back(f);
        }
        all.push_back(std::move(values));
    }
    return all;
}

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    float normal() { return normal_(engine_); }
    std::vector<float> normals(int64_t n) {
        std::vector<float> v(static_cast<size_t>(n));
        for (float& x : v) x = normal();
        return v;
    }

  private:
    std::mt19937 engine_;
    std::normal_distribution<float> normal_;
};

/// ‖got - expected‖ / ‖expected‖; NaN anywhere gives NaN, which no bound accepts.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& expected) {
    REQUIRE(got.size() == expected.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        difference += (got[i] - expected[i]) * (got[i] - expected[i]);
        norm += expected[i] * expected[i];
    }
    return std::sqrt(difference / std::max(norm, 1e-300));
}

inline void set_input(Plan& plan, Tensor* t, const std::vector<float>& values) {
    Tensor host = *t;
    host.data = plan.input<void>(t);
    store_floats(host, 0, static_cast<int64_t>(values.size()), values.data());
}

}  // namespace quern::test
