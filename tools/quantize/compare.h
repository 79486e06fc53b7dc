// Two checkpoints of the same model, compared matrix by matrix.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/quantize/module_index.h"

namespace quern {

/// Sums over the values a of a matrix and b of the original, in double precision.
struct MatrixError {
    double squared_error = 0, squared = 0, other_squared = 0, product = 0;  // (a-b)^2, b^2, a^2, a*b
    double largest = 0;                                                     // |a-b|
    int64_t values = 0, different = 0;

    void add(const MatrixError& more);
    double relative_rms() const;  // sqrt(sum (a-b)^2 / sum b^2); infinite if b is zero and a is not
    double snr_db() const { return relative_rms() == 0 ? 999 : -20 * std::log10(relative_rms()); }
    double cosine() const;
};

/// 16 consecutive values of a row.
struct BlockError {
    int64_t row = 0, block = 0;
    double error = 0;  // relative to the root mean square of the original matrix
};

struct ModuleComparison {
    std::string name;
    ModuleRole role = ModuleRole::other;
    std::string format, other_format;  // "NVFP4", "BF16"
    MatrixError error;
    std::vector<BlockError> worst;  // three at most
    std::string problem;            // a difference that quantization cannot explain; empty: none
};

struct Comparison {
    std::vector<ModuleComparison> modules;  // worst first
    std::vector<std::string> problems;      // missing tensors, other shapes, small tensors that differ
    int64_t same_small = 0;                 // small tensors (norms and the like) that are equal
    double seconds = 0;

    bool clean() const;
};

/// Reads all weights of both, in whatever formats, on `threads` threads with a progress bar on stderr. Errors are
/// relative to `original`. Vision and MTP tensors may be missing in one of them.
Comparison compare_checkpoints(const Checkpoint& checkpoint, const Checkpoint& original, int threads);

std::string describe(const Comparison& comparison, size_t most);
nlohmann::ordered_json to_json(const Comparison& comparison);

}  // namespace quern
