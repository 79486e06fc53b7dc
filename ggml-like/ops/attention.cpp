#include "ggml-like/ops/attention.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

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
    const Inputs in{*node.inputs[0], *node.inputs[1], *node.inputs[2], *node.inputs[3],
                    *node.inputs[4], *node.state[0],  *node.state[1],  *node.outputs[0]};
    const int64_t kv_heads = in.k.shape[1];
    for (int64_t t = 0; t < in.q.shape[0]; ++t) {
        const int32_t position = in.positions.as<int32_t>()[t];
        CHECK(in.row_sequence.as<int32_t>()[t] < 0 || position / kPageTokens < in.pages.shape[1],
              "[attention] {}: position {} is beyond the page table of {}", node.name, position,
              in.pages.shape[1]);
    }
    context.pool.parallel_for(in.q.shape[0] * kv_heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            if (in.row_sequence.as<int32_t>()[i / kv_heads] >= 0)
                attend(in, context.dot, i / kv_heads, i % kv_heads);
    });
}

Cost cost(const Node& node) {
    // Lengths are data; the bench adds the cache it knows to be read. Counted here: q, gate and y.
    return {.activation_bytes = 3 * cpu::dense_bytes(*node.outputs[0])};
}

}  // namespace

const Op kAttention{"attention", run, cost};

Tensor* attention(Graph& g, std::string_view name, Tensor* q, Tensor* gate, Tensor* k_cache, Tensor* v_cache,
                  const Batch& batch) {
    CHECK(q->rank == 3 && gate->rank == 3 && gate->stride[2] == 1 && gate->shape[0] == q->shape[0] &&
              gate->shape[1] == q->shape[1] && gate->shape[2] == q->shape[2],
          "[attention] {}: gate {} does not fit q {}", name, describe(*gate), describe(*q));
    for (const Tensor* cache : {k_cache, v_cache})
        CHECK(cache->rank == 4 && cache->shape[2] == kPageTokens && cache->shape[3] == q->shape[2] &&
                  q->shape[1] % cache->shape[1] == 0,
              "[attention] {}: cache {} does not fit q {}", name, describe(*cache), describe(*q));
    Tensor* y = g.scratch(name, q->dtype, {q->shape[0], q->shape[1] * q->shape[2]});
    g.add({.op = &kAttention,
           .name = std::string(name),
           .inputs = {q, gate, batch.positions, batch.row_sequence, batch.pages},
           .outputs = {y},
           .state = {k_cache, v_cache}});
    return y;
}

}  // namespace quern
