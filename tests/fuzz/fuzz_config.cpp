// libFuzzer: config.json. Either an Error or a configuration within the documented limits.
#include <cstdlib>
#include <string_view>

#include "ggml-like/error.h"
#include "ggml-like/json_guard.h"
#include "models/qwen3_6_moe.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        const auto json = quern::parse_json({reinterpret_cast<const char*>(data), size}, "fuzz");
        const auto config = quern::parse_qwen3_6_moe_config(json, "fuzz");
        if (config.full_attention.size() != static_cast<size_t>(config.layers)) std::abort();
        if (config.heads % config.kv_heads != 0 || config.value_heads % config.key_heads != 0) std::abort();
    } catch (const quern::Error&) {
    }
    return 0;
}
