#include "ggml-like/ops/gated_attention.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/kv_format.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

enum Input { kQ, kGate, kK, kV, kQNorm, kKNorm, kPositions, kRowSequence, kStart, kPages, kFrom, kRope };

/// cos and sin of one position's angles, in FP64 so that large positions keep their phase.
void fill_angles(const int32_t (&position)[3], const GatedAttentionParams& p, std::vector<float>& cosine,
                 std::vector<float>& sine) {
    const int half = p.rotary_dims / 2;
    for (int i = 0; i < half; ++i) {
        const double angle =
            position[p.axis(i)] * std::pow(static_cast<double>(p.theta), -2.0 * i / p.rotary_dims);
        cosine[static_cast<size_t>(i)] = static_cast<float>(std::cos(angle));
        sine[static_cast<size_t>(i)] = static_cast<float>(std::sin(angle));
    }
}

/// Normalises and rotates rows in place: a head at a time.
class Rotation {
  public:
    Rotation(const Node& node, int64_t t)
        : p_(node.params<GatedAttentionParams>()),
          half_(static_cast<size_t>(p_.rotary_dims / 2)),
          cosine_(half_),
          sine_(half_) {
        int32_t position[3];
        for (int64_t axis = 0; axis < 3; ++axis)
            position[axis] = node.inputs.size() > kRope ? node.inputs[kRope]->row<int32_t>(axis)[t]
                                                        : node.inputs[kPositions]->as<int32_t>()[t];
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

/// Keys or values of one layer, as they are kept.
class CacheRows {
  public:
    CacheRows(const Tensor& cache, bool values)
        : cache_(cache),
          packing_(kv::packing_of(cache.dtype, values)),
          block_(kv::layout_of(packing_, cache.dtype, static_cast<int>(cache.shape[3])).head()) {}

    bool rotated() const { return packing_ == kv::Packing::centroids; }
    void store(int64_t page, int64_t head, int place, float scale, const float* x) const {
        if (packing_ == kv::Packing::plain)
            return store_floats(cache_, plain_at(page, head, place), cache_.shape[3], x);
        kv::pack_row(packing_, x, width(), scale, block(page, head), place);
    }
    /// The cache's own memory if it is F32, else converted into `buffer`.
    const float* load(int64_t page, int64_t head, int place, std::vector<float>& buffer) const {
        if (packing_ != kv::Packing::plain) {
            kv::unpack_row(packing_, block(page, head), place, width(), buffer.data());
            return buffer.data();
        }
        const int64_t at = plain_at(page, head, place);
        if (cache_.dtype == DType::F32) return cache_.as<float>() + at;
        load_floats(cache_, at, cache_.shape[3], buffer.data());
        return buffer.data();
    }

  private:
    int width() const { return static_cast<int>(cache_.shape[3]); }
    int64_t plain_at(int64_t page, int64_t head, int place) const {
        return page * cache_.stride[0] + head * cache_.stride[1] + place * cache_.stride[2];
    }
    std::byte* block(int64_t page, int64_t head) const {
        return cache_.as<std::byte>() + (page * cache_.shape[1] + head) * block_;
    }

    const Tensor& cache_;
    kv::Packing packing_;
    int64_t block_;
};

/// Whether y of a row of a sequence is wanted.
bool wanted(const Node& node, int64_t t) {
    return t >= node.inputs[kFrom]->as<int32_t>()[node.inputs[kRowSequence]->as<int32_t>()[t]];
}

/// Step 1 of the contract for q, steps 1 and 2 for k and v, of one row.
void rotate_and_store(const Node& node, int64_t t) {
    const int32_t position = node.inputs[kPositions]->as<int32_t>()[t];
    const int32_t sequence = node.inputs[kRowSequence]->as<int32_t>()[t];
    const Tensor &q = *node.inputs[kQ], &pages = *node.inputs[kPages], &rotated = *node.outputs[1];
    const Rotation rotation(node, t);
    const auto& p = node.params<GatedAttentionParams>();
    const bool rotated_keys = CacheRows(*node.state[0], false).rotated();
    std::vector<float> row(static_cast<size_t>(q.shape[2]));
    const auto width = static_cast<int64_t>(row.size());
    for (int64_t h = 0; wanted(node, t) && h < q.shape[1]; ++h) {
        load_floats(q, t * q.stride[0] + h * q.stride[1], width, row.data());
        rotation.apply(*node.inputs[kQNorm], row);
        if (rotated_keys) kv::hadamard(row.data(), width);
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
            if (part == 0 && rotated_keys) kv::hadamard(row.data(), width);
            CacheRows(cache, part == 1)
                .store(page, h, position % kPageTokens, p.scale(part == 1, h), row.data());
        }
    }
}

struct Inputs {
    const Tensor &q, &gate, &positions, &row_sequence, &pages, &k, &v, &y;
};

/// One KV head of one row: its H/G query heads share each key and value they read.
void attend(const Inputs& in, const cpu::DotKernels& dot, int64_t t, int64_t kv_head) {
    const int64_t width = in.q.shape[2], group = in.q.shape[1] / in.k.shape[1];
    const int64_t keys = in.positions.as<int32_t>()[t] + 1;
    const int32_t* pages = in.pages.row<int32_t>(in.row_sequence.as<int32_t>()[t]);
    std::vector<float> q(static_cast<size_t>(group * width)), scores(static_cast<size_t>(group * keys)),
        out(static_cast<size_t>(group * width), 0.0f), buffer(static_cast<size_t>(width)), sums;
    const CacheRows keys_of(in.k, false), values_of(in.v, true);
    const auto load = [&](const CacheRows& rows, int64_t key) {
        return rows.load(pages[key / kPageTokens], kv_head, static_cast<int>(key % kPageTokens), buffer);
    };

    for (int64_t h = 0; h < group; ++h)
        load_floats(in.q, t * in.q.stride[0] + (kv_head * group + h) * in.q.stride[1], width,
                    q.data() + h * width);

    const float scale = 1.0f / std::sqrt(static_cast<float>(width));
    for (int64_t key = 0; key < keys; ++key) {
        const float* k = load(keys_of, key);
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
        const float* v = load(values_of, key);
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
            if (sequence[i / kv_heads] >= 0 && wanted(node, i / kv_heads))
                attend(in, context.dot, i / kv_heads, i % kv_heads);
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
    const double wanted = static_cast<double>(node.params<GatedAttentionParams>().rows) /
                          static_cast<double>(std::max<int64_t>(1, k.shape[0]));
    double rows = 0;
    for (size_t part = 0; part < 2; ++part)
        rows += kv::layout_of(node.state[part]->dtype, part == 1, static_cast<int>(k.shape[2])).row();
    return {.state_bytes = rows * static_cast<double>(k.shape[0] * k.shape[1]),
            .activation_bytes = 3 * wanted * cpu::dense_bytes(*node.outputs[0]) + 2 * cpu::dense_bytes(k)};
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

void check_cache(std::string_view name, const Tensor& cache, bool values, const Tensor& k,
                 const std::vector<float>& scales) {
    CHECK(cache.rank == 4 && cache.shape[1] == k.shape[1] && cache.shape[2] == kPageTokens &&
              cache.shape[3] == k.shape[2],
          "[gated_attention] {}: cache {} does not fit k {}", name, describe(cache), describe(k));
    const kv::Packing packing = kv::packing_of(cache.dtype, values);
    CHECK(kv::fits(packing, static_cast<int>(k.shape[2])),
          "[gated_attention] {}: rows of {} do not fit the format of {}", name, k.shape[2], describe(cache));
    CHECK(packing == kv::Packing::plain || cache.contiguous(), "[gated_attention] {}: {} has gaps", name,
          describe(cache));
    CHECK(scales.size() <= 1 || static_cast<int64_t>(scales.size()) == k.shape[1],
          "[gated_attention] {}: {} scales of {} KV heads", name, scales.size(), k.shape[1]);
}

}  // namespace

const Op kGatedAttention{"gated_attention", run, cost};

Tensor* gated_attention(Graph& g, std::string_view name, const AttentionInputs& in, Tensor* k_cache,
                        Tensor* v_cache, const Batch& batch, const GatedAttentionParams& params) {
    check_inputs(name, in, params);
    const Tensor& q = *in.q;
    const int64_t tokens = q.shape[0], heads = q.shape[1], kv_heads = in.k->shape[1], d = q.shape[2];
    static_assert(kPageTokens == kv::kPageRows);
    check_cache(name, *k_cache, false, *in.k, params.k_scale);
    check_cache(name, *v_cache, true, *in.k, params.v_scale);
    Tensor* y = g.scratch(name, q.dtype, {tokens, heads * d});
    Tensor* rotated = g.scratch(fmt::format("{}.rotated", name), q.dtype, {tokens, heads, d});
    const int64_t bytes = attention_work_bytes(
        batch.kind, kv::packing_of(k_cache->dtype, false) != kv::Packing::plain, tokens, kv_heads, d);
    GatedAttentionParams own = params;
    own.kind = batch.kind;
    const bool all = in.wanted.from == nullptr;
    own.rows = all ? tokens : in.wanted.count;
    Tensor* from = all ? batch.start : in.wanted.from;
    CHECK(from->rank == 1 && from->dtype == DType::I32 && from->shape[0] + 1 >= batch.start->shape[0] &&
              own.rows <= tokens && (all || batch.kind == StepKind::prompt),
          "[gated_attention] {}: {} rows of {} are wanted, from {}", name, own.rows, tokens, describe(*from));
    Tensor* work = g.scratch(fmt::format("{}.work", name), DType::U8, {std::max<int64_t>(1, bytes)});
    Node node{.op = &kGatedAttention,
              .name = std::string(name),
              .inputs = {in.q, in.gate, in.k, in.v, in.q_norm, in.k_norm, batch.positions, batch.row_sequence,
                         batch.start, batch.pages, from},
              .outputs = {y, rotated, work},
              .state = {k_cache, v_cache},
              .parameters = own};
    if (batch.rope != nullptr) {
        const Tensor& rope = *batch.rope;
        CHECK(rope.dtype == DType::I32 && rope.rank == 2 && rope.shape[0] == 3 && rope.shape[1] == tokens &&
                  rope.stride[1] == 1,
              "[gated_attention] {}: rope is {}", name, describe(rope));
        node.inputs.push_back(batch.rope);
    }
    g.add(std::move(node));
    return y;
}

}  // namespace quern
