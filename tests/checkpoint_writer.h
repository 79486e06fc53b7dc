// Writes small safetensors files and checkpoint directories for tests, valid and invalid ones.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ggml-like/error.h"

namespace quern::test {

/// A temporary directory that is removed with this object.
class TempDir {
  public:
    TempDir() {
        std::string pattern = (std::filesystem::temp_directory_path() / "quern-test-XXXXXX").string();
        if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
        path_ = pattern;
    }
    ~TempDir() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    TempDir(const TempDir&) = delete;
    TempDir& operator=(const TempDir&) = delete;

    std::string str() const { return path_.string(); }
    std::string operator/(const std::string& name) const { return (path_ / name).string(); }
    /// Writes a file, making directories as needed; returns its path.
    std::string write(const std::string& name, std::string_view bytes) const {
        const std::filesystem::path p = path_ / name;
        std::filesystem::create_directories(p.parent_path());
        std::ofstream(p, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        return p.string();
    }

  private:
    std::filesystem::path path_;
};

/// 8 length bytes and the header.
inline std::string with_length(std::string_view json) {
    std::string out;
    for (int i = 0; i < 8; ++i)
        out += static_cast<char>((static_cast<uint64_t>(json.size()) >> (8 * i)) & 0xff);
    return out.append(json);
}

template <typename T>
std::string raw_bytes(std::initializer_list<T> values) {
    std::string out;
    for (const T& v : values) out.append(reinterpret_cast<const char*>(&v), sizeof v);
    return out;
}

inline std::string f32_bytes(float value) { return raw_bytes({value}); }

/// Collects tensors and returns the bytes of one safetensors file. Checks nothing, so that invalid files can be made.
class SafetensorsWriter {
  public:
    struct Entry {
        std::string name, dtype;
        std::vector<int64_t> shape;
        std::string data;
    };

    SafetensorsWriter& add(std::string name, std::string dtype, std::vector<int64_t> shape,
                           std::string data) {
        entries.push_back({std::move(name), std::move(dtype), std::move(shape), std::move(data)});
        return *this;
    }
    /// `bytes` bytes of `fill`.
    SafetensorsWriter& fill(std::string name, std::string dtype, std::vector<int64_t> shape, size_t bytes,
                            char value = 0) {
        return add(std::move(name), std::move(dtype), std::move(shape), std::string(bytes, value));
    }
    /// A BF16 tensor whose elements are all `bits`: 0x3f80 is 1.
    SafetensorsWriter& bf16(const std::string& name, const std::vector<int64_t>& shape,
                            uint16_t bits = 0x3f80) {
        std::string data;
        for (int64_t i = 0; i < elements(shape); ++i) data += raw_bytes({bits});
        return add(name, "BF16", shape, data);
    }
    /// NVFP4 as compressed-tensors writes it: codes 0x21 (0.5, 1), block scales `scale`, divisor `g`.
    SafetensorsWriter& nvfp4_ct(const std::string& module, int64_t rows, int64_t cols, float g = 2688.0f,
                                char codes = 0x21, char scale = 0x38) {
        fill(module + ".weight_packed", "U8", {rows, cols / 2}, size(rows * cols / 2), codes);
        fill(module + ".weight_scale", "F8_E4M3", {rows, cols / 16}, size(rows * cols / 16), scale);
        return add(module + ".weight_global_scale", "F32", {1}, f32_bytes(g));
    }
    /// NVFP4 as ModelOpt writes it: multiplier `s`, a scalar of rank 0.
    SafetensorsWriter& nvfp4_modelopt(const std::string& module, int64_t rows, int64_t cols,
                                      float s = 1.0f / 2688, char codes = 0x21, char scale = 0x38) {
        fill(module + ".weight", "U8", {rows, cols / 2}, size(rows * cols / 2), codes);
        fill(module + ".weight_scale", "F8_E4M3", {rows, cols / 16}, size(rows * cols / 16), scale);
        return add(module + ".weight_scale_2", "F32", {}, f32_bytes(s));
    }

    std::string json() const {
        std::string out = "{";
        uint64_t at = 0;
        for (const Entry& e : entries) {
            std::string shape;
            for (const int64_t d : e.shape) shape.append(shape.empty() ? "" : ",").append(std::to_string(d));
            if (out.size() > 1) out += ',';
            out += fmt::format(R"("{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", e.name,
                               e.dtype, shape, at, at + e.data.size());
            at += e.data.size();
        }
        return out + "}";
    }
    std::string bytes() const {
        std::string out = with_length(json());
        for (const Entry& e : entries) out += e.data;
        return out;
    }
    /// Removes the tensor of that name.
    SafetensorsWriter& remove(const std::string& name) {
        std::erase_if(entries, [&](const Entry& e) { return e.name == name; });
        return *this;
    }
    Entry& at(const std::string& name) {
        for (Entry& e : entries) {
            if (e.name == name) return e;
        }
        throw std::runtime_error("no tensor " + name + " to change");
    }

    std::vector<Entry> entries;

  private:
    static size_t size(int64_t n) { return static_cast<size_t>(n); }
    static int64_t elements(const std::vector<int64_t>& shape) {
        int64_t n = 1;
        for (const int64_t d : shape) n *= d;
        return n;
    }
};

/// model.safetensors.index.json of these {tensor, file} pairs.
inline std::string index_json(const std::vector<std::pair<std::string, std::string>>& map) {
    std::string out = R"({"metadata":{"total_size":0},"weight_map":{)";
    for (size_t i = 0; i < map.size(); ++i) {
        out += fmt::format("{}\"{}\":\"{}\"", i ? "," : "", map[i].first, map[i].second);
    }
    return out + "}}";
}

/// Runs `f` and returns the message of the Error(model) that it must throw; if it does anything else, a description of
/// that, which matches no expectation.
template <typename F>
std::string model_error(F&& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.kind() == ErrorKind::model ? e.what()
                                            : fmt::format("<wrong kind {}> {}", e.exit_code(), e.what());
    } catch (const std::exception& e) {
        return fmt::format("<not an Error> {}", e.what());
    }
    return "<no error>";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace quern::test
