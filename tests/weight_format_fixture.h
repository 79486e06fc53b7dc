// What the tests of matrix formats share: one module in a checkpoint of one file.
#pragma once

#include "checkpoint_writer.h"
#include "models/weight_format.h"

namespace quern::test {
inline constexpr int64_t kRows = 256, kCols = 256;
inline const std::string kModule = "lm_head";

/// A checkpoint of one file that lives as long as the object.
struct Fixture {
    explicit Fixture(const SafetensorsWriter& w) : checkpoint(open(w)), use(checkpoint) {}
    Checkpoint open(const SafetensorsWriter& w) {
        dir.write("config.json", "{}");
        dir.write("model.safetensors", w.bytes());
        return Checkpoint::open(dir.str());
    }
    WeightSegment linear(int64_t rows = kRows, int64_t cols = kCols) {
        return read_linear(checkpoint, kModule, rows, cols, use);
    }
    TempDir dir;
    Checkpoint checkpoint;
    TensorUse use;
};

inline SafetensorsWriter ct(float g = 2688.0f) {
    return SafetensorsWriter().nvfp4_ct(kModule, kRows, kCols, g);
}
inline SafetensorsWriter modelopt(float s = 1.0f / 2688) {
    return SafetensorsWriter().nvfp4_modelopt(kModule, kRows, kCols, s);
}

inline std::string floats(size_t count, float value) {
    std::string out;
    for (size_t i = 0; i < count; ++i) out += f32_bytes(value);
    return out;
}

/// FP8 with `shape` scales of F32.
inline SafetensorsWriter fp8(std::vector<int64_t> shape, float value = 0.01f,
                             const char* suffix = ".weight_scale") {
    size_t count = 1;
    for (const int64_t d : shape) count *= static_cast<size_t>(d);
    SafetensorsWriter w;
    w.fill(kModule + ".weight", "F8_E4M3", {kRows, kCols}, kRows * kCols, 0x38);
    return w.add(kModule + suffix, "F32", std::move(shape), floats(count, value));
}

}  // namespace quern::test
