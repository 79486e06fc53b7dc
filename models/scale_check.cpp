// check_scales: the pass over all block scales of a load, spread over threads.
#include <algorithm>
#include <atomic>

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

int64_t count_nans(const uint8_t* values, int64_t count) {
    constexpr int64_t kRun = 128;  // fits a byte, so that the compiler can add bytes
    int64_t nans = 0;
    for (int64_t begin = 0; begin < count; begin += kRun) {
        const int64_t end = std::min(begin + kRun, count);
        uint8_t here = 0;
        for (int64_t i = begin; i < end; ++i)
            here = static_cast<uint8_t>(here + ((values[i] & 0x7f) == nvfp4::kScaleNan));
        nans += here;
    }
    return nans;
}

/// What one thread looks at: a segment, or of a large one in FP8 a part of its values.
struct Part {
    size_t segment;
    int64_t begin, count;
};
constexpr int64_t kPartValues = 1 << 20;

std::vector<Part> parts_of(std::span<const WeightSegment* const> segments) {
    std::vector<Part> parts;
    for (size_t i = 0; i < segments.size(); ++i) {
        const int64_t values = segments[i]->rows * segments[i]->cols;
        const int64_t step = segments[i]->dtype == DType::F8_E4M3 ? kPartValues : values;
        for (int64_t begin = 0; begin < values; begin += step)
            parts.push_back({i, begin, std::min(step, values - begin)});
    }
    return parts;
}

}  // namespace

ScaleCheck check_scales(const Checkpoint& checkpoint, std::span<const WeightSegment* const> segments,
                        int threads) {
    std::vector<SegmentResult> results(segments.size());
    std::vector<std::atomic<int64_t>> nans(segments.size());
    const std::vector<Part> parts = parts_of(segments);
    for_each_parallel(threads, parts.size(), [&](size_t p) {
        const Part& part = parts[p];
        const WeightSegment& s = *segments[part.segment];
        if (s.scale_kind == ScaleKind::nvfp4)
            results[part.segment] = check_nvfp4(checkpoint, s);
        else if (s.dtype == DType::F8_E4M3)
            nans[part.segment] += count_nans(static_cast<const uint8_t*>(s.data) + part.begin, part.count);
    });
    for (size_t i = 0; i < segments.size(); ++i) {
        if (nans[i] == 0) continue;
        const WeightSegment& s = *segments[i];
        results[i].problem =
            fmt::format("{}: {} of {} values are NaN; the file is damaged or the export failed",
                        name_of(checkpoint, s, ".weight"), nans[i].load(), s.rows * s.cols);
    }
    ScaleCheck out;
    for (SegmentResult& r : results) {
        out.zero_blocks += r.zero_blocks;
        if (!r.problem.empty()) out.problems.push_back(std::move(r.problem));
    }
    return out;
}

}  // namespace quern
