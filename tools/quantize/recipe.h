// Recipe: which matrices of a checkpoint are written in which format. Chosen by role; exceptions by regular expressions
// on official names.
//
// A recipe file is JSON, every key optional:
//   {"roles": {"experts": "nvfp4", "delta": "fp8", "head": "fp8"},   what is not named stays as it is
//    "overrides": [{"match": "layers\\.(0|39)\\.", "format": "keep"}],      the last that matches wins
//    "scales": "mse"}                                                       or "amax"
#pragma once

#include <array>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "ggml-like/quantize.h"
#include "tools/quantize/module_index.h"

namespace quern {

enum class WeightStorage : uint8_t {
    keep,        // as it is in the source
    nvfp4,       //
    fp8,         // E4M3, a BF16 scale for each row: amax(row) / 448
    fp8_block,   // E4M3, a BF16 scale for each 128 x 128 block
    fp8_tensor,  // E4M3, one F32 scale
};
/// "keep", "nvfp4", "fp8", "fp8-block", "fp8-tensor".
const char* storage_name(WeightStorage storage);

struct Recipe {
    std::string name;  // as given
    std::array<WeightStorage, kModuleRoles> roles{};
    std::vector<std::pair<std::string, WeightStorage>> overrides;  // in the order of the file
    ScaleChoice scales = ScaleChoice::mse;

    /// The format of one module. Routers, vision and matrices of unknown role change only by an override.
    WeightStorage storage_of(const Module& module) const;

    std::vector<std::regex> expressions;  // of the overrides
};

/// `aeon`: attention, experts, shared experts and dense MLPs in NVFP4; `xs`: also DeltaNet projections; `fp8-head`:
/// aeon with lm_head in FP8, a scale a row; or the path of a recipe file. Throws Error(usage) that says what is wrong.
Recipe read_recipe(const std::string& name_or_file);

}  // namespace quern
