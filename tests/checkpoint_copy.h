// A parity checkpoint in memory, to be written with one fault.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

#include "checkpoint_writer.h"
#include "engine_harness.h"
#include "ggml-like/json.h"
#include "ggml-like/safetensors.h"

namespace quern::test {

inline nlohmann::json read_json(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    if (!stream) throw std::runtime_error("cannot read " + path);
    return nlohmann::json::parse(
        std::string(std::istreambuf_iterator<char>(stream), {}));  // as json.h compiles it
}

/// Runs the binary's `quantize-inspect`: its exit code, or -1 if it did not exit by itself. `text`: gets its output.
inline int inspect_exit_code(const std::string& arguments, std::string* text = nullptr) {
    std::FILE* pipe = popen((QUERN_BINARY " quantize-inspect " + arguments + " 2>&1").c_str(), "r");
    if (pipe == nullptr) return -1;
    char buffer[4096];
    while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe))
        if (text != nullptr) text->append(buffer, n);
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct CheckpointCopy {
    /// `name`: a checkpoint of one file below tests/vectors/parity.
    explicit CheckpointCopy(const std::string& name)
        : source(source_dir() + "/tests/vectors/parity/" + name) {
        config = read_json(source + "/config.json");
        generation = read_json(source + "/generation_config.json");
        if (std::filesystem::exists(source + "/hf_quant_config.json"))
            hf_quant = read_json(source + "/hf_quant_config.json");
        const SafetensorsFile file = SafetensorsFile::open(source + "/model.safetensors");
        for (const SafeTensor& t : file.tensors())
            weights.add(std::string(t.name), std::string(dtype_text(t)), {t.dims().begin(), t.dims().end()},
                        {reinterpret_cast<const char*>(t.data), t.bytes()});
    }

    void write() const {
        dir.write("config.json", config.dump());
        dir.write("generation_config.json", generation.dump());
        if (!hf_quant.is_null()) dir.write("hf_quant_config.json", hf_quant.dump());
        dir.write("model.safetensors", weights.bytes());
    }

    std::string source;
    TempDir dir;
    nlohmann::json config, generation, hf_quant;
    SafetensorsWriter weights;
};

}  // namespace quern::test
