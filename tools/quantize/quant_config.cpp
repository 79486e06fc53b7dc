#include "tools/quantize/quant_config.h"

#include <fmt/ranges.h>

#include <array>
#include <set>

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kStorages = 5;
// The releases whose readers these files were checked with.
constexpr const char* kCompressedTensors = "0.12.2";
constexpr const char* kModelOpt = "0.43.0";

const char* algorithm(WeightStorage storage, bool activations) {
    switch (storage) {
        case WeightStorage::nvfp4:
            return activations ? "NVFP4" : "W4A16_NVFP4";
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

/// The modules of the result by format.
class Result {
  public:
    Result(const Checkpoint& source, const ModuleIndex& index, const WritePlan& plan)
        : source_(source), index_(index), plan_(plan) {
        for (uint32_t i = 0; i < index.modules().size(); ++i) {
            const Module& m = index.modules()[i];
            const auto storage = static_cast<size_t>(plan.stored[i]);
            ++count_[storage];
            if (plan.stored[i] == WeightStorage::nvfp4)
                activations_ = activations_ || has_activation_scale(m);
        }
        int64_t most = 0;
        for (size_t s = 1; s < count_.size(); ++s) {
            if (count_[s] <= most) continue;
            most = count_[s];
            main_ = static_cast<WeightStorage>(s);
        }
    }

    bool empty() const { return main_ == WeightStorage::keep; }
    bool mixed() const {
        int formats = 0;
        for (int s = 1; s < kStorages; ++s) formats += has(static_cast<WeightStorage>(s));
        return formats > 1;
    }
    bool has(WeightStorage s) const { return count_[static_cast<size_t>(s)] > 0; }
    /// The format of most matrices: that of the class "Linear".
    WeightStorage main() const { return main_; }
    bool activations() const { return activations_; }

    /// Names of the linear modules of a format; experts, too many to be listed, as one expression for each
    /// layer.
    std::vector<std::string> names(WeightStorage storage) const {
        std::vector<std::string> out;
        std::set<std::string> layers;
        for (uint32_t i = 0; i < index_.modules().size(); ++i) {
            const Module& m = index_.modules()[i];
            if (plan_.stored[i] != storage || m.role == ModuleRole::embedding || not_linear(m)) continue;
            const size_t experts = m.in_file.find(".experts.");
            if (experts == std::string::npos) {
                out.push_back(m.in_file);
                continue;
            }
            const std::string prefix = m.in_file.substr(0, experts + 9);
            if (layers.insert(prefix).second) out.push_back(pattern(prefix));
        }
        return out;
    }

    /// Every quantized module with its algorithm.
    Json layers() const {
        Json::object_t list;
        for (uint32_t i = 0; i < index_.modules().size(); ++i) {
            if (plan_.stored[i] == WeightStorage::keep) continue;
            Json how = {
                {"quant_algo", algorithm(plan_.stored[i], has_activation_scale(index_.modules()[i]))}};
            if (plan_.stored[i] == WeightStorage::nvfp4) how["group_size"] = 16;
            list.push_back(
                {index_.modules()[i].in_file, std::move(how)});  // no search for the key: there are many
        }
        return list;
    }

    const char* modelopt_algorithm() const {
        return mixed() ? "MIXED_PRECISION" : algorithm(main_, activations_);
    }

  private:
    bool has_activation_scale(const Module& m) const {
        for (const uint32_t t : m.tensors)
            if (source_.tensors()[t].name.find(".input_") != std::string_view::npos) return true;
        return false;
    }

    /// Parameters that are a matrix, but no linear module's.
    static bool not_linear(const Module& m) { return m.name.ends_with("pos_embed"); }

    std::string pattern(const std::string& prefix) const {
        if (plan_.format == CheckpointFormat::modelopt) return prefix + "*";
        std::string out = "re:";
        for (const char c : prefix) out += c == '.' ? "\\." : std::string(1, c);
        return out + ".*";
    }

    const Checkpoint& source_;
    const ModuleIndex& index_;
    const WritePlan& plan_;
    std::array<int64_t, kStorages> count_{};
    WeightStorage main_ = WeightStorage::keep;
    bool activations_ = false;
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

/// Activations of FP8 matrices are quantized as they come; those of NVFP4 only if the source had scales for
/// them.
Json group_of(WeightStorage storage, bool activations, Json targets) {
    Json weights, input = nullptr;
    const bool nvfp4 = storage == WeightStorage::nvfp4;
    if (nvfp4) {
        weights = args(4, "tensor_group");
        weights["group_size"] = 16;
        weights["scale_dtype"] = "torch.float8_e4m3fn";
        if (activations) {
            input = weights;
            input["dynamic"] = "local";
        }
    } else {
        weights = args(8, storage == WeightStorage::fp8         ? "channel"
                          : storage == WeightStorage::fp8_block ? "block"
                                                                : "tensor");
        input = args(8, storage == WeightStorage::fp8_block ? "group" : "token");
        input["dynamic"] = true;
        input["observer"] = nullptr;
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
    const auto add = [&](WeightStorage storage, Json targets) {
        groups[fmt::format("group_{}", groups.size())] =
            group_of(storage, result.activations(), std::move(targets));
    };
    add(result.main(), {"Linear"});
    for (int s = 1; s < kStorages; ++s) {
        const auto storage = static_cast<WeightStorage>(s);
        if (storage != result.main() && result.has(storage)) add(storage, result.names(storage));
    }
    const Json format = result.mixed() ? Json("mixed-precision") : groups["group_0"]["format"];
    return {{"config_groups", std::move(groups)},
            {"format", format},
            {"global_compression_ratio", nullptr},
            {"ignore", result.names(WeightStorage::keep)},
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
    if (result.empty()) return nullptr;
    if (plan.format == CheckpointFormat::compressed_tensors) return compressed_tensors(source, result);
    Json out = {{"quant_method", "modelopt"}, {"quant_algo", result.modelopt_algorithm()}};
    if (result.mixed()) out["quantized_layers"] = result.layers();
    out["ignore"] = result.names(WeightStorage::keep);
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
    body["exclude_modules"] = result.names(WeightStorage::keep);
    if (result.mixed()) body["quantized_layers"] = result.layers();
    return {{"producer", producer()}, {"quantization", std::move(body)}};
}

}  // namespace quern
