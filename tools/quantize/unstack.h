// A quantized matrix that lies in one tensor with others, written as a module of its own: the form that every engine reads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tools/quantize/write_plan.h"

namespace quern {

/// A global scale in the form of `format`: what it is, and its names in both forms.
using ScaleConversion =
    std::function<float(float stored, const std::string& name, const std::string& renamed)>;

/// The units of one stacked module (`stack.count` > 0, quantized): bytes of its values and scales as they are, and scales
/// that are one number, of it or of all. Throws Error(model) for activation scales of another number.
std::vector<WriteUnit> unstack(const Checkpoint& checkpoint, const Module& module, CheckpointFormat format,
                               const ScaleConversion& convert);

}  // namespace quern
