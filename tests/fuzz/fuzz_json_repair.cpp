// libFuzzer: text that clients mean as JSON. It becomes UTF-8, repaired text stays as it is, and what was JSON is the same JSON.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "ggml-like/json.h"
#include "models/utf8.h"
#include "tools/serve/json_repair.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const std::string repaired = quern::repaired_json(text);
    const auto require = [](bool condition) {
        if (!condition) std::abort();
    };
    require(quern::is_valid_utf8(repaired));
    require(quern::repaired_json(repaired) == repaired);
    require(repaired.size() <= 3 * text.size());
    // nlohmann takes a zero byte for the end of the text: what follows it may be anything.
    if (text.find('\0') == text.npos && nlohmann::json::accept(text)) require(repaired == text);
    return 0;
}
