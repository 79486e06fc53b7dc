// What the tests of quantize-inspect --write and --against share.
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include "checkpoint_copy.h"
#include "engine_harness.h"
#include "models/tokenizer.h"
#include "tools/common/inspection.h"
#include "tools/quantize/compare.h"
#include "tools/quantize/write_checkpoint.h"

namespace quern::test {

namespace fs = std::filesystem;

inline std::string read_file(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// Every file of a directory, with its contents.
inline std::map<std::string, std::string> contents(const std::string& directory) {
    std::map<std::string, std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(directory))
        if (entry.is_regular_file()) out[fs::relative(entry.path(), directory)] = read_file(entry.path());
    return out;
}

inline WriteReport write(const std::string& source, WriteOptions options) {
    return write_checkpoint(Checkpoint::open(source), options);
}

inline Comparison against(const std::string& checkpoint, const std::string& original) {
    return compare_checkpoints(Checkpoint::open(checkpoint), Checkpoint::open(original), 2);
}

inline const ModuleComparison& of(const Comparison& c, const std::string& name) {
    for (const ModuleComparison& m : c.modules)
        if (m.name == name) return m;
    throw std::runtime_error("no module " + name);
}

inline std::string usage_error(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.kind() == ErrorKind::usage ? e.what() : fmt::format("<kind {}> {}", e.exit_code(), e.what());
    }
    return "<no error>";
}

/// The demo in BF16, each weight moved by up to a fifth so that it is on no quantizer's grid; made once.
inline const std::string& demo_bf16() {
    static const TempDir dir;
    static const std::string path = [] {
        const std::string demo = source_dir() + "/models/demo";
        const Checkpoint source = Checkpoint::open(demo);
        const ModuleIndex index(source);
        std::mt19937 random(11);
        std::uniform_real_distribution<float> move(0.8f, 1.2f);
        SafetensorsWriter out;
        const auto add = [&](const std::string& name, std::vector<int64_t> shape, auto&& values) {
            std::string data;
            for (const float v : values) data += raw_bytes({float_to_bf16(v)});
            out.add(name, "BF16", std::move(shape), std::move(data));
        };
        for (const Module& m : index.modules()) {
            std::vector<float> values(static_cast<size_t>(m.segment.rows * m.segment.cols));
            for (int64_t r = 0; r < m.segment.rows; ++r)
                dequantize_row(m.segment, r, values.data() + r * m.segment.cols);
            if (m.segment.dtype == DType::NVFP4)
                for (float& v : values) v *= move(random);
            add(m.in_file + ".weight", {m.segment.rows, m.segment.cols}, values);
        }
        for (uint32_t i = 0; i < source.tensors().size(); ++i) {
            const SafeTensor& t = *source.tensors()[i].tensor;
            if (index.of_tensor(i).empty())
                out.add(std::string(t.name), std::string(dtype_text(t)), {t.dims().begin(), t.dims().end()},
                        {reinterpret_cast<const char*>(t.data), t.bytes()});
        }
        dir.write("model.safetensors", out.bytes());
        nlohmann::json config = read_json(demo + "/config.json");
        config.erase("quantization_config");
        dir.write("config.json", config.dump());
        for (const char* name : {"generation_config.json", "preprocessor_config.json", "tokenizer.json",
                                 "tokenizer_config.json", "chat_template.jinja"})
            dir.write(name, read_file(demo + "/" + name));
        return dir.str();
    }();
    return path;
}

inline std::vector<float> logits(const std::string& checkpoint) {
    const Loaded l(checkpoint, make_cpu_backend(2), true);
    std::vector<float> out;
    Request request;
    request.prompt = l.model->tokenizer()->encode(
        "What is the capital of France? Paris is the capital of France.", Tokenizer::Markers::literal);
    request.sampling.temperature = 0;
    request.max_tokens = 1;
    request.on_prompt_logits = [&](const PromptLogits& logits) {
        for (size_t i = 0; i < logits.count(); ++i) {
            const auto row = logits.row(i);
            out.insert(out.end(), row.begin(), row.begin() + l.model->info().vocab);
        }
    };
    Engine engine(*l.model, *l.backend, {.context = 256, .step_tokens = 64, .prompt_logits = 64});
    CHECK(engine.run(std::move(request)).error == "");
    return out;
}

inline double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double error = 0, sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        error += std::pow(static_cast<double>(a[i] - b[i]), 2);
        sum += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(error / sum);
}

inline pid_t start(const std::vector<std::string>& arguments) {
    const pid_t pid = fork();
    if (pid != 0) return pid;
    std::vector<char*> argv;
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, 1);
    dup2(null, 2);
    execv(argv[0], argv.data());
    _exit(127);
}

}  // namespace quern::test
