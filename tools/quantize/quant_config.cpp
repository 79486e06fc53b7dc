#include "tools/quantize/quant_config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

// The releases whose layout these files have.
constexpr const char* kCompressedTensors = "0.12.2";
constexpr const char* kModelOpt = "0.43.0";

struct Format {
    WeightStorage storage = WeightStorage::keep;
    bool scaled = false;  // a scale from calibration for the activations
    auto operator<=>(const Format&) const = default;
};

const char* algorithm(const Format& format) {
    switch (format.storage) {
        case WeightStorage::nvfp4:
            return format.scaled ? "NVFP4" : "W4A16_NVFP4";
        case WeightStorage::fp8:
            return "FP8_PER_CHANNEL_PER_TOKEN";
        case WeightStorage::fp8_block:
            return "FP8_PB_WO";
        case WeightStorage::fp8_tensor:
            return "FP8";
        case WeightStorage::keep:
            break;
    }
    return "";
}

/// An expression for a module that holds in engines that drop or turn round "model.language_model." as well,
/// but not for the same layer of an MTP part.
std::string portable(const std::string& in_file) {
    size_t from = 0;
    for (const char* part : {"model.layers.", "visual.", "mtp.", "lm_head"})
        if (const size_t at = in_file.find(part); at != std::string::npos) {
            from = at;
            break;
        }
    std::string out = "re:.*";
    for (const char c : std::string_view(in_file).substr(from)) {
        if (c == '.') out += '\\';
        out += c;
    }
    return out;
}

/// The modules of the result by format.
class Result {
  public:
    Result(const Checkpoint& source, const ModuleIndex& index, const WritePlan& plan)
        : source_(source), index_(index), plan_(plan) {
        std::map<Format, int64_t> count;
        for (uint32_t i = 0; i < index.modules().size(); ++i) {
            formats_.push_back(format_of(i));
            if (plan.stored[i] != WeightStorage::keep) ++count[formats_.back()];
        }
        for (const auto& [format, modules] : count) used_.push_back(format);
        std::stable_sort(used_.begin(), used_.end(),
                         [&](const Format& a, const Format& b) { return count[a] > count[b]; });
    }

    /// The formats of quantized matrices, that of most first: it is the one of the class "Linear".
    const std::vector<Format>& used() const { return used_; }
    bool mixed() const { return used_.size() > 1; }
    bool has(WeightStorage storage) const {
        return std::any_of(used_.begin(), used_.end(), [&](const Format& f) { return f.storage == storage; });
    }

    /// What engines leave as it is; they look these names up under their own.
    std::vector<std::string> ignored() const {
        std::vector<std::string> out;
        for_each_linear(
            {}, [&](const Module& m) { out.push_back(m.in_file); },
            [&](const std::string& experts) { out.push_back(pattern(experts)); });
        if (index_.find("lm_head") < 0) out.emplace_back("lm_head");  // tied: engines make one all the same
        return out;
    }

    /// The targets of the group of a format: the class "Linear", or expressions: not every engine looks names
    /// up, and some match the name of the fused module only. No engine takes the head for a Linear.
    std::vector<std::string> targets(const Format& format) const {
        const bool main = format == used_[0];
        std::vector<std::string> out;
        if (main) out.emplace_back("Linear");
        std::set<std::string> groups;
        for_each_linear(
            format,
            [&](const Module& m) {
                if (main && m.role != ModuleRole::head) return;
                out.push_back(portable(m.in_file) + "$");
                if (m.group != m.name && groups.insert(m.group).second)
                    out.push_back(portable(m.group) + "$");
            },
            [&](const std::string& experts) {
                if (!main) out.push_back(pattern(experts));
            });
        return out;
    }

    /// Every quantized module with its algorithm.
    Json layers() const {
        Json::object_t list;
        for (uint32_t i = 0; i < index_.modules().size(); ++i) {
            if (plan_.stored[i] == WeightStorage::keep) continue;
            Json how = {{"quant_algo", algorithm(formats_[i])}};
            if (plan_.stored[i] == WeightStorage::nvfp4) how["group_size"] = 16;
            list.push_back(
                {index_.modules()[i].in_file, std::move(how)});  // no search for the key: there are many
        }
        return list;
    }

    const char* modelopt_algorithm() const {
        if (used_.empty()) return "";
        return mixed() ? "MIXED_PRECISION" : algorithm(used_[0]);
    }

  private:
    Format format_of(uint32_t module) const {
        Format out{plan_.stored[module]};
        if (out.storage != WeightStorage::nvfp4 && out.storage != WeightStorage::fp8_tensor) return out;
        for (const uint32_t t : index_.modules()[module].tensors) {
            const std::string_view name = source_.tensors()[t].name;
            out.scaled |= name.find(".input_") != name.npos || name.ends_with("activation_scale");
        }
        return out;
    }

    /// The linear modules of a format; experts, too many to be listed, once a layer: "...mlp.experts."
    void for_each_linear(const Format& format, const std::function<void(const Module&)>& one,
                         const std::function<void(const std::string&)>& experts_of_layer) const {
        std::set<std::string> layers;
        for (uint32_t i = 0; i < index_.modules().size(); ++i) {
            const Module& m = index_.modules()[i];
            if (formats_[i] != format || m.role == ModuleRole::embedding || not_linear(m)) continue;
            const size_t experts = m.in_file.find(".experts.");
            if (experts == std::string::npos)
                one(m);
            else if (const std::string prefix = m.in_file.substr(0, experts + 9);
                     layers.insert(prefix).second)
                experts_of_layer(prefix);
        }
    }

    /// Parameters that are a matrix, but no linear module's.
    static bool not_linear(const Module& m) { return m.name.ends_with("pos_embed"); }

    std::string pattern(const std::string& prefix) const {
        if (plan_.format == CheckpointFormat::modelopt) return prefix + "*";
        return portable(prefix) + ".*";
    }

    const Checkpoint& source_;
    const ModuleIndex& index_;
    const WritePlan& plan_;
    std::vector<Format> formats_;  // by module
    std::vector<Format> used_;
};

Json args(int bits, const char* strategy) {
    return {{"actorder", nullptr},
            {"block_structure", nullptr},
            {"dynamic", false},
            {"group_size", nullptr},
            {"num_bits", bits},
            {"observer", "minmax"},
            {"observer_kwargs", Json::object()},
            {"scale_dtype", nullptr},
            {"strategy", strategy},
            {"symmetric", true},
            {"type", "float"},
            {"zp_dtype", nullptr}};
}

/// Activations of FP8 matrices are quantized as they come, or by the scale that the source had for those of
/// one scale; those of NVFP4 only if the source had scales for them.
Json group_of(const Format& format, Json targets) {
    const auto [storage, scaled] = format;
    Json weights, input = nullptr;
    const bool nvfp4 = storage == WeightStorage::nvfp4;
    if (nvfp4) {
        weights = args(4, "tensor_group");
        weights["group_size"] = 16;
        weights["scale_dtype"] = "torch.float8_e4m3fn";
        if (scaled) {
            input = weights;
            input["dynamic"] = "local";
        }
    } else {
        weights = args(8, storage == WeightStorage::fp8         ? "channel"
                          : storage == WeightStorage::fp8_block ? "block"
                                                                : "tensor");
        input = args(8, storage == WeightStorage::fp8_block ? "group" : scaled ? "tensor" : "token");
        if (!scaled) {
            input["dynamic"] = true;
            input["observer"] = nullptr;
        }
        if (storage == WeightStorage::fp8_block) {
            weights["block_structure"] = {128, 128};
            input["group_size"] = 128;
        }
    }
    return {{"format", nvfp4 ? "nvfp4-pack-quantized" : "float-quantized"},
            {"input_activations", std::move(input)},
            {"output_activations", nullptr},
            {"targets", std::move(targets)},
            {"weights", std::move(weights)}};
}

Json source_section(const Checkpoint& source, const char* key) {
    const auto at = source.config().find("quantization_config");
    if (at == source.config().end() || !at->is_object() || !at->contains(key)) return nullptr;
    return Json::parse(at->at(key).dump());
}

Json compressed_tensors(const Checkpoint& source, const Result& result) {
    Json groups = Json::object();
    for (const Format& format : result.used())
        groups[fmt::format("group_{}", groups.size())] = group_of(format, result.targets(format));
    Json format = groups["group_0"]["format"];
    for (const Json& group : groups)
        if (group["format"] != format) format = "mixed-precision";
    return {{"config_groups", std::move(groups)},
            {"format", std::move(format)},
            {"global_compression_ratio", nullptr},
            {"ignore", result.ignored()},
            {"kv_cache_scheme", source_section(source, "kv_cache_scheme")},
            {"quant_method", "compressed-tensors"},
            {"quantization_status", "compressed"},
            {"sparsity_config", Json::object()},
            {"transform_config", Json::object()},
            {"version", kCompressedTensors}};
}

Json producer() { return {{"name", "modelopt"}, {"version", kModelOpt}}; }

}  // namespace

Json quantization_config(const Checkpoint& source, const ModuleIndex& index, const WritePlan& plan) {
    const Result result(source, index, plan);
    if (result.used().empty()) return nullptr;
    if (plan.format == CheckpointFormat::compressed_tensors) return compressed_tensors(source, result);
    Json out = {{"quant_method", "modelopt"}, {"quant_algo", result.modelopt_algorithm()}};
    if (result.mixed()) out["quantized_layers"] = result.layers();
    out["ignore"] = result.ignored();
    if (Json kv = source_section(source, "kv_cache_scheme"); !kv.is_null())
        out["kv_cache_scheme"] = std::move(kv);
    out["producer"] = producer();
    return out;
}

Json hf_quant_config(const Checkpoint& source, const ModuleIndex& index, const WritePlan& plan) {
    const Result result(source, index, plan);
    const std::string& kv = source.quant().kv_cache;
    Json body = {{"quant_algo", result.modelopt_algorithm()},
                 {"kv_cache_quant_algo", kv.empty() ? Json(nullptr) : Json(kv)}};
    if (result.has(WeightStorage::nvfp4)) body["group_size"] = 16;
    body["exclude_modules"] = result.ignored();
    if (result.mixed()) body["quantized_layers"] = result.layers();
    return {{"producer", producer()}, {"quantization", std::move(body)}};
}

}  // namespace quern
