// check_scales: the pass over all block scales of a load, spread over threads.
#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/parallel.h"
#include "models/scale_rules.h"
#include "models/weight_format.h"

namespace quern {
namespace {

struct SegmentResult {
    std::string problem;
    int64_t zero_blocks = 0;
};

/// "model.safetensors: tensor 'P.weight_scale'", or the plain name when the segment is not from this
/// checkpoint.
std::string name_of(const Checkpoint& checkpoint, const WeightSegment& s, const char* suffix) {
    const uint32_t i = checkpoint.find(s.name + suffix);
    return i == Checkpoint::kNone ? s.name + suffix : checkpoint.where(i);
}

SegmentResult check_nvfp4(const Checkpoint& checkpoint, const WeightSegment& s) {
    const auto* scales = static_cast<const uint8_t*>(s.scale);
    const int64_t per_row = s.cols / nvfp4::kBlock, count = s.rows * per_row;
    SegmentResult result;
    unsigned largest = 0;
    for (int64_t i = 0; i < count; ++i) {  // plain enough for the compiler to vectorize
        largest = scales[i] > largest ? scales[i] : largest;
        result.zero_blocks += scales[i] == 0;
    }
    if (largest >= nvfp4::kScaleNan) {  // 0x7f, or a sign bit
        int64_t at = 0;
        while (scales[at] < nvfp4::kScaleNan) ++at;
        const bool nan = (scales[at] & 0x7f) == nvfp4::kScaleNan;
        result.problem = fmt::format(
            "{}: the scale of row {}, block {} is {} (0x{:02x}), expected a positive number; the "
            "file is damaged or the export failed",
            name_of(checkpoint, s, ".weight_scale"), at / per_row, at % per_row, nan ? "NaN" : "negative",
            scales[at]);
    } else if (largest == 0 && !codes_are_zero({static_cast<const std::byte*>(s.data),
                                                static_cast<size_t>(s.rows * (s.cols / 2))})) {
        result.problem =
            fmt::format("{}: all {} scales are zero, but the codes are not; were the scales never written?",
                        name_of(checkpoint, s, ".weight_scale"), count);
    }
    return result;
}

SegmentResult check_fp8(const Checkpoint& checkpoint, const WeightSegment& s) {
    const auto* values = static_cast<const uint8_t*>(s.data);
    const int64_t count = s.rows * s.cols;
    int64_t nans = 0;
    for (int64_t i = 0; i < count; ++i) nans += (values[i] & 0x7f) == nvfp4::kScaleNan;
    SegmentResult result;
    if (nans > 0) {
        result.problem = fmt::format("{}: {} of {} values are NaN; the file is damaged or the export failed",
                                     name_of(checkpoint, s, ".weight"), nans, count);
    }
    return result;
}

}  // namespace

ScaleCheck check_scales(const Checkpoint& checkpoint, std::span<const WeightSegment* const> segments,
                        int threads) {
    std::vector<SegmentResult> results(segments.size());
    for_each_parallel(threads, segments.size(), [&](size_t i) {
        const WeightSegment& s = *segments[i];
        if (s.scale_kind == ScaleKind::nvfp4)
            results[i] = check_nvfp4(checkpoint, s);
        else if (s.dtype == DType::F8_E4M3)
            results[i] = check_fp8(checkpoint, s);
    });
    ScaleCheck out;
    for (SegmentResult& r : results) {
        out.zero_blocks += r.zero_blocks;
        if (!r.problem.empty()) out.problems.push_back(std::move(r.problem));
    }
    return out;
}

}  // namespace quern
