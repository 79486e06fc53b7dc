#include "models/shard.h"

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

/// Parts of the axis begin at multiples of it.
int64_t granule(const WeightSegment& s, ShardAxis axis) {
    if (s.scale_kind == ScaleKind::block128) return 128;
    if (axis == ShardAxis::columns && s.scale_kind == ScaleKind::nvfp4) return nvfp4::kBlock;
    return axis == ShardAxis::columns ? 2 : 1;
}

std::string part_name(const std::string& name, const WeightSegment& s, const Shard& shard) {
    return s.data != nullptr || shard.whole() ? name : fmt::format("{}#{}", name, shard.rank);
}

}  // namespace

WeightSegment take_shard(const WeightSegment& s, const Shard& shard) {
    if (shard.whole()) return s;
    const bool rows = shard.axis == ShardAxis::rows;
    const int64_t all = rows ? s.rows : s.cols, each = granule(s, shard.axis);
    if (all % (each * shard.of) != 0)
        FAIL(usage,
             "{}: {} {} cannot be shared by {} ranks, which would cut {}; choose fewer with "
             "--tensor-parallel-size",
             s.name, all, rows ? "rows" : "columns", shard.of,
             each == 1 ? "one in two" : fmt::format("a block of {}", each));
    const std::string name = part_name(s.name, s, shard);
    const int64_t begin = shard.begin(all), size = shard.size(all);
    return rows ? slice_rows(s, begin, size, name) : slice_columns(s, begin, size, name);
}

Weight take_shard(const Weight& w, const Shard& shard) {
    std::vector<WeightSegment> parts;
    for (const WeightSegment& s : w.segments) parts.push_back(take_shard(s, shard));
    return Weight(part_name(w.name, w.segments.at(0), shard), std::move(parts));
}

ExpertWeights take_shard(const ExpertWeights& experts, const Shard& shard) {
    ExpertWeights out{.name = part_name(experts.name, experts.expert.at(0).segments.at(0), shard)};
    for (const Weight& w : experts.expert) out.expert.push_back(take_shard(w, shard));
    out.rows = out.expert.front().rows;
    out.cols = out.expert.front().cols;
    return out;
}

Tensor take_shard(const Tensor& t, const Shard& shard) {
    CHECK(t.shape[0] % shard.of == 0 && t.dtype == DType::F32 && t.contiguous(), "[shard] {} for {} ranks",
          describe(t), shard.of);
    Tensor part = t;
    part.shape[0] = shard.size(t.shape[0]);
    if (t.data != nullptr) part.data = t.row<float>(shard.begin(t.shape[0]));
    return part;
}

}  // namespace quern
