#include "tools/quantize/output_form.h"

#include <cmath>

namespace quern {
namespace {

float divisor_of(float multiplier) {
    const float nearest = 1.0f / multiplier;
    for (const float candidate : {nearest, std::nextafter(nearest, 0.0f), std::nextafter(nearest, INFINITY)})
        if (1.0f / candidate == multiplier) return candidate;
    return nearest;
}

}  // namespace

WeightStorage storage_of(const WeightSegment& s) {
    switch (s.scale_kind) {
        case ScaleKind::nvfp4:
            return WeightStorage::nvfp4;
        case ScaleKind::per_tensor:
            return WeightStorage::fp8_tensor;
        case ScaleKind::per_row:
            return WeightStorage::fp8;
        case ScaleKind::block128:
            return WeightStorage::fp8_block;
        case ScaleKind::none:
            break;
    }
    return WeightStorage::keep;
}

bool is_fp8(ScaleKind kind) { return kind != ScaleKind::none && kind != ScaleKind::nvfp4; }

/// As the readers of each format expect them: ModelOpt writes a vector for rows, and four dimensions for blocks.
std::vector<int64_t> fp8_scale_shape(WeightStorage storage, int64_t n, int64_t k, CheckpointFormat format) {
    const bool ct = format == CheckpointFormat::compressed_tensors;
    const int64_t down = (n + 127) / 128, across = (k + 127) / 128;
    if (storage == WeightStorage::fp8) return ct ? std::vector{n, int64_t{1}} : std::vector{n};
    if (storage == WeightStorage::fp8_block)
        return ct ? std::vector{down, across} : std::vector{down, int64_t{1}, across, int64_t{1}};
    return scalar_shape(format);
}

std::vector<int64_t> scalar_shape(CheckpointFormat format) {
    return format == CheckpointFormat::compressed_tensors ? std::vector{int64_t{1}} : std::vector<int64_t>{};
}

float inverse_of(float stored, GlobalForm to) {
    return to == GlobalForm::divisor ? divisor_of(stored) : 1.0f / stored;
}

}  // namespace quern
