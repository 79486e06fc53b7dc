// libFuzzer: any bytes as a safetensors file. Either they parse to tensors that lie inside the file and add
// up, or there is a short Error(model); nothing else may come out. Every input is tried as a file, and as a
// bare header in front of as many data bytes as its last byte says, so that the fuzzer need not find the
// length field.
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "ggml-like/error.h"
#include "ggml-like/json_pull.h"
#include "ggml-like/safetensors.h"

namespace {

void require(bool ok) {
    if (!ok) abort();
}

void parse(const std::string& file, uint64_t extra) {
    const auto bytes = std::as_bytes(std::span(file.data(), file.size()));
    try {
        const uint64_t size = file.size() + extra;
        const quern::SafetensorsHeader h = quern::parse_safetensors_header(bytes, size, "fuzz");
        uint64_t at = 0;
        for (const quern::SafeTensor& t : h.tensors) {
            require(t.begin == at && t.end >= t.begin && t.rank <= quern::kSafeMaxRank && !t.name.empty());
            require(quern::valid_utf8(t.name));
            require(t.dtype == quern::SafeDType::other ||
                    8 * t.bytes() == static_cast<uint64_t>(t.elements()) *
                                         static_cast<uint64_t>(safe_dtype_bits(t.dtype)));
            at = t.end;
        }
        require(h.data_begin + at == size);
    } catch (const quern::Error& e) {
        require(e.kind() == quern::ErrorKind::model && std::string(e.what()).size() < 2000);
    }
}

void skip(const std::string& text) {
    try {
        quern::JsonPull json(text, "fuzz");
        json.skip_value("here");
        json.end();
    } catch (const quern::Error& e) {
        require(e.kind() == quern::ErrorKind::model);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string text(reinterpret_cast<const char*>(data), size);
    parse(text, 0);
    if (size == 0) return 0;
    const std::string json = text.substr(0, size - 1);
    std::string file;
    for (int i = 0; i < 8; ++i)
        file += static_cast<char>((static_cast<uint64_t>(json.size()) >> (8 * i)) & 0xff);
    parse(file + json, data[size - 1]);
    skip(text);
    return 0;
}
