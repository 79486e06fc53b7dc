#include "models/quant_info.h"

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"

namespace quern {
namespace {

using nlohmann::json;

const json& member(const json& object, const char* key) {
    static const json null;
    if (!object.is_object()) return null;
    const auto it = object.find(key);
    return it == object.end() ? null : *it;
}

std::string text_member(const json& object, const char* key) {
    const json& value = member(object, key);
    return value.is_string() ? escaped(value.get_ref<const std::string&>()) : std::string();
}

/// Whether an optional section says anything: null, {} and [] do not.
bool says_something(const json& section) { return !section.is_null() && !section.empty(); }

std::string kv_text(const json& scheme) {
    const json& bits = member(scheme, "num_bits");
    if (!bits.is_number_integer()) return says_something(scheme) ? "quantized" : "";
    return fmt::format("{}{}", text_member(scheme, "type") == "float" ? "FP" : "INT", bits.get<int64_t>());
}

/// Of these methods some formats can be read; the tensors decide.
bool known_method(std::string_view method) {
    for (const std::string_view known : {"compressed-tensors", "fp8", "auto-round", "intel/auto-round"})
        if (method == known) return true;
    return method.starts_with("modelopt");
}

void check_supported(const json& section, const std::string& method, const std::string& where) {
    if (!known_method(method)) {
        FAIL(model,
             "{}: config.json: quantization method '{}' is not one quern reads; expected compressed-tensors, "
             "modelopt, fp8 or auto-round",
             where, method.empty() ? "(none given)" : method);
    }
    for (const char* key : {"transform_config", "rotation_config", "hadamard_config"}) {
        if (!says_something(member(section, key))) continue;
        FAIL(model,
             "{}: config.json: quantization_config.{}: the weights are rotated, which quern does not undo",
             where, key);
    }
    const json& sparsity = member(section, "sparsity_config");
    const std::string sparse_format = text_member(sparsity, "format");
    if (says_something(sparsity) && !sparse_format.empty() && sparse_format != "dense") {
        FAIL(
            model,
            "{}: config.json: quantization_config.sparsity_config: sparse format '{}' is not one quern reads",
            where, sparse_format);
    }
}

}  // namespace

QuantInfo read_quant_info(const json& config, const json& hf_quant, const std::string& where) {
    QuantInfo info;
    const json& outer = member(config, "quantization_config");
    const json& section =
        says_something(outer) ? outer : member(member(config, "text_config"), "quantization_config");
    if (says_something(section)) {
        if (!section.is_object()) FAIL(model, "{}: config.json: quantization_config is not an object", where);
        info.method = text_member(section, "quant_method");
        check_supported(section, info.method, where);
        info.format = text_member(section, "format");
        for (const char* key : {"quant_algo", "packing_format"})
            if (info.format.empty()) info.format = text_member(section, key);
        info.kv_cache = kv_text(member(section, "kv_cache_scheme"));
    }
    const json& quantization = member(hf_quant, "quantization");
    if (quantization.is_object()) {
        if (info.method.empty()) info.method = "modelopt";
        const std::string algo = text_member(quantization, "quant_algo");
        if (!algo.empty()) info.format = algo;
        const std::string kv = text_member(quantization, "kv_cache_quant_algo");
        if (!kv.empty()) info.kv_cache = kv;
    }
    const json& producer = member(hf_quant, "producer");
    info.producer = text_member(producer, "name");
    const std::string version = text_member(producer, "version");
    if (!version.empty()) info.producer += " " + version;
    return info;
}

}  // namespace quern
