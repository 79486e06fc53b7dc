#include "ggml-like/quantize.h"

#include <bit>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/encode.h"
#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

using nvfp4::kBlock;

constexpr float kRange = nvfp4::kMaxCode * nvfp4::kMaxScale;  // 2688

}  // namespace

float largest_magnitude(std::span<const float> values) {
    const auto magnitude = std::bit_cast<float>(
        cpu::encoders().largest_magnitude(values.data(), static_cast<int64_t>(values.size())));
    return std::isnan(magnitude) ? NAN : magnitude;
}

Nvfp4Global Nvfp4Global::of(float amax, GlobalForm form) {
    CHECK(std::isfinite(amax) && amax >= 0, "[Nvfp4Global] largest magnitude {}", amax);
    const float stored = form == GlobalForm::divisor ? kRange / amax : amax / kRange;
    return {std::isnormal(stored) ? stored : 1.0f, form};
}

void encode_nvfp4(std::span<const float> values, const Nvfp4Global& global, ScaleChoice choice,
                  uint8_t* codes, uint8_t* scales) {
    CHECK(values.size() % kBlock == 0, "[encode_nvfp4] {} values are no whole blocks of 16", values.size());
    cpu::encoders().nvfp4(values.data(), static_cast<int64_t>(values.size() / kBlock),
                          {global.stored, global.form == GlobalForm::divisor}, choice == ScaleChoice::mse,
                          codes, scales);
}

float fp8_scale(float amax) {
    CHECK(std::isfinite(amax) && amax >= 0, "[fp8_scale] largest magnitude {}", amax);
    const float scale = amax / nvfp4::kMaxScale;
    return std::isnormal(scale) ? scale : 1.0f;
}

void encode_fp8(std::span<const float> values, float scale, uint8_t* out) {
    cpu::encoders().fp8(values.data(), static_cast<int64_t>(values.size()), scale, out);
}

}  // namespace quern
