#include "ggml-like/ops/block_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

enum Input { kQ, kK, kV, kQNorm, kKNorm, kPositions, kRowSequence, kStart, kPages };
enum Output { kY, kRotatedQ, kRotatedK };

/// Step 1 of the contract for one row.
void rotate(const Node& node, int64_t t) {
    const auto& p = node.params<BlockAttentionParams>();
    const cpu::HeadRotation rotation(p.rotary, node.inputs[kPositions]->as<int32_t>()[t]);
    std::vector<float> row(static_cast<size_t>(node.inputs[kQ]->shape[2]));
    for (const auto& [in, norm, out] :
         {std::tuple(kQ, kQNorm, kRotatedQ), std::tuple(kK, kKNorm, kRotatedK)}) {
        const Tensor &x = *node.inputs[in], &y = *node.outputs[out];
        for (int64_t h = 0; h < x.shape[1]; ++h) {
            load_floats(x, t * x.stride[0] + h * x.stride[1], x.shape[2], row.data());
            rotation.apply(node.inputs[norm]->as<float>(), p.eps, row);
            store_floats(y, t * y.stride[0] + h * y.stride[1], x.shape[2], row.data());
        }
    }
}

/// Where the keys or values are that one row and KV head may read.
class VisibleKeys {
  public:
    VisibleKeys(const Node& node, int64_t t, int64_t kv_head)
        : pages_(node.inputs[kPages]->row<int32_t>(node.inputs[kRowSequence]->as<int32_t>()[t])) {
        const auto& p = node.params<BlockAttentionParams>();
        const int32_t* start = node.inputs[kStart]->as<int32_t>();
        const int32_t sequence = node.inputs[kRowSequence]->as<int32_t>()[t];
        const int64_t position = node.inputs[kPositions]->as<int32_t>()[t], rows_begin = start[sequence],
                      rows_end = p.causal ? t + 1 : start[sequence + 1];
        context_ = node.inputs[kPositions]->as<int32_t>()[rows_begin];
        first_ = p.window > 0 ? std::max<int64_t>(0, position - p.window + 1) : 0;
        const int64_t last = context_ + rows_end - rows_begin - 1;
        end_ = 1 + (p.window > 0 ? std::min(last, position + p.window - 1) : last);
        row_ = rows_begin;
        head_ = kv_head;
        cache_head_ = p.first_head + kv_head;
    }
    int64_t count() const { return end_ - first_; }
    /// Element offset of visible key i, in the cache or among the block's rows.
    void load(int64_t i, const Tensor& cache, const Tensor& block, std::vector<float>& to) const {
        const int64_t position = first_ + i, d = block.shape[2];
        if (position < context_)
            return load_floats(cache,
                               pages_[position / kPageTokens] * cache.stride[0] +
                                   cache_head_ * cache.stride[1] + position % kPageTokens * cache.stride[2],
                               d, to.data());
        load_floats(block, (row_ + position - context_) * block.stride[0] + head_ * block.stride[1], d,
                    to.data());
    }

  private:
    const int32_t* pages_;
    int64_t context_, first_, end_, row_, head_, cache_head_;
};

/// One KV head of one row: its H/G query heads share each key and value they read.
void attend(const Node& node, const cpu::DotKernels& dot, int64_t t, int64_t kv_head) {
    const Tensor &q = *node.outputs[kRotatedQ], &y = *node.outputs[kY], &k = *node.outputs[kRotatedK];
    const int64_t width = q.shape[2], group = q.shape[1] / k.shape[1];
    const VisibleKeys keys(node, t, kv_head);
    std::vector<float> queries(static_cast<size_t>(group * width)), row(static_cast<size_t>(width)),
        scores(static_cast<size_t>(group * keys.count())), out(queries.size(), 0.0f);
    load_floats(q, t * q.stride[0] + kv_head * group * width, group * width, queries.data());
    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    for (int64_t i = 0; i < keys.count(); ++i) {
        keys.load(i, *node.state[0], k, row);
        for (int64_t h = 0; h < group; ++h)
            scores[static_cast<size_t>(h * keys.count() + i)] =
                dot.dot_f32(queries.data() + h * width, row.data(), width) * scale;
    }
    std::vector<float> sums;
    for (int64_t h = 0; h < group; ++h) {
        float* s = scores.data() + h * keys.count();
        const float highest = *std::max_element(s, s + keys.count());
        float sum = 0;
        for (int64_t i = 0; i < keys.count(); ++i) sum += s[i] = std::exp(s[i] - highest);
        sums.push_back(sum);
    }
    for (int64_t i = 0; i < keys.count(); ++i) {
        keys.load(i, *node.state[1], *node.inputs[kV], row);
        for (int64_t h = 0; h < group; ++h)
            dot.axpy(scores[static_cast<size_t>(h * keys.count() + i)], row.data(), out.data() + h * width,
                     width);
    }
    for (int64_t h = 0; h < group; ++h) {
        float* o = out.data() + h * width;
        for (int64_t i = 0; i < width; ++i) o[i] /= sums[static_cast<size_t>(h)];
        store_floats(y, t * y.stride[0] + (kv_head * group + h) * width, width, o);
    }
}

void check_positions(const Node& node) {
    const Tensor& pages = *node.inputs[kPages];
    const Tensor& start = *node.inputs[kStart];
    for (int64_t s = 0; s + 1 < start.shape[0]; ++s) {
        const int32_t begin = start.as<int32_t>()[s], end = start.as<int32_t>()[s + 1];
        if (begin == end) continue;
        const int64_t before = node.inputs[kPositions]->as<int32_t>()[begin];
        CHECK(before <= pages.shape[1] * kPageTokens,
              "[block_attention] {}: {} positions are beyond the page table of {}", node.name, before,
              pages.shape[1]);
        for (int64_t p = 0; p * kPageTokens < before; ++p) {
            const int32_t page = pages.row<int32_t>(s)[p];
            CHECK(page >= 0 && page < node.state[0]->shape[0], "[block_attention] {}: page {} of {}",
                  node.name, page, describe(*node.state[0]));
        }
    }
}

void run(const Node& node, cpu::Context& context) {
    const Tensor& y = *node.outputs[kY];
    const int64_t tokens = y.shape[0], kv_heads = node.inputs[kK]->shape[1];
    const int32_t* sequence = node.inputs[kRowSequence]->as<int32_t>();
    check_positions(node);
    context.pool.parallel_for(tokens, 2, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t)
            if (sequence[t] >= 0) rotate(node, t);
    });
    context.pool.parallel_for(tokens * kv_heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            if (sequence[i / kv_heads] >= 0) attend(node, context.dot, i / kv_heads, i % kv_heads);
    });
    const int64_t row_bytes = dtype_bytes(y.dtype, y.shape[1]);
    for (int64_t t = 0; t < tokens; ++t)
        if (sequence[t] < 0)
            std::memset(y.as<std::byte>() + t * row_bytes, 0, static_cast<size_t>(row_bytes));
}

Cost cost(const Node& node) {
    // How many cached keys are read is data.
    return {.activation_bytes =
                2 * cpu::dense_bytes(*node.outputs[kY]) + 2 * cpu::dense_bytes(*node.inputs[kK])};
}

}  // namespace

const Op kBlockAttention{"block_attention", run, cost};

int64_t block_attention_splits(int64_t sequences, int64_t kv_heads) {
    constexpr int64_t kBlocks = 264;  // two for each SM of a large card
    return std::clamp<int64_t>(kBlocks / std::max<int64_t>(1, sequences * kv_heads), 1, kMaxBlockSplits);
}

int64_t block_attention_work_bytes(int64_t tokens, int64_t sequences, int64_t heads, int64_t kv_heads,
                                   int64_t head_dim) {
    return block_attention_splits(sequences, kv_heads) * tokens * heads * (head_dim + 2) *
           static_cast<int64_t>(sizeof(float));
}

Tensor* block_attention(Graph& g, std::string_view name, const BlockAttentionInputs& in, Tensor* k_cache,
                        Tensor* v_cache, const Batch& batch, const BlockAttentionParams& params) {
    const Tensor &q = *in.q, &k = *in.k;
    const int64_t tokens = q.shape[0], heads = q.shape[1], kv_heads = k.shape[1], d = q.shape[2],
                  sequences = batch.start->shape[0] - 1;
    for (const Tensor* x : {in.q, in.k, in.v})
        CHECK(x->rank == 3 && x->stride[2] == 1 && x->shape[0] == tokens && x->shape[2] == d &&
                  x->dtype == q.dtype,
              "[block_attention] {}: {} does not fit q {}", name, describe(*x), describe(q));
    CHECK(in.v->shape[1] == kv_heads && heads % kv_heads == 0,
          "[block_attention] {}: k {} or v {} do not fit q {}", name, describe(k), describe(*in.v),
          describe(q));
    for (const Tensor* w : {in.q_norm, in.k_norm})
        CHECK(w->rank == 1 && w->dtype == DType::F32 && w->shape[0] == d,
              "[block_attention] {}: norm {} does not fit q {}", name, describe(*w), describe(q));
    for (const Tensor* cache : {k_cache, v_cache})
        CHECK(cache->rank == 4 && params.first_head + kv_heads <= cache->shape[1] &&
                  cache->shape[2] == kPageTokens && cache->shape[3] == d,
              "[block_attention] {}: cache {} does not fit k {}", name, describe(*cache), describe(k));
    CHECK(params.rotary.dims() <= d, "[block_attention] {}: {} rotary dimensions of {}", name,
          params.rotary.dims(), d);
    Tensor* y = g.scratch(name, q.dtype, {tokens, heads * d});
    Tensor* rotated_q = g.scratch(fmt::format("{}.q", name), q.dtype, {tokens, heads, d});
    Tensor* rotated_k = g.scratch(fmt::format("{}.k", name), q.dtype, {tokens, kv_heads, d});
    const int64_t bytes = block_attention_work_bytes(tokens, sequences, heads, kv_heads, d);
    Tensor* work = g.scratch(fmt::format("{}.work", name), DType::U8, {std::max<int64_t>(1, bytes)});
    g.add({.op = &kBlockAttention,
           .name = std::string(name),
           .inputs = {in.q, in.k, in.v, in.q_norm, in.k_norm, batch.positions, batch.row_sequence,
                      batch.start, batch.pages},
           .outputs = {y, rotated_q, rotated_k, work},
           .state = {k_cache, v_cache},
           .parameters = params});
    return y;
}

}  // namespace quern
