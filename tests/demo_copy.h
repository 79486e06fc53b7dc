// A copy of the demo checkpoint with a fault in it.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint_writer.h"
#include "engine_harness.h"
#include "ggml-like/safetensors.h"

namespace quern::test {

inline const std::string kDemoLayers = "model.language_model.layers.";

struct DemoCopy {
    DemoCopy() {
        const std::string demo = source_dir() + "/models/demo";
        for (const char* name : {"config.json", "generation_config.json", "tokenizer.json",
                                 "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"})
            std::filesystem::copy(demo + "/" + name, dir / name);
        for (const char* name : {"/model.safetensors", "/model_vision.safetensors"}) {
            const SafetensorsFile file = SafetensorsFile::open(demo + name);
            for (const SafeTensor& t : file.tensors())
                weights.add(std::string(t.name), safe_dtype_name(t.dtype), {t.dims().begin(), t.dims().end()},
                            {reinterpret_cast<const char*>(t.data), t.bytes()});
        }
    }
    void write() const { dir.write("model.safetensors", weights.bytes()); }

    /// The module's tensors change places with those of the other one.
    void exchange(const std::string& module, const std::string& other) {
        for (const char* suffix : {".weight_packed", ".weight_scale", ".weight_global_scale"})
            std::swap(weights.at(module + suffix).data, weights.at(other + suffix).data);
    }
    /// Each block scale goes to the next block of 16 values.
    void shift_scales(const std::string& module) {
        std::string& scales = weights.at(module + ".weight_scale").data;
        std::rotate(scales.begin(), scales.begin() + 1, scales.end());
    }
    /// Codes of two columns of every block change places.
    void swap_columns(const std::string& module) {
        for (char& byte : weights.at(module + ".weight_packed").data)
            byte = static_cast<char>((byte << 4 & 0xf0) | (byte >> 4 & 0x0f));
    }
    /// All tensors of a layer become those of another one of the same kind.
    void replace_layer(int layer, int by) {
        const std::string to = kDemoLayers + std::to_string(layer) + ".",
                          from = kDemoLayers + std::to_string(by) + ".";
        for (auto& t : weights.entries)
            if (t.name.compare(0, to.size(), to) == 0)
                t.data = weights.at(from + t.name.substr(to.size())).data;
    }

    TempDir dir;
    SafetensorsWriter weights;
};

}  // namespace quern::test
