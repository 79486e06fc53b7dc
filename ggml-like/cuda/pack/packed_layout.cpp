#include "ggml-like/cuda/pack/packed_layout.h"

#include "ggml-like/check.h"

namespace quern::cuda::pack {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t aligned(int64_t bytes) { return ceil_div(bytes, kWeightAlignment) * kWeightAlignment; }

int64_t part_bytes(int64_t tiles, int64_t columns, Kind kind) {
    return aligned(data_bytes(tiles, chunks_for(columns), kind)) + aligned(factor_bytes(tiles));
}

/// Whether a segment goes on with the part before it: the same kind, and its rows may begin within a tile.
bool joins(const WeightSegment& next, Kind kind, int64_t rows_so_far) {
    return kind_of(next) == kind && (kind != Kind::fp8 || rows_so_far % 8 == 0);
}

bool has_chunk_scales(const WeightSegment& s) { return s.scale_kind == ScaleKind::block128; }

PartLayout paired_layout(const Weight& w) {
    CHECK(w.segments.size() == 2 && w.segments[0].rows == w.segments[1].rows,
          "[place] {}: gate and up differ in height", w.name);
    const Kind kind = kind_of(w.segments[0]);
    if (kind_of(w.segments[1]) != kind)
        FAIL(model, "{}: gate is {} and up is {}; the GPU kernels need them stored alike", w.name,
             dtype_name(w.segments[0].dtype), dtype_name(w.segments[1].dtype));
    return {kind,
            0,
            2,
            w.rows,
            ceil_div(w.segments[0].rows, kTileRows / 2),
            has_chunk_scales(w.segments[0]) || has_chunk_scales(w.segments[1])};
}

}  // namespace

Kind kind_of(const WeightSegment& s) {
    switch (s.dtype) {
        case DType::F8_E4M3:
            return Kind::fp8;
        case DType::NVFP4:
            return Kind::nvfp4;
        case DType::F32:
        case DType::F16:
        case DType::BF16:
            return Kind::bf16;
        default:
            FAIL(model, "{}: {} weights have no GPU kernels", s.name, dtype_name(s.dtype));
    }
}

std::vector<PartLayout> part_layouts(const Weight& w, RowOrder order) {
    if (order == RowOrder::paired) return {paired_layout(w)};
    std::vector<PartLayout> parts;
    for (size_t i = 0; i < w.segments.size();) {
        PartLayout part{kind_of(w.segments[i]), i, i, 0, 0, false};
        while (part.end < w.segments.size() && joins(w.segments[part.end], part.kind, part.rows)) {
            part.chunk_scales |= has_chunk_scales(w.segments[part.end]);
            part.rows += w.segments[part.end++].rows;
        }
        part.tiles = ceil_div(part.rows, kTileRows);
        i = part.end;
        parts.push_back(part);
    }
    if (parts.size() > kMaxParts)
        FAIL(model, "{}: {} runs of formats; the GPU kernels take {}", w.name, parts.size(), kMaxParts);
    return parts;
}

int64_t expert_tiles(const ExpertWeights& experts, RowOrder order) {
    return order == RowOrder::paired ? ceil_div(experts.rows / 2, kTileRows / 2)
                                     : ceil_div(experts.rows, kTileRows);
}

int chunks_for(int64_t columns) { return static_cast<int>(ceil_div(columns, kChunkCols)); }
int64_t data_bytes(int64_t tiles, int64_t chunks, Kind kind) { return tiles * chunks * chunk_bytes(kind); }
int64_t factor_bytes(int64_t tiles) { return tiles * kTileRows * int64_t{sizeof(float)}; }

int64_t packed_bytes(const Weight& weight, RowOrder order) {
    int64_t bytes = 0;
    for (const PartLayout& part : part_layouts(weight, order))
        bytes += part_bytes(part.tiles, weight.cols, part.kind);
    return bytes;
}

int64_t packed_bytes(const ExpertWeights& experts, RowOrder order) {
    const Kind kind = kind_of(experts.expert.at(0).segments.at(0));
    return part_bytes(expert_tiles(experts, order) * experts.count(), experts.cols, kind);
}

}  // namespace quern::cuda::pack
