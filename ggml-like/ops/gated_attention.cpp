#include "ggml-like/ops/gated_attention.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

enum Input { kQ, kGate, kK, kV, kQNorm, kKNorm, kPositions, kRowSequence, kStart, kPages };

/// cos and sin of one position's angles, in FP64 so that large positions keep their phase.
void fill_angles(int32_t position, const GatedAttentionParams& p, std::vector<float>& cosine,
                 std::vector<float>& sine) {
    const int half = p.rotary_dims / 2;
    for (int i = 0; i < half; ++i) {
        const double angle = position * std::pow(static_cast<double>(p.theta), -2.0 * i / p.rotary_dims);
        cosine[static_cast<size_t>(i)] = static_cast<float>(std::cos(angle));
        sine[static_cast<size_t>(i)] = static_cast<float>(std::sin(angle));
    }
}

/// Normalises and rotates rows in place: a head at a time.
class Rotation {
  public:
    Rotation(const Node& node, int32_t position)
        : p_(node.params<GatedAttentionParams>()),
          half_(static_cast<size_t>(p_.rotary_dims / 2)),
          cosine_(half_),
          sine_(half_) {
        fill_angles(position, p_, cosine_, sine_);
    }
    void apply(const Tensor& norm, std::vector<float>& row) const {
        const auto width = static_cast<int64_t>(row.size());
        const float r = cpu::inverse_rms(row.data(), width, p_.eps);
        for (size_t i = 0; i < row.size(); ++i) row[i] *= r * norm.as<float>()[i];
        for (size_t i = 0; i < half_; ++i) {
            const float a = row[i], b = row[i + half_];
            row[i] = a * cosine_[i] - b * sine_[i];
            row[i + half_] = b * cosine_[i] + a * sine_[i];
        }
    }

  private:
    const GatedAttentionParams& p_;
    size_t half_;
    std::vector<float> cosine_, sine_;
};

/// Step 1 of the contract for q, steps 1 and 2 for k and v, of one row.
void rotate_and_store(const Node& node, int64_t t) {
    const int32_t position = node.inputs[kPositions]->as<int32_t>()[t];
    const int32_t sequence = node.inputs[kRowSequence]->as<int32_t>()[t];
    const Tensor &q = *node.inputs[kQ], &pages = *node.inputs[kPages], &rotated = *node.outputs[1];
    const Rotation rotation(node, position);
    std::vector<float> row(static_cast<size_t>(q.shape[2]));
    const auto width = static_cast<int64_t>(row.size());
    for (int64_t h = 0; h < q.shape[1]; ++h) {
        load_floats(q, t * q.stride[0] + h * q.stride[1], width, row.data());
        rotation.apply(*node.inputs[kQNorm], row);
        store_floats(rotated, t * rotated.stride[0] + h * rotated.stride[1], width, row.data());
    }
    const int64_t page = pages.row<int32_t>(sequence)[position / kPageTokens];
    for (size_t part = 0; part < 2; ++part) {  // k, then v
        const Tensor &x = *node.inputs[kK + part], &cache = *node.state[part];
        CHECK(page >= 0 && page < cache.shape[0], "[gated_attention] {}: page {} of {}", node.name, page,
              describe(cache));
        for (int64_t h = 0; h < x.shape[1]; ++h) {
            load_floats(x, t * x.stride[0] + h * x.stride[1], width, row.data());
            if (part == 0) rotation.apply(*node.inputs[kKNorm], row);
            store_floats(
                cache,
                page * cache.stride[0] + h * cache.stride[1] + position % kPageTokens * cache.stride[2],
                width, row.data());
        }
    }
}

struct Inputs {
    const Tensor &q, &gate, &positions, &row_sequence, &pages, &k, &v, &y;
};

/// Row `at` of a cache as floats: the cache's own memory if it is F32, else converted into `buffer`.
const float* cache_row(const Tensor& cache, int64_t at, std::vector<float>& buffer) {
    if (cache.dtype == DType::F32) return cache.as<float>() + at;
    load_floats(cache, at, cache.shape[3], buffer.data());
    return buffer.data();
}

/// One KV head of one row: its H/G query heads share each key and value they read.
void attend(const Inputs& in, const cpu::DotKernels& dot, int64_t t, int64_t kv_head) {
    const int64_t width = in.q.shape[2], group = in.q.shape[1] / in.k.shape[1];
    const int64_t keys = in.positions.as<int32_t>()[t] + 1;
    const int32_t* pages = in.pages.row<int32_t>(in.row_sequence.as<int32_t>()[t]);
    std::vector<float> q(static_cast<size_t>(group * width)), scores(static_cast<size_t>(group * keys)),
        out(static_cast<size_t>(group * width), 0.0f), buffer(static_cast<size_t>(width)), sums;
    const auto cache_at = [&](const Tensor& cache, int64_t key) {
        return pages[key / kPageTokens] * cache.stride[0] + kv_head * cache.stride[1] +
               key % kPageTokens * cache.stride[2];
    };

    for (int64_t h = 0; h < group; ++h)
        load_floats(in.q, t * in.q.stride[0] + (kv_head * group + h) * in.q.stride[1], width,
                    q.data() + h * width);

    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    for (int64_t key = 0; key < keys; ++key) {
        const float* k = cache_row(in.k, cache_at(in.k, key), buffer);
        for (int64_t h = 0; h < group; ++h)
            scores[static_cast<size_t>(h * keys + key)] = dot.dot_f32(q.data() + h * width, k, width) * scale;
    }
    for (int64_t h = 0; h < group; ++h) {
        float* s = scores.data() + h * keys;
        const float highest = *std::max_element(s, s + keys);
        float sum = 0;
        for (int64_t key = 0; key < keys; ++key) sum += s[key] = std::exp(s[key] - highest);
        sums.push_back(sum);
    }
    for (int64_t key = 0; key < keys; ++key) {
        const float* v = cache_row(in.v, cache_at(in.v, key), buffer);
        for (int64_t h = 0; h < group; ++h)
            dot.axpy(scores[static_cast<size_t>(h * keys + key)], v, out.data() + h * width, width);
    }
    for (int64_t h = 0; h < group; ++h) {
        const int64_t head = kv_head * group + h;
        load_floats(in.gate, t * in.gate.stride[0] + head * in.gate.stride[1], width, buffer.data());
        float* o = out.data() + h * width;
        for (int64_t i = 0; i < width; ++i)
            o[i] = o[i] / sums[static_cast<size_t>(h)] * cpu::sigmoid(buffer[static_cast<size_t>(i)]);
        store_floats(in.y, t * in.y.stride[0] + head * width, width, o);
    }
}

void run(const Node& node, cpu::Context& context) {
    const Inputs in{
        *node.outputs[1],     *node.inputs[kGate], *node.inputs[kPositions], *node.inputs[kRowSequence],
        *node.inputs[kPages], *node.state[0],      *node.state[1],           *node.outputs[0]};
    const int64_t kv_heads = in.k.shape[1], tokens = in.q.shape[0];
    const int32_t* sequence = in.row_sequence.as<int32_t>();
    for (int64_t t = 0; t < tokens; ++t) {
        const int32_t position = in.positions.as<int32_t>()[t];
        CHECK(sequence[t] < 0 || position / kPageTokens < in.pages.shape[1],
              "[gated_attention] {}: position {} is beyond the page table of {}", node.name, position,
              in.pages.shape[1]);
    }
    context.pool.parallel_for(tokens, 2, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t)
            if (sequence[t] >= 0) rotate_and_store(node, t);
    });
    context.pool.parallel_for(tokens * kv_heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            if (sequence[i / kv_heads] >= 0) attend(in, context.dot, i / kv_heads, i % kv_heads);
    });
    const int64_t row_bytes = dtype_bytes(in.y.dtype, in.y.shape[1]);
    for (int64_t t = 0; t < tokens; ++t)
        if (sequence[t] < 0)
            std::memset(in.y.as<std::byte>() + t * row_bytes, 0, static_cast<size_t>(row_bytes));
}

Cost cost(const Node& node) {
    // Sequence lengths are data, so the bench adds the cache that is read. Counted here: q, gate and y, and
    // the rows' own k and v.
    const Tensor& k = *node.inputs[kK];
    return {.state_bytes = 2.0 * static_cast<double>(dtype_bytes(node.state[0]->dtype, k.elements())),
            .activation_bytes = 3 * cpu::dense_bytes(*node.outputs[0]) + 2 * cpu::dense_bytes(k)};
}

void check_inputs(std::string_view name, const AttentionInputs& in, const GatedAttentionParams& p) {
    const Tensor &q = *in.q, &k = *in.k;
    for (const Tensor* t : {in.q, in.gate, in.k, in.v})
        CHECK(t->rank == 3 && t->stride[2] == 1 && t->shape[0] == q.shape[0] && t->shape[2] == q.shape[2],
              "[gated_attention] {}: {} does not fit q {}", name, describe(*t), describe(q));
    CHECK(in.gate->shape[1] == q.shape[1] && in.v->shape[1] == k.shape[1] && q.shape[1] % k.shape[1] == 0,
          "[gated_attention] {}: gate {}, k {} or v {} do not fit q {}", name, describe(*in.gate),
          describe(k), describe(*in.v), describe(q));
    for (const Tensor* w : {in.q_norm, in.k_norm})
        CHECK(w->rank == 1 && w->dtype == DType::F32 && w->shape[0] == q.shape[2],
              "[gated_attention] {}: norm {} does not fit q {}", name, describe(*w), describe(q));
    CHECK(p.rotary_dims >= 0 && p.rotary_dims % 2 == 0 && p.rotary_dims <= q.shape[2],
          "[gated_attention] {}: {} rotary dimensions of {}", name, p.rotary_dims, q.shape[2]);
}

}  // namespace

const Op kGatedAttention{"gated_attention", run, cost};

Tensor* gated_attention(Graph& g, std::string_view name, const AttentionInputs& in, Tensor* k_cache,
                        Tensor* v_cache, const Batch& batch, const GatedAttentionParams& params) {
    check_inputs(name, in, params);
    const Tensor& q = *in.q;
    const int64_t tokens = q.shape[0], heads = q.shape[1], kv_heads = in.k->shape[1], d = q.shape[2];
    for (const Tensor* cache : {k_cache, v_cache})
        CHECK(cache->rank == 4 && cache->shape[1] == kv_heads && cache->shape[2] == kPageTokens &&
                  cache->shape[3] == d,
              "[gated_attention] {}: cache {} does not fit k {}", name, describe(*cache), describe(*in.k));
    Tensor* y = g.scratch(name, q.dtype, {tokens, heads * d});
    Tensor* rotated = g.scratch(fmt::format("{}.rotated", name), q.dtype, {tokens, heads, d});
    const int64_t bytes = attention_work_bytes(batch.kind, tokens, kv_heads, d);
    GatedAttentionParams own = params;
    own.kind = batch.kind;
    Tensor* work = g.scratch(fmt::format("{}.work", name), DType::U8, {std::max<int64_t>(1, bytes)});
    g.add({.op = &kGatedAttention,
           .name = std::string(name),
           .inputs = {in.q, in.gate, in.k, in.v, in.q_norm, in.k_norm, batch.positions, batch.row_sequence,
                      batch.start, batch.pages},
           .outputs = {y, rotated, work},
           .state = {k_cache, v_cache},
           .parameters = own});
    return y;
}

}  // namespace quern
