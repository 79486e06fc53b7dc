#include "ggml-like/cuda/pack/place.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "ggml-like/check.h"
#include "ggml-like/cuda/pack/packed_layout.h"

namespace quern::cuda::pack {
namespace {

RawType raw_type(DType dtype) {
    switch (dtype) {
        case DType::F32:
            return RawType::f32;
        case DType::F16:
            return RawType::f16;
        case DType::F8_E4M3:
            return RawType::fp8;
        case DType::NVFP4:
            return RawType::nvfp4;
        default:
            return RawType::bf16;
    }
}

/// Where a segment goes (PackTask, RawRows).
struct Destination {
    uint8_t* data;
    float* factor;
    int chunks;
    bool paired = false;
    int half = 0;
    int64_t place = 0;  // stacked: packed row of the segment's first row
};

/// Hands a segment to the uploader in pieces that fit its buffers; FP8 block scales go along with each piece, all of
/// them.
void upload_segment(const WeightSegment& s, const Destination& to, Uploader& uploader) {
    const int64_t row_bytes = dtype_bytes(s.dtype, s.cols);
    const int64_t scale_row = s.scale_kind == ScaleKind::nvfp4 ? s.cols / 16 : 0;
    const int64_t blocks =
        s.scale_kind == ScaleKind::block128 ? (s.rows + 127) / 128 * ((s.cols + 127) / 128) * 4 : 0;
    const int64_t most = (Uploader::kCapacity - blocks) / (row_bytes + scale_row + 4) / 128 * 128;
    CHECK(most > 0, "[upload] {}: a row of {} bytes is too long", s.name, row_bytes);
    for (int64_t row = 0; row < s.rows; row += most) {
        const int64_t rows = std::min(most, s.rows - row);
        const bool per_row = s.scale_kind == ScaleKind::per_row;
        const auto* scale = static_cast<const float*>(s.scale);
        RawRows raw{
            .type = raw_type(s.dtype),
            .values = static_cast<const std::byte*>(s.data) + row * row_bytes,
            .nvfp4_scale = scale_row > 0 ? static_cast<const uint8_t*>(s.scale) + row * scale_row : nullptr,
            .scale = per_row      ? scale + row
                     : blocks > 0 ? scale
                                  : nullptr,
            .scale_blocks = blocks > 0,
            .global_scale = s.global_scale,
            .rows = rows,
            .columns = s.cols,
            .row0 = row,
            .paired = to.paired,
            .half = to.half,
            .place = to.place};
        uploader.rows(raw, rows * row_bytes, rows * scale_row, per_row ? rows * 4 : blocks, to.data,
                      to.factor, to.chunks);
    }
}

struct Memory {
    uint8_t* data;
    float* factor;
};

Memory take(const Allocate& allocate, int64_t tiles, int chunks, Kind kind, const std::string& name) {
    return {static_cast<uint8_t*>(allocate(data_bytes(tiles, chunks, kind), name.c_str())),
            static_cast<float*>(allocate(factor_bytes(tiles), name.c_str()))};
}

bool synthetic(const Weight& w) { return w.segments[0].data == nullptr; }

void fill(const std::string& name, int64_t columns, Kind kind, const Memory& m, int64_t tiles, int chunks) {
    const float deviation = 1.0f / std::sqrt(static_cast<float>(columns));
    fill_random(nullptr, kind, m.data, m.factor, tiles, chunks, deviation, std::hash<std::string>{}(name));
}

/// The segments of one part: the halves of a pair, or one below the other.
void upload_part(const Weight& w, const PartLayout& part, RowOrder order, const Memory& m, int chunks,
                 Uploader& uploader) {
    const bool paired = order == RowOrder::paired;
    int64_t place = 0;
    for (size_t i = part.first; i < part.end; ++i) {
        upload_segment(
            w.segments[i],
            {m.data, m.factor, chunks, paired, paired ? static_cast<int>(i) : 0, paired ? 0 : place},
            uploader);
        place += w.segments[i].rows;
    }
}

}  // namespace

Packed place_weight(const Weight& w, RowOrder order, Uploader& uploader, const Allocate& allocate) {
    Packed packed{};
    packed.rows = static_cast<int>(w.rows);
    packed.cols = static_cast<int>(w.cols);
    packed.chunks = chunks_for(w.cols);
    int64_t row = 0;
    for (const PartLayout& part : part_layouts(w, order)) {
        const Memory m = take(allocate, part.tiles, packed.chunks, part.kind, w.name);
        packed.part[packed.parts++] = {m.data,
                                       m.factor,
                                       part.kind,
                                       static_cast<int>(part.rows),
                                       static_cast<int>(row),
                                       static_cast<int>(part.tiles),
                                       part.chunk_scales};
        row += part.rows;
        if (synthetic(w))
            fill(w.name + std::to_string(part.first), w.cols, part.kind, m, part.tiles, packed.chunks);
        else
            upload_part(w, part, order, m, packed.chunks, uploader);
    }
    return packed;
}

Packed first_rows(const Packed& weight, int rows) {
    Packed out = weight;
    out.rows = rows;
    out.parts = 0;
    for (int i = 0; i < weight.parts && weight.part[i].row_begin < rows; ++i) {
        Part& part = out.part[out.parts++];
        part.rows = std::min(part.rows, rows - part.row_begin);
        part.tiles = (part.rows + kTileRows - 1) / kTileRows;
    }
    return out;
}

PackedExperts place_experts(const ExpertWeights& experts, RowOrder order, Uploader& uploader,
                            const Allocate& allocate) {
    const Weight& first = experts.expert.at(0);
    const Kind kind = kind_of(first.segments[0]);
    const bool paired = order == RowOrder::paired;
    const int64_t tiles = expert_tiles(experts, order);
    PackedExperts packed{};
    packed.kind = kind;
    packed.count = static_cast<int>(experts.count());
    packed.rows = static_cast<int>(experts.rows);
    packed.cols = static_cast<int>(experts.cols);
    packed.tiles = static_cast<int>(tiles);
    packed.chunks = chunks_for(experts.cols);
    packed.expert_bytes = data_bytes(tiles, packed.chunks, kind);
    const Memory m = take(allocate, tiles * experts.count(), packed.chunks, kind, experts.name);
    packed.data = m.data;
    packed.factor = m.factor;
    if (synthetic(first)) {
        fill(experts.name, experts.cols, kind, m, tiles * experts.count(), packed.chunks);
        return packed;
    }
    for (int64_t e = 0; e < experts.count(); ++e) {
        const Weight& w = experts.expert[static_cast<size_t>(e)];
        CHECK(w.rows == experts.rows && w.cols == experts.cols,
              "{}: expert {} is [{}, {}], expected [{}, {}]", experts.name, w.name, w.rows, w.cols,
              experts.rows, experts.cols);
        uint8_t* data = m.data + e * packed.expert_bytes;
        float* factor = m.factor + e * tiles * kTileRows;
        int64_t place = 0;
        for (size_t i = 0; i < w.segments.size(); ++i) {
            const WeightSegment& s = w.segments[i];
            if (kind_of(s) != kind)
                FAIL(model,
                     "{}: {} is stored as {}, the first expert as {}; the GPU kernels need experts stored "
                     "alike",
                     experts.name, s.name, dtype_name(s.dtype), dtype_name(first.segments[0].dtype));
            upload_segment(s, {data, factor, packed.chunks, paired, static_cast<int>(i), place}, uploader);
            place += s.rows;
        }
    }
    return packed;
}

}  // namespace quern::cuda::pack
