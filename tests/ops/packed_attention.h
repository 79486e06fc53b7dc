// gated_attention over packed caches in tests: caches on a device, a step over them, and the same in double precision
// (kv_reference.h packs and unpacks by itself).
#pragma once

#include <algorithm>
#include <map>
#include <tuple>

#include "ggml-like/kv_format.h"
#include "ggml-like/ops/gated_attention.h"
#include "ops/harness.h"
#include "ops/kv_reference.h"

namespace quern::test::packed_attention {

namespace ref = kv_reference;

struct Shape {
    int64_t heads, kv_heads, width;
    int rotary;
    DType k, v;
    std::vector<float> k_scale = {}, v_scale = {};

    int64_t k_begin() const { return 2 * heads * width; }
    int64_t v_begin() const { return k_begin() + kv_heads * width; }
    int64_t columns() const { return v_begin() + kv_heads * width; }
    int64_t out() const { return heads * width; }
    DType dtype(bool values) const { return values ? v : k; }
    ref::Kind kind(bool values) const { return ref::kind_of(dtype(values), values); }
    size_t block_bytes(bool values) const {
        return 64 * ref::row_bytes(kind(values), static_cast<size_t>(width));
    }
    GatedAttentionParams params() const {
        return {.eps = 1e-6f, .theta = 1e7f, .rotary_dims = rotary, .k_scale = k_scale, .v_scale = v_scale};
    }
};

/// A packed cache on a device, with guards on either side.
class PackedCache {
  public:
    PackedCache(const Device& device, const Shape& s, bool values, int64_t pages)
        : backend_(*device.backend),
          tensor_(make_tensor(values ? "v" : "k", s.dtype(values), Place::state,
                              {pages, s.kv_heads, kPageTokens, s.width})),
          bytes(static_cast<size_t>(pages * s.kv_heads) * s.block_bytes(values), 0x5a),
          memory_(backend_.alloc(size(), "packed cache")) {
        tensor_.data = static_cast<std::byte*>(memory_) + kGuard;
        const std::vector<std::byte> filled(static_cast<size_t>(size()), std::byte{0xa5});
        backend_.upload(memory_, filled.data(), size());
    }
    ~PackedCache() {
        std::vector<std::byte> all(static_cast<size_t>(size()));
        backend_.download(all.data(), memory_, size());
        for (size_t i = 0; i < kGuard; ++i)
            if (all[i] != std::byte{0xa5} || all[all.size() - 1 - i] != std::byte{0xa5})
                FAIL_CHECK("wrote outside of a packed cache");
        backend_.free(memory_);
    }
    PackedCache(const PackedCache&) = delete;

    const Tensor& tensor() const { return tensor_; }
    void upload() { backend_.upload(tensor_.data, bytes.data(), static_cast<int64_t>(bytes.size())); }
    void download() { backend_.download(bytes.data(), tensor_.data, static_cast<int64_t>(bytes.size())); }

  private:
    static constexpr size_t kGuard = kPlanAlignment;
    int64_t size() const { return static_cast<int64_t>(bytes.size() + 2 * kGuard); }

    Backend& backend_;
    Tensor tensor_;

  public:
    std::vector<uint8_t> bytes;

  private:
    void* memory_;
};

struct Memory {
    Shape shape;
    PackedCache k, v;
    Guarded q_norm, k_norm;

    Memory(const Device& device, const Shape& s, int64_t pages)
        : shape(s),
          k(device, s, false, pages),
          v(device, s, true, pages),
          q_norm(device, "q_norm", DType::F32, Place::weight, {s.width}),
          k_norm(device, "k_norm", DType::F32, Place::weight, {s.width}) {
        Random random(77);
        for (Guarded* norm : {&q_norm, &k_norm}) {
            auto weights = random.normals(s.width);
            for (float& w : weights) w = 1 + w / 4;
            norm->set(weights);
        }
    }

    uint8_t* block(bool values, int64_t page, int64_t head) {
        return (values ? v : k).bytes.data() +
               static_cast<size_t>(page * shape.kv_heads + head) * shape.block_bytes(values);
    }
    /// Rows that nobody computed here: packed by the reference, some hundred of them over and over.
    void remember(unsigned seed) {
        for (const bool values : {false, true}) {
            const auto& blocks = some_blocks(values, seed);
            auto& bytes = (values ? v : k).bytes;
            const size_t size = shape.block_bytes(values);
            for (size_t i = 0; i < bytes.size() / size; ++i)
                std::copy_n(blocks[i % blocks.size()].begin(), size,
                            bytes.begin() + static_cast<long>(i * size));
        }
        k.upload(), v.upload();
    }
    using Blocks = std::vector<std::vector<uint8_t>>;
    const Blocks& some_blocks(bool values, unsigned seed) const {
        static std::map<std::tuple<int, int64_t, unsigned>, Blocks> made;
        const auto kind = shape.kind(values);
        Blocks& blocks = made[{static_cast<int>(kind), shape.width, seed + values}];
        for (unsigned i = 0; blocks.size() < 5; ++i) {
            Random random(seed + 10 * i + values);
            blocks.emplace_back(shape.block_bytes(values));
            for (size_t place = 0; place < 64; ++place) {
                auto x = random.normals(shape.width);
                if (place % 16 == 5) x[place] *= 30;  // an outlier
                ref::pack(kind, {x.begin(), x.end()}, 0, blocks.back().data(), place);
            }
        }
        return blocks;
    }
    std::vector<double> row(bool values, const Layout& l, size_t at, int64_t key, int64_t head) {
        return ref::unpack(shape.kind(values), block(values, page_of(l, at, key / kPageTokens), head),
                           static_cast<size_t>(key % kPageTokens), static_cast<size_t>(shape.width));
    }
};

inline std::vector<double> run_step(const Device& device, const Layout& l, const std::vector<float>& p,
                                    Memory& m) {
    const Shape& s = m.shape;
    const int64_t tokens = l.tokens(), width = s.width, columns = s.columns();
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor* in = g.input("p", device.activation, {tokens, columns});
    const auto heads = [&](const char* name, int64_t begin, int64_t count, int64_t step) {
        return g.view(name, in, begin, {tokens, count, width}, {columns, step, 1});
    };
    g.output(gated_attention(g, "a",
                             {.q = heads("q", 0, s.heads, 2 * width),
                              .gate = heads("gate", width, s.heads, 2 * width),
                              .k = heads("k", s.k_begin(), s.kv_heads, width),
                              .v = heads("v", s.v_begin(), s.kv_heads, width),
                              .q_norm = g.external(m.q_norm.tensor()),
                              .k_norm = g.external(m.k_norm.tensor()),
                              .wanted = {b.logits_from, l.wanted_rows()}},
                             g.external(m.k.tensor()), g.external(m.v.tensor()), b, s.params()));
    const auto y = run_graph(device, std::move(g), [&](Plan& plan) {
        fill_batch(plan, b, l);
        set_input(plan, in, p);
    })[0];
    m.k.download(), m.v.download();
    return y;
}

/// Norm and rotary embedding of one head, in double; with keys in tq4 times the Hadamard matrix.
inline std::vector<double> rotated(const float* x, const std::vector<double>& norm, int64_t position,
                                   const Shape& s) {
    const GatedAttentionParams p = s.params();
    double sum = 0;
    for (size_t i = 0; i < norm.size(); ++i) sum += static_cast<double>(x[i]) * x[i];
    const double rms = std::sqrt(sum / static_cast<double>(norm.size()) + p.eps);
    std::vector<double> y;
    for (size_t i = 0; i < norm.size(); ++i) y.push_back(x[i] / rms * norm[i]);
    const auto half = static_cast<size_t>(p.rotary_dims / 2);
    for (size_t i = 0; i < half; ++i) {
        const long double angle =
            static_cast<long double>(position) *
            std::pow(static_cast<long double>(p.theta), -2.0L * static_cast<long double>(i) / p.rotary_dims);
        const double c = static_cast<double>(std::cos(angle)), sine = static_cast<double>(std::sin(angle));
        const double a = y[i], b = y[i + half];
        y[i] = a * c - b * sine, y[i + half] = b * c + a * sine;
    }
    return s.k == kv::kTq4 ? ref::hadamard(y) : y;
}

/// A row from the keys and values in the caches, as they were packed.
inline std::vector<double> reference_row(const float* row, Memory& m, const Layout& l, size_t at,
                                         int64_t position) {
    const Shape& s = m.shape;
    const auto norm = m.q_norm.values();
    const auto width = static_cast<size_t>(s.width);
    std::vector<double> out;
    for (int64_t g = 0; g < s.kv_heads; ++g) {
        const int64_t group = s.heads / s.kv_heads;
        std::vector<std::vector<double>> q, sums(static_cast<size_t>(group), std::vector<double>(width));
        std::vector<double> totals(static_cast<size_t>(group));
        for (int64_t h = 0; h < group; ++h)
            q.push_back(rotated(row + 2 * (g * group + h) * s.width, norm, position, s));
        for (int64_t key = 0; key <= position; ++key) {
            const auto k = m.row(false, l, at, key, g), v = m.row(true, l, at, key, g);
            for (size_t h = 0; h < q.size(); ++h) {
                double score = 0;
                for (size_t i = 0; i < width; ++i) score += q[h][i] * k[i];
                const double weight = std::exp(score / std::sqrt(static_cast<double>(width)));
                totals[h] += weight;
                for (size_t i = 0; i < width; ++i) sums[h][i] += weight * v[i];
            }
        }
        for (size_t h = 0; h < q.size(); ++h)
            for (size_t i = 0; i < width; ++i) {
                const auto gate =
                    static_cast<size_t>((2 * (g * group) + 2 * static_cast<int64_t>(h) + 1) * s.width);
                out.push_back(sums[h][i] / totals[h] / (1 + std::exp(-static_cast<double>(row[gate + i]))));
            }
    }
    return out;
}

inline std::vector<Shape> packed_shapes(int64_t heads, int64_t kv_heads, int64_t width, int rotary) {
    const DType fp8 = DType::F8_E4M3, nvfp4 = DType::NVFP4, tq4 = kv::kTq4;
    const Shape s{heads, kv_heads, width, rotary, fp8, fp8};
    std::vector<Shape> list = {s, s, s, s, s, s};
    list[1].k = list[1].v = nvfp4;
    list[2].k = list[2].v = tq4;
    list[3].v = tq4;  // k8v4
    list[4].v = nvfp4;
    list[5].k_scale = {0.013f}, list[5].v_scale = std::vector<float>(static_cast<size_t>(kv_heads), 0.02f);
    return list;
}

inline Layout layout_of(StepKind kind, const std::vector<int>& rows, const std::vector<int>& before,
                        int64_t pages_each) {
    const std::vector<int> zeros(rows.size(), 0);
    return {.rows = rows,
            .before = before,
            .slots = zeros,
            .committed = zeros,
            .journal = zeros,
            .pages_each = pages_each,
            .kind = kind};
}

}  // namespace quern::test::packed_attention
