// quantize-inspect --write and --against: what is written, that it is read as it was meant, and that no kill,
// thread or repetition changes a byte of it.
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
#include "tools/inspect/inspection.h"
#include "tools/quantize/compare.h"
#include "tools/quantize/write_checkpoint.h"

#include <doctest/doctest.h>

namespace quern {
namespace {

namespace fs = std::filesystem;
using test::CheckpointCopy;
using test::contains;
using test::SafetensorsWriter;
using test::TempDir;

std::string parity(const std::string& name) { return test::source_dir() + "/tests/vectors/parity/" + name; }

std::string read_file(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// Every file of a directory, with its contents.
std::map<std::string, std::string> contents(const std::string& directory) {
    std::map<std::string, std::string> out;
    for (const auto& entry : fs::recursive_directory_iterator(directory))
        if (entry.is_regular_file()) out[fs::relative(entry.path(), directory)] = read_file(entry.path());
    return out;
}

WriteReport write(const std::string& source, WriteWish wish) {
    return write_checkpoint(Checkpoint::open(source), wish);
}

Comparison against(const std::string& checkpoint, const std::string& original) {
    return compare_checkpoints(Checkpoint::open(checkpoint), Checkpoint::open(original), 2);
}

const ModuleComparison& of(const Comparison& c, const std::string& name) {
    for (const ModuleComparison& m : c.modules)
        if (m.name == name) return m;
    throw std::runtime_error("no module " + name);
}

std::string usage_error(const std::function<void()>& f) {
    try {
        f();
    } catch (const Error& e) {
        return e.kind() == ErrorKind::usage ? e.what() : fmt::format("<kind {}> {}", e.exit_code(), e.what());
    }
    return "<no error>";
}

/// The demo in BF16, each weight moved by up to a fifth so that it is on no quantizer's grid; made once.
const std::string& demo_bf16() {
    static const TempDir dir;
    static const std::string path = [] {
        const std::string demo = test::source_dir() + "/models/demo";
        const Checkpoint source = Checkpoint::open(demo);
        const ModuleIndex index(source);
        std::mt19937 random(11);
        std::uniform_real_distribution<float> move(0.8f, 1.2f);
        SafetensorsWriter out;
        const auto add = [&](const std::string& name, std::vector<int64_t> shape, auto&& values) {
            std::string data;
            for (const float v : values) data += test::raw_bytes({float_to_bf16(v)});
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
                out.add(std::string(t.name), safe_dtype_name(t.dtype), {t.dims().begin(), t.dims().end()},
                        {reinterpret_cast<const char*>(t.data), t.bytes()});
        }
        dir.write("model.safetensors", out.bytes());
        nlohmann::json config = test::read_json(demo + "/config.json");
        config.erase("quantization_config");
        dir.write("config.json", config.dump());
        for (const char* name :
             {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"})
            dir.write(name, read_file(demo + "/" + name));
        return dir.str();
    }();
    return path;
}

std::vector<float> logits(const std::string& checkpoint) {
    const test::Loaded l(checkpoint, make_cpu_backend(2), true);
    std::vector<float> out;
    Request request;
    request.prompt = l.model->tokenizer()->encode(
        "What is the capital of France? Paris is the capital of France.", Tokenizer::Markers::literal);
    request.sampling.temperature = 0;
    request.max_tokens = 1;
    request.on_prompt_logits = [&](int64_t, const float* row) {
        out.insert(out.end(), row, row + l.model->info().vocab);
    };
    Engine engine(*l.model, *l.backend, {.context = 256, .step_tokens = 64, .prompt_logits = 64});
    CHECK(engine.run(std::move(request)).error == "");
    return out;
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
    REQUIRE(a.size() == b.size());
    double error = 0, sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        error += std::pow(static_cast<double>(a[i] - b[i]), 2);
        sum += std::pow(static_cast<double>(b[i]), 2);
    }
    return std::sqrt(error / sum);
}

pid_t start(const std::vector<std::string>& arguments) {
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

int shell(const std::string& arguments, std::string* text = nullptr) {
    std::FILE* pipe = popen((QUERN_BINARY " quantize-inspect " + arguments + " 2>&1").c_str(), "r");
    REQUIRE(pipe != nullptr);
    char buffer[4096];
    while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe))
        if (text != nullptr) text->append(buffer, n);
    const int status = pclose(pipe);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST_SUITE("cpu") {
    TEST_CASE(
        "write: every recipe and format from fused and single experts reads as the model it was made of") {
        for (const std::string name : {"base/bf16", "mixed/bf16", "real_heads/bf16", "vision_mtp/bf16",
                                       "tied_text/bf16", "dead_expert/f16", "odd_pattern/bf16"}) {
            for (const std::string recipe : {"aeon", "xs", "fp8-head"}) {
                for (const CheckpointFormat format :
                     {CheckpointFormat::compressed_tensors, CheckpointFormat::modelopt}) {
                    CAPTURE(name);
                    CAPTURE(recipe);
                    CAPTURE(std::string(format_name(format)));
                    const TempDir dir;
                    const std::string out = dir / "out";
                    const WriteReport report = write(
                        parity(name), {.directory = out, .recipe = recipe, .format = format, .threads = 2});
                    CHECK(report.quantized > 10);
                    CHECK(!fs::exists(out + ".partial"));
                    const Inspection in(out, ReadMode::values);
                    CHECK(in.failure == "");
                    CHECK(in.audit.problems == std::vector<std::string>());
                    for (const std::string& note : in.audit.notes)
                        CHECK_MESSAGE(!contains(note, "config: "), note);
                    const Comparison c = against(out, parity(name));
                    CHECK_MESSAGE(c.clean(), describe(c, 3));
                    bool fp8 = false;
                    for (const ModuleComparison& m : c.modules) {
                        const bool nvfp4 = m.role == ModuleRole::attention || m.role == ModuleRole::experts ||
                                           m.role == ModuleRole::shared_expert ||
                                           (recipe == "xs" && (m.role == ModuleRole::delta ||
                                                               m.role == ModuleRole::delta_gates));
                        CAPTURE(m.name);
                        fp8 |= m.format.starts_with("FP8") && m.role == ModuleRole::head;
                        if (nvfp4)
                            CHECK(m.format == "NVFP4");
                        else if (!m.format.starts_with("FP8"))
                            CHECK(m.error.different == 0);
                    }
                    CHECK(fp8 == (recipe == "fp8-head" && !in.config.tied_head));
                }
            }
        }
    }

    TEST_CASE("write: global scales are shared by q/k/v and by gate/up, and nothing else") {
        const TempDir dir;
        write(parity("base/bf16"), {.directory = dir / "out", .recipe = "aeon"});
        const Checkpoint c = Checkpoint::open(dir / "out");
        const auto scale = [&](const std::string& module) {
            const uint32_t at = c.find("model.language_model.layers." + module + ".weight_global_scale");
            REQUIRE(at != Checkpoint::kNone);
            float value;
            std::memcpy(&value, c.tensors()[at].tensor->data, sizeof value);
            return value;
        };
        CHECK(scale("3.self_attn.q_proj") == scale("3.self_attn.k_proj"));
        CHECK(scale("3.self_attn.q_proj") == scale("3.self_attn.v_proj"));
        CHECK(scale("3.self_attn.q_proj") != scale("3.self_attn.o_proj"));
        CHECK(scale("0.mlp.experts.2.gate_proj") == scale("0.mlp.experts.2.up_proj"));
        CHECK(scale("0.mlp.experts.2.gate_proj") != scale("0.mlp.experts.3.gate_proj"));
        CHECK(scale("0.mlp.shared_expert.gate_proj") == scale("0.mlp.shared_expert.up_proj"));
    }

    TEST_CASE("write: amax gives what the reference quantizers wrote of the same weights") {
        // scripts/quant_formats.py, in numpy. Where it multiplies by G and divides by the block scale,
        // compressed-tensors divides by their quotient, as we do: BF16 weights lie on ties of the codes, and
        // some fall to the other side.
        const TempDir dir;
        const std::string recipe =
            dir.write("amax.json", R"({"scales": "amax", "roles": {"attention": "nvfp4",
            "experts": "nvfp4", "shared_expert": "nvfp4"}})");
        write(
            parity("base/bf16"),
            {.directory = dir / "mo", .recipe = recipe, .format = CheckpointFormat::modelopt, .threads = 2});
        for (const ModuleComparison& m : against(dir / "mo", parity("base/modelopt")).modules)
            CHECK_MESSAGE(m.error.different == 0, m.name);
        write(parity("base/bf16"), {.directory = dir / "ct", .recipe = recipe, .threads = 2});
        for (const ModuleComparison& m : against(dir / "ct", parity("base/ct")).modules)
            CHECK_MESSAGE(static_cast<double>(m.error.different) < 0.01 * static_cast<double>(m.error.values),
                          m.name);
        write(parity("real_heads/bf16"), {.directory = dir / "head", .recipe = "fp8-head", .threads = 2});
        CHECK(of(against(dir / "head", parity("real_heads/ct_fp8_head")), "lm_head").error.different == 0);
    }

    TEST_CASE("write: a recipe file decides by role, then by expression") {
        const TempDir dir;
        const std::string recipe = dir.write("recipe.json", R"({
            "roles": {"experts": "nvfp4", "delta": "fp8", "attention": "fp8-tensor"},
            "overrides": [{"match": "layers\\.0\\..*experts", "format": "fp8"},
                          {"match": "layers\\.1\\.linear_attn", "format": "keep"}],
            "scales": "amax"})");
        write(parity("base/bf16"), {.directory = dir / "out", .recipe = recipe, .threads = 2});
        const Comparison c = against(dir / "out", parity("base/bf16"));
        CHECK(c.clean());
        const std::string layer = "model.language_model.layers.";
        CHECK(of(c, layer + "0.mlp.experts.1.up_proj").format == "FP8 per channel");
        CHECK(of(c, layer + "1.mlp.experts.1.up_proj").format == "NVFP4");
        CHECK(of(c, layer + "0.linear_attn.in_proj_z").format == "FP8 per channel");
        CHECK(of(c, layer + "1.linear_attn.in_proj_z").format == "BF16");
        CHECK(of(c, layer + "3.self_attn.q_proj").format == "FP8 per tensor");
        CHECK(of(c, layer + "0.mlp.shared_expert.up_proj").format == "BF16");
        const Inspection in(dir / "out", ReadMode::values);
        CHECK(in.clean());
        for (const std::string& note : in.audit.notes) CHECK_MESSAGE(!contains(note, "config: "), note);
    }

    TEST_CASE("write: wrong recipes say what is wrong") {
        const TempDir dir;
        const auto error = [&](const std::string& text) {
            const std::string path = dir.write("recipe.json", text);
            return usage_error(
                [&] { write(parity("base/bf16"), {.directory = dir / "out", .recipe = path}); });
        };
        CHECK(contains(error("{"), "no JSON"));
        CHECK(contains(error(R"({"role": {}})"), "unknown key 'role'"));
        CHECK(contains(error(R"({"roles": {"expert": "nvfp4"}})"), "no role 'expert'"));
        CHECK(contains(error(R"({"roles": {"experts": "int4"}})"), "found 'int4'"));
        CHECK(
            contains(error(R"({"overrides": [{"match": "(", "format": "keep"}]})"), "no regular expression"));
        CHECK(contains(error(R"({"roles": {}})"), "no matrix changes"));
        CHECK(contains(error(R"({"overrides": [{"match": "q_proj", "format": "nvfp4"}]})"),
                       "other engines fuse them"));
        CHECK(contains(
            usage_error([&] { write(parity("base/bf16"), {.directory = dir / "o", .recipe = "aeno"}); }),
            "expected aeon, xs, fp8-head"));
        CHECK(!fs::exists(dir / "out"));
        CHECK(!fs::exists(dir / "out.partial"));
    }

    TEST_CASE("write: searched scales make less error than amax in every matrix") {
        const TempDir dir;
        write(demo_bf16(), {.directory = dir / "mse", .recipe = "aeon", .threads = 2});
        const std::string recipe =
            dir.write("amax.json", R"({"scales": "amax", "roles": {"attention": "nvfp4",
            "experts": "nvfp4", "shared_expert": "nvfp4"}})");
        write(demo_bf16(), {.directory = dir / "amax", .recipe = recipe, .threads = 2});
        const Comparison mse = against(dir / "mse", demo_bf16()), amax = against(dir / "amax", demo_bf16());
        double sum_mse = 0, sum_amax = 0;
        for (const ModuleComparison& m : mse.modules) {
            if (m.format != "NVFP4") continue;
            const double other = of(amax, m.name).error.squared_error;
            CHECK(m.error.squared_error < other);
            sum_mse += m.error.squared_error;
            sum_amax += other;
        }
        MESSAGE("squared error of mse over amax: " << sum_mse / sum_amax);
        CHECK(sum_mse < 0.85 * sum_amax);
    }

    TEST_CASE("write: the same bytes from run to run, on any number of threads, in any number of files") {
        const TempDir dir;
        std::optional<std::map<std::string, std::string>> first;
        for (const int threads : {1, 2, 7}) {
            const std::string out = dir / fmt::format("out{}", threads);
            write(demo_bf16(),
                  {.directory = out, .recipe = "fp8-head", .shard_bytes = 3'000'000, .threads = threads});
            const auto now = contents(out);
            CHECK(now.size() > 8);
            CHECK(now.contains("model.safetensors.index.json"));
            CHECK(now.contains("tokenizer.json"));
            CHECK(now.contains("chat_template.jinja"));
            if (!first) first = now;
            CHECK(now == *first);
        }
        write(demo_bf16(), {.directory = dir / "one", .recipe = "fp8-head", .threads = 2});
        CHECK(contents(dir / "one").contains("model.safetensors"));
        for (const ModuleComparison& m : against(dir / "one", dir / "out1").modules)
            CHECK(m.error.different == 0);
    }

    TEST_CASE(
        "write: killed at any moment, it is absent, continuable or complete, and ends in the same bytes") {
        const TempDir dir;
        const std::string out = dir / "out", expected = dir / "expected";
        write(demo_bf16(), {.directory = expected, .recipe = "aeon", .shard_bytes = 1'000'000, .threads = 2});
        const std::vector<std::string> command = {
            QUERN_BINARY, "quantize-inspect", "-m",    demo_bf16(), "--write", out, "--recipe",
            "aeon",       "--shard-size",     "0.001", "-t",        "2"};
        int kills = 0, status = -1;
        for (int delay = 5; delay < 100000; delay = delay * 5 / 4 + 1) {
            const pid_t pid = start(command);
            for (int waited = 0; waited < delay && waitpid(pid, &status, WNOHANG) == 0; ++waited)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status)) ++kills;
            if (fs::exists(out)) CHECK(Inspection(out, ReadMode::values).clean());
            if (WIFEXITED(status)) break;
            if (kills == 6) {  // a finished file is damaged meanwhile
                for (const auto& entry : fs::directory_iterator(out + ".partial/files"))
                    if (entry.path().extension() == ".safetensors") {
                        std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
                        file.seekp(-7, std::ios::end);
                        file.put('\x5a');
                        break;
                    }
            }
        }
        MESSAGE(kills << " kills");
        CHECK(kills >= 5);
        CHECK(WEXITSTATUS(status) == 0);
        CHECK(contents(out) == contents(expected));
        CHECK(!fs::exists(out + ".partial"));
    }

    TEST_CASE("write: an end that was interrupted is ended, by the same command only") {
        const TempDir dir;
        const std::string source = parity("base/bf16"), out = dir / "out", partial = out + ".partial";
        const auto again = [&](const std::string& recipe) {
            return usage_error([&] { write(source, {.directory = out, .recipe = recipe}); });
        };
        write(source, {.directory = out, .recipe = "aeon"});
        fs::create_directory(partial);
        CHECK(again("aeon") == "<no error>");
        CHECK(!fs::exists(partial));
        dir.write("out.partial/job", "another\n");
        CHECK(contains(again("aeon"), "it exists already"));
        CHECK(Inspection(out, ReadMode::values).clean());
    }

    TEST_CASE("write: what is there already, what is the source, and what was begun otherwise are refused") {
        const TempDir dir;
        const std::string source = parity("base/bf16"), out = dir / "out";
        const auto error = [&](const WriteWish& wish) { return usage_error([&] { write(source, wish); }); };
        CHECK(contains(error({.directory = source, .recipe = "aeon"}), "that is the source itself"));
        CHECK(contains(error({.directory = source + "/../bf16/", .recipe = "aeon"}),
                       "that is the source itself"));
        CHECK(contains(error({.directory = dir / "no/where", .recipe = "aeon"}), "is no directory"));
        fs::create_directory(out);
        CHECK(contains(error({.directory = out, .recipe = "aeon"}), "it exists already"));
        fs::remove(out);
        dir.write("out.partial/precious.txt", "mine");
        CHECK(
            contains(error({.directory = out, .recipe = "aeon"}), "was not left by an interrupted --write"));
        CHECK(fs::exists(out + ".partial/precious.txt"));
        fs::remove_all(out + ".partial");
        dir.write("out.partial/job", "another job\n");
        dir.write("out.partial/lock", "");
        CHECK(contains(error({.directory = out, .recipe = "aeon"}),
                       "another source, recipe, format or version"));
        fs::remove_all(out + ".partial");
        write(source, {.directory = out, .recipe = "aeon"});
        CHECK(contains(error({.directory = out, .recipe = "aeon"}), "it exists already"));
        CHECK(contains(usage_error([&] {
                           write(out, {.directory = dir / "b",
                                       .recipe = "xs",
                                       .format = CheckpointFormat::compressed_tensors});
                       }),
                       "<no error>"));  // NVFP4 stays, the DeltaNet is added
        CHECK(contains(usage_error([&] { write(out, {.directory = dir / "c"}); }), "nothing to write"));
        const std::string fp8 = dir.write("fp8.json", R"({"roles": {"experts": "fp8"}})");
        CHECK(contains(usage_error([&] { write(out, {.directory = dir / "c", .recipe = fp8}); }),
                       "start from the BF16 original"));
    }

    TEST_CASE(
        "write: weights that are no numbers are refused, and a full disk leaves a run that can be "
        "continued") {
        CheckpointCopy copy("base/bf16");
        std::string& data = copy.weights.at("model.language_model.layers.3.mlp.experts.down_proj").data;
        data[data.size() / 2 + 1] = '\x7f';
        data[data.size() / 2] = '\xc0';
        copy.write();
        const TempDir dir;
        const std::string message =
            test::model_error([&] { write(copy.dir.str(), {.directory = dir / "out", .recipe = "aeon"}); });
        CHECK(contains(message, "down_proj: a weight is NaN or infinite"));
        CHECK(!fs::exists(dir / "out"));

        const std::string big = dir / "big";
        const std::string command = "-m " + demo_bf16() + " --shard-size 0.004 --write " + big;
        std::string text;  // files of at most 1 MB stand for the full disk
        std::FILE* pipe = popen(
            ("trap '' XFSZ; ulimit -f 2000; " QUERN_BINARY " quantize-inspect " + command + " 2>&1").c_str(),
            "r");
        REQUIRE(pipe != nullptr);
        char buffer[4096];
        while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
        const int status = pclose(pipe);
        CHECK(WEXITSTATUS(status) == 1);
        CHECK_MESSAGE(contains(text, "cannot write"), text);
        CHECK(!fs::exists(big));
        CHECK(shell(command) == 0);
        CHECK(Inspection(big, ReadMode::values).clean());
    }

    TEST_CASE(
        "write: compressed-tensors to ModelOpt and back gives the same bytes, and the same weights in "
        "between") {
        for (const char* name :
             {"base/ct", "deep/ct", "vision_mtp/ct", "mixed/ct_mixed", "real_heads/ct_fp8_head"}) {
            CAPTURE(name);
            const TempDir dir;
            const WriteReport there =
                write(parity(name), {.directory = dir / "mo", .format = CheckpointFormat::modelopt});
            CHECK(there.converted > 0);
            CHECK(there.inexact == 0);
            for (const ModuleComparison& m : against(dir / "mo", parity(name)).modules)
                CHECK(m.error.different == 0);
            CHECK(Inspection(dir / "mo", ReadMode::values).clean());
            write(dir / "mo", {.directory = dir / "ct"});
            const Checkpoint before = Checkpoint::open(parity(name)), after = Checkpoint::open(dir / "ct");
            REQUIRE(before.tensors().size() == after.tensors().size());
            for (const CheckpointTensor& t : before.tensors()) {
                CAPTURE(t.name);
                const uint32_t at = after.find(t.name);
                REQUIRE(at != Checkpoint::kNone);
                const SafeTensor& other = *after.tensors()[at].tensor;
                CHECK(describe(other) == describe(*t.tensor));
                CHECK(std::equal(t.tensor->data, t.tensor->data + t.tensor->bytes(), other.data));
            }
        }
    }

    TEST_CASE("write: ModelOpt to compressed-tensors and back gives the same bytes") {
        for (const char* name :
             {"base/modelopt", "deep/modelopt", "mixed/modelopt_mixed", "odd_pattern/modelopt_xs"}) {
            CAPTURE(name);
            const TempDir dir;
            const WriteReport there = write(parity(name), {.directory = dir / "ct"});
            const Comparison c = against(dir / "ct", parity(name));
            CHECK(c.clean());
            int64_t different = 0;
            for (const ModuleComparison& m : c.modules) {
                different += m.error.different > 0;
                CHECK(m.error.relative_rms() <= std::pow(2.0, -23));
            }
            CHECK(different <= there.inexact);
            write(dir / "ct", {.directory = dir / "mo", .format = CheckpointFormat::modelopt});
            const Checkpoint before = Checkpoint::open(parity(name)), after = Checkpoint::open(dir / "mo");
            REQUIRE(before.tensors().size() == after.tensors().size());
            for (const CheckpointTensor& t : before.tensors()) {
                CAPTURE(t.name);
                const SafeTensor& other = *after.tensors()[after.find(t.name)].tensor;
                CHECK(describe(other) == describe(*t.tensor));
                CHECK(std::equal(t.tensor->data, t.tensor->data + t.tensor->bytes(), other.data));
            }
        }
    }

    TEST_CASE("write: from one process at a time, with the exit codes of the others") {
        const TempDir dir;
        const std::string out = dir / "out";
        std::string text;
        CHECK(shell("-m " + parity("base/bf16") + " --write " + out, &text) == 0);
        CHECK(contains(text, "matrices quantized"));
        CHECK(shell("-m " + out + " --audit") == 0);
        CHECK(shell("-m " + out + " --against " + parity("base/bf16")) == 0);
        CHECK(shell("-m " + out + " --against " + parity("deep/bf16")) == 3);
        CHECK(shell("-m " + out + " --write " + out) == 2);
        CHECK(shell("-m " + out + " --write " + dir.str() + "/x --format gguf") == 2);
        CHECK(shell("-m " + dir.str() + "/nothing --write " + dir.str() + "/x") == 3);
        text.clear();
        CHECK(shell("-m " + out + " --against " + parity("base/bf16") + " --json", &text) == 0);
        const nlohmann::json j = nlohmann::json::parse(text);
        CHECK(j["clean"] == true);
        CHECK(j["roles"]["experts"]["snr_db"] > 18);
        CHECK(j["matrices"].size() > 100);
        CHECK(j["matrices"][0]["relative_rms"] >= j["matrices"][5]["relative_rms"]);
    }

    TEST_CASE("against: what no single file shows") {
        const std::string expert = "model.language_model.layers.0.mlp.experts.1.";
        const auto verdict = [&](const std::function<void(SafetensorsWriter&)>& change) {
            CheckpointCopy copy("base/ct");
            change(copy.weights);
            copy.write();
            const Comparison c = against(copy.dir.str(), parity("base/bf16"));
            std::string text;
            for (const ModuleComparison& m : c.modules)
                if (!m.problem.empty()) text += m.name + "\n";
            for (const std::string& p : c.problems) text += p + "\n";
            return text;
        };
        CHECK(verdict([](SafetensorsWriter&) {}) == "");
        CHECK(verdict([&](SafetensorsWriter& w) {
                  for (const char* part : {"weight_packed", "weight_scale", "weight_global_scale"})
                      std::swap(w.at(expert + "gate_proj." + part).data,
                                w.at(expert + "up_proj." + part).data);
              }) == expert + "gate_proj\n" + expert + "up_proj\n");
        CHECK(contains(verdict([&](SafetensorsWriter& w) {
                           std::string& s = w.at(expert + "up_proj.weight_scale").data;
                           std::rotate(s.begin(), s.begin() + 1, s.end());
                       }),
                       expert + "up_proj\n"));
        CHECK(contains(verdict([&](SafetensorsWriter& w) {
                           for (char& byte : w.at(expert + "up_proj.weight_packed").data)
                               byte = static_cast<char>(byte << 4 | (byte >> 4 & 15));
                       }),
                       expert + "up_proj\n"));
        CHECK(contains(
            verdict([](SafetensorsWriter& w) { w.at("model.language_model.norm.weight").data[1] ^= 1; }),
            "model.language_model.norm.weight: relative error"));
        CHECK(contains(verdict([](SafetensorsWriter& w) { w.remove("lm_head.weight"); }), "lm_head: not in"));
    }

    TEST_CASE("against: the numbers are those of the definition") {
        const TempDir a, b;
        const nlohmann::json config = test::read_json(parity("base/bf16/config.json"));
        for (const TempDir* d : {&a, &b}) d->write("config.json", config.dump());
        std::string x, y;
        double error = 0, sum = 0, product = 0, other = 0;
        for (int i = 0; i < 64; ++i) {
            const float u = bf16_to_float(float_to_bf16(std::sin(static_cast<float>(i)))),
                        v = bf16_to_float(float_to_bf16(u * 1.002f + (i == 40)));
            x += test::raw_bytes({float_to_bf16(v)});
            y += test::raw_bytes({float_to_bf16(u)});
            error += std::pow(static_cast<double>(v - u), 2);
            sum += std::pow(static_cast<double>(u), 2);
            other += std::pow(static_cast<double>(v), 2);
            product += static_cast<double>(u) * static_cast<double>(v);
        }
        a.write("model.safetensors", SafetensorsWriter().add("lm_head.weight", "BF16", {2, 32}, x).bytes());
        b.write("model.safetensors", SafetensorsWriter().add("lm_head.weight", "BF16", {2, 32}, y).bytes());
        const Comparison c = against(a.str(), b.str());
        REQUIRE(c.modules.size() == 1);
        const MatrixError& e = c.modules[0].error;
        CHECK(e.relative_rms() == doctest::Approx(std::sqrt(error / sum)));
        CHECK(e.snr_db() == doctest::Approx(10 * std::log10(sum / error)));
        CHECK(e.cosine() == doctest::Approx(product / std::sqrt(sum * other)));
        CHECK(e.largest == doctest::Approx(1).epsilon(0.02));
        CHECK(c.modules[0].worst.at(0).row == 1);
        CHECK(c.modules[0].worst.at(0).block == 0);
        CHECK(!c.clean());
    }
}

TEST_SUITE("model") {
    TEST_CASE("write: the written demo answers like its source") {
        const TempDir dir;
        const std::vector<float> source = logits(demo_bf16());
        for (const std::string recipe : {"aeon", "xs", "fp8-head"}) {
            for (const CheckpointFormat format :
                 {CheckpointFormat::compressed_tensors, CheckpointFormat::modelopt}) {
                const std::string out = dir / fmt::format("{}-{}", recipe, format_name(format));
                write(demo_bf16(), {.directory = out, .recipe = recipe, .format = format, .threads = 2});
                const double difference = relative_difference(logits(out), source);
                MESSAGE(recipe << " " << std::string(format_name(format)) << ": logits differ by "
                               << difference);
                CHECK(difference < 0.15);
            }
        }
    }
}

}  // namespace
}  // namespace quern
