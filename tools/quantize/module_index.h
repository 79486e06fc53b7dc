// ModuleIndex: the matrices of a checkpoint, of any model and in any format, for tools that compare and write
// checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "ggml-like/weight.h"
#include "models/checkpoint.h"
#include "models/tensor_use.h"

namespace quern {

/// What a matrix is for, by its name. Reports have this order.
enum class ModuleRole : uint8_t {
    attention,      // q, k, v, o
    delta,          // DeltaNet: in_proj_qkv, in_proj_z, out_proj
    delta_gates,    // DeltaNet: in_proj_a, in_proj_b
    experts,        // the routed ones
    shared_expert,  //
    mlp,            // of dense models
    router,         // the choice of experts and the gate of the shared one
    head,
    embedding,
    mtp,
    vision,
    other,
};
inline constexpr int kModuleRoles = 12;
/// "attention", "delta", ...
const char* role_name(ModuleRole role);
/// The role of an official module name (models/tensor_names.h, without ".weight").
ModuleRole role_of(std::string_view module);

/// Where a matrix lies in tensors that hold several.
struct StackPlace {
    int64_t count = 0;  // matrices in the tensors; 0: one module of its own
    int64_t index = 0;  // which of them
    int64_t rows = 0;   // of each
    int64_t first = 0;  // the module's first row in it: up follows gate
};

struct Module {
    std::string name;     // official: "model.language_model.layers.0.mlp.experts.3.gate_proj"
    std::string in_file;  // as the checkpoint spells it; matrices of a fused tensor have a name each
    ModuleRole role = ModuleRole::other;
    std::string group;              // fused_name: matrices of one group share a global scale
    WeightSegment segment;          // data in the mapping
    std::vector<uint32_t> tensors;  // of the checkpoint: values, scales, activation scale
    StackPlace stack;
};

class ModuleIndex {
  public:
    /// Reads headers, and all scales that are floats. Throws Error(model) as models/weight_format.h says.
    explicit ModuleIndex(const Checkpoint& checkpoint);

    const std::vector<Module>& modules() const { return modules_; }
    /// The modules that a tensor belongs to; none for norms and other small tensors.
    const std::vector<uint32_t>& of_tensor(uint32_t tensor) const { return of_tensor_[tensor]; }
    /// Index of an official name, or -1.
    int64_t find(const std::string& name) const;

  private:
    /// A module, or all experts of a layer in one; `values`: its tensor of values.
    void add_named(const Checkpoint& checkpoint, uint32_t values, std::string_view official,
                   std::string_view in_file);
    /// A matrix for each expert; `tensors`: what they share.
    void add_fused(const Checkpoint& checkpoint, uint32_t values, std::string_view official,
                   std::string_view in_file, std::vector<uint32_t> tensors);
    void add(Module module);

    TensorUse use_;  // owns decoded scales
    std::vector<Module> modules_;
    std::vector<std::vector<uint32_t>> of_tensor_;
    std::unordered_map<std::string, uint32_t> by_name_;
};

}  // namespace quern
