#include "tools/quantize/module_index.h"

#include "ggml-like/check.h"
#include "models/tensor_names.h"
#include "models/weight_format.h"

namespace quern {
namespace {

constexpr const char* kRoleNames[kModuleRoles] = {"attention",     "delta", "delta_gates", "experts",
                                                  "shared_expert", "mlp",   "router",      "head",
                                                  "embedding",     "mtp",   "vision",      "other"};

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

/// What a matrix is called in its place: "q_proj".
std::string_view leaf(std::string_view module) { return module.substr(module.rfind('.') + 1); }

bool is_fused_experts(const CheckpointTensor& t) {
    return t.tensor->rank == 3 &&
           (t.name.ends_with(".experts.gate_up_proj") || t.name.ends_with(".experts.down_proj"));
}

void refuse_quantized_stack(const Checkpoint& checkpoint, uint32_t tensor) {
    for (const char* stack : {".experts.gate_up_proj.", ".experts.down_proj."})
        if (has(checkpoint.tensors()[tensor].name, stack))
            FAIL(
                model,
                "{}: quantized experts stacked in one tensor are run and inspected, but neither compared nor "
                "written; expected one module for each expert, or the unquantized original",
                checkpoint.where(tensor));
}

}  // namespace

const char* role_name(ModuleRole role) { return kRoleNames[static_cast<int>(role)]; }

ModuleRole role_of(std::string_view module) {
    const std::string_view name = leaf(module);
    if (module.starts_with("mtp.")) return ModuleRole::mtp;
    if (module.starts_with("model.visual.")) return ModuleRole::vision;
    if (module == "lm_head") return ModuleRole::head;
    if (name == "embed_tokens") return ModuleRole::embedding;
    if (has(module, ".self_attn.")) return ModuleRole::attention;
    if (has(module, ".linear_attn."))
        return name == "in_proj_a" || name == "in_proj_b" ? ModuleRole::delta_gates : ModuleRole::delta;
    if (has(module, ".mlp.experts.")) return ModuleRole::experts;
    if (has(module, ".mlp.shared_expert.")) return ModuleRole::shared_expert;
    if (module.ends_with(".mlp.gate") || name == "shared_expert_gate") return ModuleRole::router;
    if (has(module, ".mlp.")) return ModuleRole::mlp;
    return ModuleRole::other;
}

ModuleIndex::ModuleIndex(const Checkpoint& checkpoint)
    : use_(checkpoint), of_tensor_(checkpoint.tensors().size()) {
    for (uint32_t i = 0; i < checkpoint.tensors().size(); ++i) {
        const CheckpointTensor& t = checkpoint.tensors()[i];
        if (is_fused_experts(t)) {
            add_fused(checkpoint, i);
            continue;
        }
        refuse_quantized_stack(checkpoint, i);
        if (t.tensor->rank != 2) continue;
        for (const std::string_view end : {".weight", ".weight_packed"})
            if (t.name.ends_with(end))
                add_linear(checkpoint, t.name.substr(0, t.name.size() - end.size()),
                           t.tensor->name.substr(0, t.tensor->name.size() - end.size()));
    }
}

void ModuleIndex::add(Module module) {
    const auto index = static_cast<uint32_t>(modules_.size());
    module.role = role_of(module.name);
    module.group = fused_name(module.name);
    for (const uint32_t t : module.tensors) of_tensor_[t].push_back(index);
    by_name_.emplace(module.name, index);
    modules_.push_back(std::move(module));
}

void ModuleIndex::add_linear(const Checkpoint& checkpoint, std::string_view official,
                             std::string_view in_file) {
    if (by_name_.contains(std::string(official)))
        return;  // `weight` and `weight_packed`: the reader refuses it
    Module m;
    m.name = official;
    m.in_file = in_file;
    for (const char* suffix :
         {".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2",
          ".weight_global_scale", ".input_scale", ".input_global_scale"}) {
        const uint32_t t = checkpoint.find(m.name + suffix);
        if (t != Checkpoint::kNone) m.tensors.push_back(t);
    }
    const SafeTensor& values = *checkpoint.tensors()[m.tensors[0]].tensor;
    const bool packed = values.dtype == SafeDType::U8 || values.dtype == SafeDType::I8;
    m.segment = read_linear(checkpoint, m.name, values.shape[0],
                            packed ? 2 * values.shape[1] : values.shape[1], use_);
    add(std::move(m));
}

void ModuleIndex::add_fused(const Checkpoint& checkpoint, uint32_t tensor) {
    const CheckpointTensor& t = checkpoint.tensors()[tensor];
    const int64_t count = t.tensor->shape[0], rows = t.tensor->shape[1], cols = t.tensor->shape[2];
    const bool both = t.name.ends_with("gate_up_proj");
    if (both && rows % 2 != 0)
        FAIL(model, "{}: expected as many rows of gate as of up, found {}", checkpoint.where(tensor),
             describe(*t.tensor));
    const std::vector<WeightSegment> all =
        read_stacked(checkpoint, std::string(t.name), count, rows, cols, use_);
    const auto expert_name = [&](std::string_view name, size_t e, const char* part) {
        return fmt::format("{}{}.{}", name.substr(0, name.rfind('.') + 1), e, part);
    };
    for (size_t e = 0; e < all.size(); ++e) {
        const auto add_part = [&](const char* part, int64_t begin, int64_t part_rows) {
            Module m;
            m.name = expert_name(t.name, e, part);
            m.in_file = expert_name(t.tensor->name, e, part);
            m.segment = slice_rows(all[e], begin, part_rows, m.name);
            m.tensors = {tensor};
            m.fused = true;
            add(std::move(m));
        };
        if (both) {
            add_part("gate_proj", 0, rows / 2);
            add_part("up_proj", rows / 2, rows / 2);
        } else {
            add_part("down_proj", 0, rows);
        }
    }
}

int64_t ModuleIndex::find(const std::string& name) const {
    const auto at = by_name_.find(name);
    return at == by_name_.end() ? -1 : int64_t{at->second};
}

}  // namespace quern
