// What op tests share: devices, tensors with guards around them, poisoned outputs, one run through Graph and Plan.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <deque>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/ops/batch.h"
#include "ops/second_backend.h"

namespace quern::test {

/// A backend and how exact it is.
struct Device {
    std::unique_ptr<Backend> backend;
    DType activation = DType::F32;
    double tolerance = 0;  // relative, in the L2 sense; 0: FP32 sums, so the case's own bound counts

    bool exact() const { return tolerance == 0; }
    double bound(double of_exact) const { return exact() ? of_exact : tolerance; }
    /// `v` rounded to values that an activation can hold.
    std::vector<float> rounded(std::vector<float> v) const {
        if (activation == DType::BF16)
            for (float& x : v) x = bf16_to_float(float_to_bf16(x));
        return v;
    }
};

inline Device cpu_device(int threads = 2) { return {make_cpu_backend(threads)}; }

inline Device cuda_device() {
    return {.backend = make_test_cuda_backend(), .activation = DType::BF16, .tolerance = 1e-2};
}

using DeviceCase = void (*)(Device& device);

inline void on_cpu(DeviceCase run) {
    Device device = cpu_device();
    run(device);
}

inline void on_cuda(DeviceCase run) {
    Device device = cuda_device();
    run(device);
}

/// One test case in the suite of each backend. (Of two with the same line and title doctest keeps only one.)
#define DEVICE_TEST_CASE(title, run)                 \
    TEST_SUITE("cpu") {                              \
        TEST_CASE(title) { on_cpu(run); }            \
    }                                                \
    TEST_SUITE("cuda") {                             \
        TEST_CASE(title " (CUDA)") { on_cuda(run); } \
    }

/// A weight placed on the backend; the bytes of its segments stay where they are.
inline Weight placed(const Device& device, Weight weight, RowOrder order = RowOrder::stacked) {
    device.backend->place_weight(weight, order);
    return weight;
}
inline ExpertWeights placed(const Device& device, ExpertWeights experts, RowOrder order = RowOrder::stacked) {
    device.backend->place_experts(experts, order);
    return experts;
}

/// A weight or state tensor on the backend, with a guard on either side, checked when the object is destroyed.
class Guarded {
  public:
    Guarded(const Device& device, const char* name, DType dtype, Place place,
            std::initializer_list<int64_t> shape)
        : backend_(*device.backend),
          tensor_(make_tensor(name, dtype, place, shape)),
          host_(static_cast<size_t>(tensor_.bytes()) + 2 * kGuard, std::byte{0xa5}),
          memory_(backend_.alloc(size(), name)) {
        tensor_.data = static_cast<std::byte*>(memory_) + kGuard;
        backend_.upload(memory_, host_.data(), size());
    }
    ~Guarded() {
        backend_.download(host_.data(), memory_, size());
        for (size_t i = 0; i < kGuard; ++i)
            if (host_[i] != std::byte{0xa5} || host_[host_.size() - 1 - i] != std::byte{0xa5})
                FAIL_CHECK("wrote outside of " << tensor_.name);
        backend_.free(memory_);
    }
    Guarded(const Guarded&) = delete;

    const Tensor& tensor() const { return tensor_; }
    void set(const std::vector<float>& values) {
        REQUIRE(static_cast<int64_t>(values.size()) == tensor_.elements());
        store_floats(host_tensor(), 0, tensor_.elements(), values.data());
        backend_.upload(memory_, host_.data(), size());
    }
    void fill(float value) { set(std::vector<float>(static_cast<size_t>(tensor_.elements()), value)); }
    std::vector<double> values() {
        backend_.download(host_.data(), memory_, size());
        std::vector<float> f(static_cast<size_t>(tensor_.elements()));
        load_floats(host_tensor(), 0, tensor_.elements(), f.data());
        return {f.begin(), f.end()};
    }

  private:
    static constexpr size_t kGuard = kPlanAlignment;

    int64_t size() const { return static_cast<int64_t>(host_.size()); }
    Tensor host_tensor() {
        Tensor t = tensor_;
        t.data = host_.data() + kGuard;
        return t;
    }

    Backend& backend_;
    Tensor tensor_;
    std::vector<std::byte> host_;
    void* memory_;
};

/// Rows of a step: `rows[s]` rows of sequence s, which has `before[s]` tokens already, in slot `slots[s]`.
struct Layout {
    std::vector<int> rows, before, slots;
    std::vector<int> committed = std::vector<int>(4, 0), journal = std::vector<int>(4, 0);
    int64_t pages_each = 4;
    int padding = 0;  // rows after the last sequence
    StepKind kind = StepKind::prompt;
    std::vector<int> wanted = {};  // of each sequence so many of its last rows; none: all

    int64_t tokens() const {
        int64_t n = padding;
        for (int r : rows) n += r;
        return n;
    }
    int64_t wanted_rows() const { return std::reduce(wanted.begin(), wanted.end(), int64_t{0}); }
};

inline Batch declare_batch(Graph& g, const Layout& l) {
    const auto sequences = static_cast<int64_t>(l.rows.size());
    Batch b;
    b.kind = l.kind;
    b.positions = g.input("positions", DType::I32, {l.tokens()});
    b.row_sequence = g.input("row_sequence", DType::I32, {l.tokens()});
    b.start = g.input("start", DType::I32, {sequences + 1});
    b.slots = g.input("slots", DType::I32, {sequences});
    b.pages = g.input("pages", DType::I32, {sequences, l.pages_each});
    b.committed = g.input("committed", DType::I32, {sequences});
    b.journal = g.input("journal", DType::I32, {sequences});
    if (!l.wanted.empty()) b.logits_from = g.input("logits_from", DType::I32, {sequences});
    return b;
}

/// Page p of sequence s: a fixed permutation, so that pages are neither in order nor neighbours.
inline int page_of(const Layout& l, size_t s, int64_t p) {
    const auto total = static_cast<int64_t>(l.rows.size()) * l.pages_each;
    const int64_t step = total % 7 != 0 ? 7 : total % 11 != 0 ? 11 : 13;
    return static_cast<int>((static_cast<int64_t>(s) * l.pages_each + p) * step % total);
}

inline void fill_batch(Plan& plan, const Batch& b, const Layout& l) {
    int row = 0;
    for (size_t s = 0; s < l.rows.size(); ++s) {
        plan.input<int32_t>(b.start)[s] = row;
        if (!l.wanted.empty())
            plan.input<int32_t>(b.logits_from)[s] = static_cast<int32_t>(row + l.rows[s] - l.wanted[s]);
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
    for (; row < l.tokens(); ++row) {
        plan.input<int32_t>(b.positions)[row] = 0;
        plan.input<int32_t>(b.row_sequence)[row] = -1;
    }
}

/// A tensor of the backend as doubles.
inline std::vector<double> download(Backend& backend, const Tensor& t) {
    std::vector<std::byte> bytes(static_cast<size_t>(t.bytes()));
    backend.download(bytes.data(), t.data, t.bytes());
    Tensor host = t;
    host.data = bytes.data();
    if (t.dtype == DType::I32) return {host.as<int32_t>(), host.as<int32_t>() + t.elements()};
    if (t.dtype == DType::I64) return {host.as<int64_t>(), host.as<int64_t>() + t.elements()};
    std::vector<float> values(static_cast<size_t>(t.elements()));
    load_floats(host, 0, t.elements(), values.data());
    return {values.begin(), values.end()};
}

/// Runs a graph `times` times; `fill` writes the inputs. Returns the outputs; elements that nobody wrote are NaN.
inline std::vector<std::vector<double>> run_graph(const Device& device, Graph graph,
                                                  const std::function<void(Plan&)>& fill, int times = 1) {
    Backend& backend = *device.backend;
    backend.weights_complete();
    const std::vector<Tensor*> outputs = graph.outputs();
    Plan plan(std::move(graph), backend);
    fill(plan);
    for (Tensor* t : outputs) {
        const std::vector<std::byte> poison(static_cast<size_t>(t->bytes()), std::byte{0xff});
        backend.upload(t->data, poison.data(), t->bytes());
    }
    for (int i = 0; i < times; ++i) plan.run();
    backend.synchronize();
    std::vector<std::vector<double>> all;
    for (Tensor* t : outputs) all.push_back(download(backend, *t));
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

/// Rows [begin, begin + count) of a matrix of this width.
template <typename T>
std::vector<T> rows_of(const std::vector<T>& v, int64_t width, int64_t begin, int64_t count) {
    return {v.begin() + begin * width, v.begin() + (begin + count) * width};
}

inline void set_input(Plan& plan, Tensor* t, const std::vector<float>& values) {
    Tensor host = *t;
    host.data = plan.input<void>(t);
    store_floats(host, 0, static_cast<int64_t>(values.size()), values.data());
}

}  // namespace quern::test
