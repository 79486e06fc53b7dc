// libFuzzer: tokenizer.json. Either an Error or a tokenizer that encodes and decodes.
#include <cstdlib>
#include <string_view>

#include "ggml-like/error.h"
#include "models/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    try {
        const auto tokenizer = quern::Tokenizer::from_json(text, "", 0);
        const auto ids = tokenizer.encode(text, quern::Tokenizer::Markers::control);
        for (int32_t id : ids)
            if (id < 0 || id >= tokenizer.size()) std::abort();
        tokenizer.decode(ids, false);
    } catch (const quern::Error&) {
    }
    return 0;
}
