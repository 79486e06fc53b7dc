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

bool is_stack_name(std::string_view module) {
    return module.ends_with(".experts.gate_up_proj") || module.ends_with(".experts.down_proj");
}

/// All experts of a layer in one tensor without a module's name, as originals have them.
bool is_fused_experts(const CheckpointTensor& t) { return t.tensor->rank == 3 && is_stack_name(t.name); }

int64_t columns(const SafeTensor& values) {
    const int64_t last = values.shape[values.rank - 1];
    return values.dtype == SafeDType::U8 || values.dtype == SafeDType::I8 ? 2 * last : last;
}

/// The values of a module; kNone: it is not there.
uint32_t values_of(const Checkpoint& checkpoint, const std::string& module) {
    const uint32_t packed = checkpoint.find(module + ".weight_packed");
    return packed != Checkpoint::kNone ? packed : checkpoint.find(module + ".weight");
}

/// Those that are there of the tensors `name` + suffix.
std::vector<uint32_t> tensors_of(const Checkpoint& checkpoint, std::string_view name,
                                 std::initializer_list<const char*> suffixes) {
    std::vector<uint32_t> out;
    for (const char* suffix : suffixes)
        if (const uint32_t t = checkpoint.find(std::string(name) + suffix); t != Checkpoint::kNone)
            out.push_back(t);
    return out;
}

/// How many experts lie in the tensor. Of two dimensions it does not say: there the rows of gate and up, of all experts,
/// are counted in columns of down.
int64_t stacked_experts(const Checkpoint& checkpoint, uint32_t tensor) {
    const CheckpointTensor& t = checkpoint.tensors()[tensor];
    if (t.tensor->rank == 3) return t.tensor->shape[0];
    const std::string experts(t.name.substr(0, t.name.rfind(".experts.") + 9));
    const uint32_t gate_up = values_of(checkpoint, experts + "gate_up_proj"),
                   down = values_of(checkpoint, experts + "down_proj");
    if (gate_up != Checkpoint::kNone && down != Checkpoint::kNone) {
        const int64_t rows = checkpoint.tensors()[gate_up].tensor->shape[0],
                      inner = columns(*checkpoint.tensors()[down].tensor);
        if (rows % (2 * inner) == 0 && t.tensor->shape[0] % (rows / (2 * inner)) == 0)
            return rows / (2 * inner);
    }
    FAIL(model,
         "{}: experts stacked in one tensor; expected gate_up_proj with 2 x experts x columns of down_proj "
         "rows "
         "beside a down_proj, found {}",
         checkpoint.where(tensor), describe(*t.tensor));
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
        if (is_fused_experts(t))
            add_fused(checkpoint, i, t.name, t.tensor->name,
                      tensors_of(checkpoint, t.name, {"", "_scale", "_scale_inv", "_activation_scale"}));
        if (t.tensor->rank != 2 && t.tensor->rank != 3) continue;
        for (const std::string_view end : {".weight", ".weight_packed"})
            if (t.name.ends_with(end))
                add_named(checkpoint, i, t.name.substr(0, t.name.size() - end.size()),
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

void ModuleIndex::add_named(const Checkpoint& checkpoint, uint32_t values, std::string_view official,
                            std::string_view in_file) {
    if (by_name_.contains(std::string(official)))
        return;  // `weight` and `weight_packed`: the reader refuses it
    std::vector<uint32_t> tensors =
        tensors_of(checkpoint, official,
                   {".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2",
                    ".weight_global_scale", ".input_scale", ".input_global_scale"});
    if (is_stack_name(official)) {
        add_fused(checkpoint, values, official, in_file, std::move(tensors));
    } else if (const SafeTensor& t = *checkpoint.tensors()[values].tensor; t.rank == 2) {
        Module m;
        m.name = official;
        m.in_file = in_file;
        m.tensors = std::move(tensors);
        m.segment = read_linear(checkpoint, m.name, t.shape[0], columns(t), use_);
        add(std::move(m));
    }
}

void ModuleIndex::add_fused(const Checkpoint& checkpoint, uint32_t values, std::string_view official,
                            std::string_view in_file, std::vector<uint32_t> tensors) {
    const SafeTensor& t = *checkpoint.tensors()[values].tensor;
    const int64_t count = stacked_experts(checkpoint, values);
    const int64_t rows = t.rank == 3 ? t.shape[1] : t.shape[0] / count;
    const bool both = official.ends_with("gate_up_proj");
    if (both && rows % 2 != 0)
        FAIL(model, "{}: expected as many rows of gate as of up, found {}", checkpoint.where(values),
             describe(t));
    const std::vector<WeightSegment> all =
        read_stacked(checkpoint, std::string(official), count, rows, columns(t), use_);
    const auto expert_name = [](std::string_view name, size_t e, const char* part) {
        return fmt::format("{}{}.{}", name.substr(0, name.rfind('.') + 1), e, part);
    };
    for (size_t e = 0; e < all.size(); ++e) {
        const auto add_part = [&](const char* part, int64_t begin, int64_t part_rows) {
            Module m;
            m.name = expert_name(official, e, part);
            m.in_file = expert_name(in_file, e, part);
            m.segment = slice_rows(all[e], begin, part_rows, m.name);
            m.tensors = tensors;
            m.stack = {count, static_cast<int64_t>(e), rows, begin};
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
