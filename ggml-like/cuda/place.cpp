#include "ggml-like/cuda/place.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda {
namespace {

Kind kind_of(const WeightSegment& s) {
    switch (s.dtype) {
        case DType::F8_E4M3: return Kind::fp8;
        case DType::NVFP4: return Kind::nvfp4;
        case DType::F32:
        case DType::F16:
        case DType::BF16: return Kind::bf16;
        default: FAIL(model, "{}: {} weights have no GPU kernels", s.name, dtype_name(s.dtype));
    }
}

RawType raw_type(DType dtype) {
    switch (dtype) {
        case DType::F32: return RawType::f32;
        case DType::F16: return RawType::f16;
        case DType::F8_E4M3: return RawType::fp8;
        case DType::NVFP4: return RawType::nvfp4;
        default: return RawType::bf16;
    }
}

int64_t tiles_for(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
int chunks_for(int64_t columns) { return static_cast<int>((columns + kChunkCols - 1) / kChunkCols); }

struct Destination {
    uint8_t* data;
    float* factor;
    int chunks;
    bool paired = false;
    int half = 0;
    int64_t place = 0;  // stacked: packed row of the segment's first row
};

/// Hands a segment to the uploader in pieces that fit its buffers; FP8 block scales go whole with each piece.
void upload_segment(const WeightSegment& s, const Destination& to, Uploader& uploader) {
    const int64_t row_bytes = dtype_bytes(s.dtype, s.cols);
    const int64_t scale_row = s.scale_kind == ScaleKind::nvfp4 ? s.cols / 16 : 0;
    const int64_t blocks = s.scale_kind == ScaleKind::block128 ? (s.rows + 127) / 128 * ((s.cols + 127) / 128) * 4 : 0;
    const int64_t most = (Uploader::kCapacity - blocks) / (row_bytes + scale_row + 4) / 128 * 128;
    CHECK(most > 0, "[upload] {}: a row of {} bytes is too long", s.name, row_bytes);
    for (int64_t row = 0; row < s.rows; row += most) {
        const int64_t rows = std::min(most, s.rows - row);
        const bool per_row = s.scale_kind == ScaleKind::per_row;
        const auto* scale = static_cast<const float*>(s.scale);
        RawRows raw{.type = raw_type(s.dtype),
                    .values = static_cast<const std::byte*>(s.data) + row * row_bytes,
                    .nvfp4_scale = scale_row > 0 ? static_cast<const uint8_t*>(s.scale) + row * scale_row : nullptr,
                    .scale = per_row ? scale + row : blocks > 0 ? scale : nullptr,
                    .scale_blocks = blocks > 0,
                    .global_scale = s.global_scale,
                    .rows = rows,
                    .columns = s.cols,
                    .row0 = row,
                    .paired = to.paired,
                    .half = to.half,
                    .place = to.place};
        uploader.rows(raw, rows * row_bytes, rows * scale_row, per_row ? rows * 4 : blocks, to.data, to.factor, to.chunks);
    }
}

struct Memory {
    uint8_t* data;
    float* factor;
};

Memory zeroed(const Allocate& allocate, int64_t tiles, int chunks, Kind kind, const std::string& name) {
    const int64_t bytes = tiles * chunks * chunk_bytes(kind), factors = tiles * kTileRows * int64_t{sizeof(float)};
    Memory m{static_cast<uint8_t*>(allocate(bytes, name.c_str())), static_cast<float*>(allocate(factors, name.c_str()))};
    CUDA_CHECK(cudaMemsetAsync(m.data, 0, static_cast<size_t>(bytes)));
    CUDA_CHECK(cudaMemsetAsync(m.factor, 0, static_cast<size_t>(factors)));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
    return m;
}

bool synthetic(const Weight& w) { return w.segments[0].data == nullptr; }

void fill(const std::string& name, int64_t columns, Kind kind, const Memory& m, int64_t tiles, int chunks) {
    const float deviation = 1.0f / std::sqrt(static_cast<float>(columns));
    fill_random(nullptr, kind, m.data, m.factor, tiles, chunks, deviation, std::hash<std::string>{}(name));
}

/// Segments of one kind that follow each other share a part, if their tiles may meet.
bool joins(const WeightSegment& next, Kind kind, int64_t rows_so_far) {
    return kind_of(next) == kind && (kind != Kind::fp8 || rows_so_far % 8 == 0);
}

void place_paired(const Weight& w, Packed& packed, Uploader& uploader, const Allocate& allocate) {
    CHECK(w.segments.size() == 2 && w.segments[0].rows == w.segments[1].rows, "[place] {}: gate and up differ in height",
          w.name);
    const Kind kind = kind_of(w.segments[0]);
    if (kind_of(w.segments[1]) != kind)
        FAIL(model, "{}: gate is {} and up is {}; the GPU kernels need them stored alike", w.name,
             dtype_name(w.segments[0].dtype), dtype_name(w.segments[1].dtype));
    const int64_t tiles = (w.segments[0].rows + 7) / 8;
    const Memory m = zeroed(allocate, tiles, packed.chunks, kind, w.name);
    packed.parts = 1;
    packed.part[0] = {m.data, m.factor, kind, packed.rows, 0, static_cast<int>(tiles)};
    if (synthetic(w)) return fill(w.name, w.cols, kind, m, tiles, packed.chunks);
    for (int half = 0; half < 2; ++half)
        upload_segment(w.segments[static_cast<size_t>(half)], {m.data, m.factor, packed.chunks, true, half}, uploader);
}

}  // namespace

Packed place_weight(const Weight& w, RowOrder order, Uploader& uploader, const Allocate& allocate) {
    Packed packed{};
    packed.rows = static_cast<int>(w.rows);
    packed.cols = static_cast<int>(w.cols);
    packed.chunks = chunks_for(w.cols);
    if (order == RowOrder::paired) {
        place_paired(w, packed, uploader, allocate);
        return packed;
    }
    int64_t row = 0;
    for (size_t i = 0; i < w.segments.size();) {
        const Kind kind = kind_of(w.segments[i]);
        int64_t rows = 0;
        size_t end = i;
        while (end < w.segments.size() && joins(w.segments[end], kind, rows)) rows += w.segments[end++].rows;
        const int64_t tiles = tiles_for(rows);
        const Memory m = zeroed(allocate, tiles, packed.chunks, kind, w.name);
        CHECK(packed.parts < kMaxParts, "[place] {}: more than {} runs of formats", w.name, kMaxParts);
        packed.part[packed.parts++] = {m.data,           m.factor,
                                       kind,             static_cast<int>(rows),
                                       static_cast<int>(row), static_cast<int>(tiles)};
        row += rows;
        if (synthetic(w)) {
            fill(w.name + std::to_string(i), w.cols, kind, m, tiles, packed.chunks);
            i = end;
            continue;
        }
        for (int64_t place = 0; i < end; place += w.segments[i++].rows)
            upload_segment(w.segments[i], {m.data, m.factor, packed.chunks, false, 0, place}, uploader);
    }
    return packed;
}

PackedExperts place_experts(const ExpertWeights& experts, RowOrder order, Uploader& uploader, const Allocate& allocate) {
    const Weight& first = experts.expert.at(0);
    const Kind kind = kind_of(first.segments[0]);
    const bool paired = order == RowOrder::paired;
    const int64_t tiles = paired ? (experts.rows / 2 + 7) / 8 : tiles_for(experts.rows);
    PackedExperts packed{};
    packed.kind = kind;
    packed.count = static_cast<int>(experts.count());
    packed.rows = static_cast<int>(experts.rows);
    packed.cols = static_cast<int>(experts.cols);
    packed.tiles = static_cast<int>(tiles);
    packed.chunks = chunks_for(experts.cols);
    packed.expert_bytes = tiles * packed.chunks * chunk_bytes(kind);
    const Memory m = zeroed(allocate, tiles * experts.count(), packed.chunks, kind, experts.name);
    packed.data = m.data;
    packed.factor = m.factor;
    if (synthetic(first)) {
        fill(experts.name, experts.cols, kind, m, tiles * experts.count(), packed.chunks);
        return packed;
    }
    for (int64_t e = 0; e < experts.count(); ++e) {
        const Weight& w = experts.expert[static_cast<size_t>(e)];
        uint8_t* data = m.data + e * packed.expert_bytes;
        float* factor = m.factor + e * tiles * kTileRows;
        int64_t place = 0;
        for (size_t i = 0; i < w.segments.size(); ++i) {
            const WeightSegment& s = w.segments[i];
            if (kind_of(s) != kind)
                FAIL(model, "{}: {} is stored as {}, the first expert as {}; the GPU kernels need experts stored alike",
                     experts.name, s.name, dtype_name(s.dtype), dtype_name(first.segments[0].dtype));
            upload_segment(s, {data, factor, packed.chunks, paired, static_cast<int>(i), place}, uploader);
            place += s.rows;
        }
    }
    return packed;
}

}  // namespace quern::cuda
