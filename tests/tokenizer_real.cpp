// The tokenizer of Qwen3.5 and Qwen3.6 at its real size: 248,077 tokens, in both spellings of its files. It is made by
// make_qwen35_tokenizer.py of the folder `shared` beside this repository; without that folder these tests are skipped.
#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "checkpoint_copy.h"
#include "models/python_text.h"
#include "models/weight_placement.h"
#include "tokenizer_cases.h"
#include "tools/engine/engine.h"

namespace quern {
namespace {

using test::CheckpointCopy;
using test::Ids;
using test::json;
using test::Markers;
using test::read_text;

const std::string kCases = QUERN_SOURCE_DIR "/tests/vectors/tokenizer_real";
constexpr int64_t kTokens = 248077, kRows = 248320;

/// The directory with the files, made once; empty where they cannot be made, with a message.
const std::string& real_files() {
    static const test::TempDir directory;
    static const std::string path = [] {
        const std::string script = QUERN_SOURCE_DIR "/../shared/data/make_qwen35_tokenizer.py";
        if (!std::filesystem::exists(script)) {
            MESSAGE("skipped: there is no " << script);
            return std::string();
        }
        const std::string command = "python3 '" + script + "' '" + directory.str() + "' --check > /dev/null";
        REQUIRE(std::system(command.c_str()) == 0);
        return directory.str();
    }();
    return path;
}

double best_load(const std::string& directory, int threads) {
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
        const auto start = std::chrono::steady_clock::now();
        CHECK(Tokenizer::load(directory, kRows, threads).size() == kTokens);
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        best = std::min(best, taken.count());
    }
    return best;
}

/// As transformers 5 saves it: all added tokens in tokenizer.json, none in its config; indented, 20 MB. `lines`: merges
/// as "a b".
void save_again(const std::string& from, const std::string& to, bool lines) {
    nlohmann::ordered_json root = *parse_ordered_json(read_text(from + "/tokenizer.json"));
    nlohmann::ordered_json config = *parse_ordered_json(read_text(from + "/tokenizer_config.json"));
    if (lines)
        for (auto& merge : root["model"]["merges"])
            merge = merge[0].get<std::string>() + " " + merge[1].get<std::string>();
    for (const auto& [id, token] : config["added_tokens_decoder"].items()) {
        if (std::stoi(id) < kTokens - 7) continue;  // these are there already
        root["added_tokens"].push_back(token);
        root["added_tokens"].back()["id"] = std::stoi(id);
    }
    config.erase("added_tokens_decoder");
    config["tokenizer_class"] = "TokenizersBackend";
    std::ofstream(to + "/tokenizer.json", std::ios::binary) << root.dump(2);
    std::ofstream(to + "/tokenizer_config.json", std::ios::binary) << config.dump();
}

/// A tensor of kRows rows in BF16; `bits(row)` is what each of a row's 32 values has.
template <typename F>
void widen(test::SafetensorsWriter& w, const std::string& name, F&& bits) {
    auto& entry = w.at(name);
    entry.dtype = "BF16";
    entry.shape = {kRows, 32};
    entry.data.clear();
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t col = 0; col < 32; ++col)
            entry.data += test::raw_bytes({static_cast<uint16_t>(bits(row, col))});
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("tokenizer: the real vocabulary encodes as the reference does") {
        if (real_files().empty()) return;
        const Tokenizer t = Tokenizer::load(real_files(), kRows, 2);
        CHECK(t.size() == kTokens);
        const test::Tally tally = test::compare_cases(t, kCases);
        CHECK(tally.compared() > 3000);
        CHECK(tally.mismatches() == 0);
        // As published for the real files, which have the same ids up to 104,268.
        const std::pair<const char*, Ids> published[] = {
            {"Hello, world!", {9419, 11, 1814, 0}},
            {"The capital of France is", {760, 6511, 314, 9338, 369}},
            {"1234567", {16, 17, 18, 19, 20, 21, 22}},
            {"\r\n\r\n", {845}},
            {"\u00e9", {933}},
            {"e\u0301", {933}},
            {"\nassistant", {198, 74455}},
            {"user", {846}},
            {"system", {8678}},
        };
        for (const auto& [text, ids] : published) {
            const auto& this_text = text;
            CAPTURE(this_text);
            CHECK(t.encode(text, Markers::literal) == ids);
        }
        CHECK(t.encode("<think>easy</think>4", Markers::control) == Ids{248068, 43518, 248069, 19});
        for (const auto& [text, id] : {std::pair("<|endoftext|>", 248044),
                                       {"<|im_end|>", 248046},
                                       {"<tool_call>", 248058},
                                       {"<|fim_prefix|>", 248060},
                                       {"<tool_response>", 248066},
                                       {"<|audio_pad|>", 248076}})
            CHECK(t.find_added(text) == id);
    }

    TEST_CASE("tokenizer: both families of real files are the same tokenizer") {
        if (real_files().empty()) return;
        const Tokenizer original = Tokenizer::load(real_files(), kRows, 2);
        const std::string text = read_text(kCases + "/cases.json");
        const Ids expected = original.encode(text, Markers::control);
        for (const bool lines : {true, false}) {
            const test::TempDir directory;
            save_again(real_files(), directory.str(), lines);
            const Tokenizer t = Tokenizer::load(directory.str(), kRows, 2);
            CHECK(t.size() == kTokens);
            CHECK(t.encode(text, Markers::control) == expected);
            CHECK(t.is_special(248076));
            CHECK_FALSE(t.is_special(248068));
        }
    }

    TEST_CASE("tokenizer: rows beyond the real vocabulary are never sampled") {
        if (real_files().empty()) return;
        CheckpointCopy copy("base/bf16");
        std::minstd_rand random(1);
        const auto small = [&](int64_t, int64_t) { return 0x3c00 | (random() & 0x80ff); };  // about 0.01
        // The head is far larger in the rows that no token has, with both signs: one of them is the likeliest.
        const auto head = [&](int64_t row, int64_t col) {
            if (row < kTokens) return small(row, col);
            return decltype(small(row, col))(0x4200 | ((row >> col % 8 & 1) << 15));
        };
        widen(copy.weights, "model.language_model.embed_tokens.weight", small);
        widen(copy.weights, "lm_head.weight", head);
        copy.config["text_config"]["vocab_size"] = kRows;
        copy.write();
        for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
            std::filesystem::create_symlink(real_files() + "/" + name, copy.dir / name);
        const auto backend = make_cpu_backend(2);
        const auto model = load_model(copy.dir.str(), *backend, {.tokenizer = true});
        CHECK(model->info().vocab == kTokens);
        CHECK(model->info().vocab_rows == kRows);
        Engine engine(*model, *backend, {.step_tokens = 64});
        for (const float temperature : {0.0f, 1.0f}) {
            Request request;
            request.prompt = {760, 6511, 314, 9338, 369};
            request.sampling.temperature = temperature;
            request.max_tokens = 6;
            bool outside_is_likeliest = true;
            request.on_logits = [&](int32_t, std::span<const float> row) {
                const auto best = std::max_element(row.begin(), row.end()) - row.begin();
                outside_is_likeliest = outside_is_likeliest && best >= kTokens;
            };
            const Result result = engine.run(std::move(request));
            CHECK(result.tokens.size() == 6);
            CHECK(outside_is_likeliest);
            for (const int32_t id : result.tokens) CHECK(id < kTokens);
        }
    }
}

TEST_SUITE("perf") {
    TEST_CASE("tokenizer: the real files load in 0.15 s") {
        if (real_files().empty()) return;
        const test::TempDir indented;
        save_again(real_files(), indented.str(), false);
        for (const std::string& directory : {real_files(), indented.str()}) {
            const double megabytes =
                static_cast<double>(std::filesystem::file_size(directory + "/tokenizer.json")) / 1e6;
            for (const int threads : {1, 2}) {
                const double seconds = best_load(directory, threads);
                MESSAGE("tokenizer.json of " << megabytes << " MB, " << threads << " threads: " << seconds
                                             << " s");
                CHECK(seconds < 0.15);
            }
        }
    }
}

}  // namespace quern
