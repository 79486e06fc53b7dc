// The part of a Qwen3.6 model that one of several ranks holds: whole heads, a part of every expert's inner width, rows of the
// head. Norms, routers and the embedding are on every rank, an MTP layer on the first.
#include <algorithm>
#include <initializer_list>

#include "ggml-like/check.h"
#include "models/qwen3_6_moe.h"

namespace quern {
namespace {

constexpr int64_t kWidthBlock = 16;  // of an inner width: the columns of a block of NVFP4

void require_shares(int64_t count, const char* what, const Shard& shard) {
    if (count % shard.of != 0)
        FAIL(usage,
             "--tensor-parallel-size {}: this model has {} {}, which so many ranks cannot share; choose a "
             "number that divides them",
             shard.of, count, what);
}

/// Things that may be fewer than the ranks: then several ranks have the same one.
int64_t share_or_copy(int64_t count, const char* what, const Shard& shard) {
    if (shard.of < count || shard.of % count != 0) require_shares(count, what, shard);
    return std::max<int64_t>(1, count / shard.of);
}

int64_t share_width(int64_t width, const char* what, const Shard& shard) {
    if (width % (kWidthBlock * shard.of) != 0)
        FAIL(usage,
             "--tensor-parallel-size {}: the {} of this model is {}, and {} ranks need a multiple of {}; "
             "choose "
             "fewer",
             shard.of, what, width, shard.of, kWidthBlock * shard.of);
    return width / shard.of;
}

class Sharder {
  public:
    Sharder(const Qwen36MoeConfig& whole, const Shard& shard, std::vector<std::unique_ptr<float[]>>& floats)
        : c_(whole),
          rows_(shard.along(ShardAxis::rows)),
          columns_(shard.along(ShardAxis::columns)),
          floats_(floats) {}

    void attention(AttentionWeights& w) const {
        const Shard kv = rows_.among(c_.kv_heads);
        const std::vector<WeightSegment>& s = w.in_proj.segments;
        w.in_proj = weight(w.in_proj, {take_shard(s[0], rows_), take_shard(s[1], kv), take_shard(s[2], kv)});
        w.out_proj = take_shard(w.out_proj, columns_);
        for (std::vector<float>* scales : {&w.kv_scales.k, &w.kv_scales.v}) {
            if (scales->size() <= 1) continue;
            const auto first = scales->begin() + kv.begin(c_.kv_heads);
            *scales = {first, first + kv.size(c_.kv_heads)};
        }
    }

    /// qkv is three matrices, of which each rank has the rows of its heads.
    void delta(DeltaWeights& w) const {
        const int64_t keys = c_.key_heads * int64_t{c_.key_dim}, values = c_.value_columns();
        const Shard key = rows_.among(c_.key_heads);
        const std::vector<WeightSegment>& s = w.in_proj.segments;
        const auto part = [&](int64_t begin, int64_t rows, const Shard& shard, const char* which) {
            return take_shard(cut(s[0], begin, rows, which), shard);
        };
        w.in_proj = weight(w.in_proj, {part(0, keys, key, "q"), part(keys, keys, key, "k"),
                                       part(2 * keys, values, rows_, "v"), take_shard(s[1], rows_),
                                       take_shard(s[2], rows_), take_shard(s[3], rows_)});
        w.conv = conv_rows(w.conv, keys, values, key);
        w.decay_rate = take_shard(w.decay_rate, rows_);
        w.dt_bias = take_shard(w.dt_bias, rows_);
        w.out_proj = take_shard(w.out_proj, columns_);
    }

    void moe(MoeWeights& w) const {
        w.gate_up = take_shard(w.gate_up, rows_);
        w.down = take_shard(w.down, columns_);
        w.shared_gate_up = take_shard(w.shared_gate_up, rows_);
        w.shared_down = take_shard(w.shared_down, columns_);
    }

    void mlp(MlpWeights& w) const {
        w.gate_up = take_shard(w.gate_up, rows_);
        w.down = take_shard(w.down, columns_);
    }

    /// A tied head has memory of its own: the embedding's rows are all on every rank.
    void head(Qwen36MoeWeights& w) const {
        w.head = take_shard(w.head, rows_);
        w.tied_head = false;
    }

  private:
    Weight weight(const Weight& whole, std::vector<WeightSegment> parts) const {
        const bool random = whole.segments.front().data == nullptr;
        return Weight(random ? fmt::format("{}#{}", whole.name, rows_.rank) : whole.name, std::move(parts));
    }

    WeightSegment cut(const WeightSegment& s, int64_t begin, int64_t rows, const char* which) const {
        if (s.scale_kind == ScaleKind::block128 && begin % 128 != 0)
            FAIL(usage,
                 "{}: its {} begins at row {}, inside a block of 128 rows; run it without "
                 "--tensor-parallel-size",
                 s.name, which, begin);
        return slice_rows(s, begin, rows, s.data != nullptr ? s.name : fmt::format("{}.{}", s.name, which));
    }

    Tensor conv_rows(const Tensor& whole, int64_t keys, int64_t values, const Shard& key) const {
        const int64_t own_keys = key.size(keys), own_values = rows_.size(values);
        Tensor out =
            make_tensor(whole.name, DType::F32, Place::weight, {2 * own_keys + own_values, whole.shape[1]});
        floats_.push_back(std::make_unique<float[]>(static_cast<size_t>(out.elements())));
        out.data = floats_.back().get();
        float* to = floats_.back().get();
        const auto copy = [&](int64_t begin, int64_t rows) {
            to = std::copy_n(whole.row<float>(begin), rows * whole.shape[1], to);
        };
        copy(key.begin(keys), own_keys);
        copy(keys + key.begin(keys), own_keys);
        copy(2 * keys + rows_.begin(values), own_values);
        return out;
    }

    const Qwen36MoeConfig& c_;
    const Shard rows_, columns_;
    std::vector<std::unique_ptr<float[]>>& floats_;
};

}  // namespace

Qwen36MoeConfig shard_qwen3_6_moe(const Qwen36MoeConfig& whole, const Shard& shard) {
    CHECK(shard.of > 0 && shard.rank >= 0 && shard.rank < shard.of, "[shard] rank {} of {}", shard.rank,
          shard.of);
    Qwen36MoeConfig c = whole;
    c.shard = shard;
    require_shares(c.heads, "attention heads", shard);
    require_shares(c.value_heads, "DeltaNet value heads", shard);
    require_shares(c.vocab_rows, "rows of the head", shard);
    c.heads /= shard.of;
    c.value_heads /= shard.of;
    c.kv_heads = share_or_copy(c.kv_heads, "KV heads", shard);
    c.key_heads = static_cast<int>(share_or_copy(c.key_heads, "DeltaNet key heads", shard));
    if (c.dense()) {
        c.dense_width = share_width(c.dense_width, "MLP width", shard);
    } else {
        c.expert_width = share_width(c.expert_width, "expert width", shard);
        c.shared_width = share_width(c.shared_width, "shared expert width", shard);
    }
    return c;
}

void shard_qwen3_6_moe(Qwen36MoeWeights& w, const Qwen36MoeConfig& whole, const Shard& shard,
                       std::vector<std::unique_ptr<float[]>>& floats) {
    if (shard.rank > 0) {
        w.mtp.reset();
        w.draft_head.reset();
    }
    const Sharder sharder(whole, shard, floats);
    for (size_t i = 0; i < w.layers.size(); ++i) {
        LayerWeights& layer = w.layers[i];
        whole.full_attention[i] ? sharder.attention(layer.attention) : sharder.delta(layer.delta);
        whole.dense() ? sharder.mlp(layer.mlp) : sharder.moe(layer.moe);
    }
    sharder.head(w);
}

}  // namespace quern
