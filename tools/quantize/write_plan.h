// WritePlan: every byte range of the checkpoint that will be written. Sizes follow from the source's headers and the
// recipe alone, so units can be computed in any order by any number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "tools/quantize/module_index.h"
#include "tools/quantize/recipe.h"

namespace quern {

enum class CheckpointFormat : uint8_t { compressed_tensors, modelopt };
/// "compressed-tensors", "modelopt".
const char* format_name(CheckpointFormat format);

struct OutTensor {
    std::string name;
    SafeDType dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // offset in the file
    /// If dtype is `other`: its name and the bytes, which nobody can compute.
    std::string_view other_dtype = {};
    uint64_t other_bytes = 0;

    uint64_t bytes() const;
    std::string_view dtype_name() const;
};

/// What is computed together.
struct WriteUnit {
    enum class Kind : uint8_t {
        copy,      // bytes of tensor `source` from `source_begin` on, perhaps under another name
        quantize,  // `modules`, which share a global scale if NVFP4; out: values, scales, global scale of each
        scalar,    // a global scale in its other form: `value`
    };
    Kind kind = Kind::copy;
    WeightStorage storage = WeightStorage::keep;
    uint32_t source = Checkpoint::kNone;
    uint64_t source_begin = 0;
    std::vector<uint32_t> modules;
    float value = 0;
    std::vector<OutTensor> out;

    uint64_t bytes() const;
};

struct ShardPlan {
    std::string name;
    std::vector<WriteUnit> units;
    std::string header;  // length and JSON, with which the file begins
    uint64_t bytes = 0;  // of the file
};

struct WritePlan {
    CheckpointFormat format;
    ScaleChoice scales;
    std::vector<ShardPlan> shards;
    std::vector<WeightStorage> stored;  // by module, in the result; `keep`: not quantized
    int64_t quantized = 0;              // modules that the recipe changes
    int64_t converted = 0;              // global scales converted to the other form
    int64_t inexact = 0;                // of these, divisors whose reciprocal is not the multiplier
    std::vector<std::string> notes;

    uint64_t bytes() const;
};

/// `recipe`: null to change nothing but the format. Throws Error(usage) if nothing would change, if a matrix is already
/// quantized differently, or if matrices that other engines fuse would differ; Error(model).
///
/// Readers of a divisor G multiply by 1 / G in FP32, so a divisor becomes that multiplier. A multiplier s becomes the
/// divisor whose reciprocal is s; where FP32 has none, the nearest one, and readers differ by 2^-24 (`inexact`). An
/// original that converting back would not give is kept in the header (`__metadata__`, "quern:" and the tensor's name),
/// so that it gives the same bytes. Quantized experts that are stacked in one tensor become modules of their own.
WritePlan plan_write(const Checkpoint& checkpoint, const ModuleIndex& index, const Recipe* recipe,
                     CheckpointFormat format, uint64_t shard_bytes);

}  // namespace quern
