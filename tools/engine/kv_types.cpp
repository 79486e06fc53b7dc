#include "tools/engine/kv_types.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/kv_format.h"

namespace quern {
namespace {

struct Name {
    std::string_view name;
    DType k, v;
};
constexpr Name kNames[] = {{"bf16", DType::BF16, DType::BF16},
                           {"bfloat16", DType::BF16, DType::BF16},
                           {"f16", DType::F16, DType::F16},
                           {"f32", DType::F32, DType::F32},
                           {"fp8", DType::F8_E4M3, DType::F8_E4M3},
                           {"fp8_e4m3", DType::F8_E4M3, DType::F8_E4M3},
                           {"q8", DType::F8_E4M3, DType::F8_E4M3},
                           {"nvfp4", DType::NVFP4, DType::NVFP4},
                           {"tq4", kv::kTq4, kv::kTq4},
                           {"turboquant_4bit_nc", kv::kTq4, kv::kTq4},
                           {"k8v4", DType::F8_E4M3, kv::kTq4},
                           {"turboquant_k8v4", DType::F8_E4M3, kv::kTq4}};

const Name* find(std::string_view name) {
    const auto* at =
        std::find_if(std::begin(kNames), std::end(kNames), [&](const Name& n) { return n.name == name; });
    return at == std::end(kNames) ? nullptr : at;
}

Name find_or_fail(std::string_view name, DType automatic) {
    if (name == "auto") return {name, automatic, automatic};
    if (const Name* found = find(name)) return *found;
    FAIL(usage, "KV cache type '{}' is not supported; choose auto, bf16, f16, f32, fp8, nvfp4, tq4 or k8v4",
         name);
}

}  // namespace

KvTypes parse_kv_types(std::string_view k, std::string_view v, DType automatic) {
    const Name keys = find_or_fail(k, automatic);
    if (v.empty()) return {keys.k, keys.v};
    return {keys.k, find_or_fail(v, automatic).v};
}

void check_kv_type(std::string_view name, std::string_view flag) {
    if (name != "auto" && find(name) == nullptr)
        FAIL(usage,
             "{}: KV cache type '{}' is not supported; use auto, bf16, f16, f32, fp8, nvfp4, tq4 or k8v4",
             flag, name);
}

std::string kv_name(DType type) {
    for (const Name& n : kNames)
        if (n.k == type) return std::string(n.name);
    return dtype_name(type);
}

std::string kv_name(const KvTypes& types) {
    if (types == KvTypes(DType::F8_E4M3, kv::kTq4)) return "k8v4";
    return types.k == types.v ? kv_name(types.k) : kv_name(types.k) + "/" + kv_name(types.v);
}

}  // namespace quern
