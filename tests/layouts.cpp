// Layouts of published checkpoints: the same weights stored in another way are the same model. What they are compared
// with agrees with transformers (tests/parity.cpp).
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "checkpoint_copy.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/one_format.h"
#include "models/qwen3_6_moe.h"
#include "models/tensor_use.h"
#include "models/weight_format.h"
#include "models/weight_placement.h"
#include "ops/second_backend.h"
#include "stacked_experts.h"
#include "tools/engine/engine.h"

namespace quern {
namespace {

using test::CheckpointCopy;
using test::contains;
using test::SafetensorsWriter;
using namespace test::stacked;

struct Answer {
    std::vector<float> logits;  // of all rows of the prompt
    std::vector<int32_t> tokens;
    std::vector<std::string> notes;
};

Answer answer_of(const CheckpointCopy& copy, std::unique_ptr<Backend> backend = make_cpu_backend(2)) {
    copy.write();
    const auto model = load_model(copy.dir.str(), *backend, {.tokenizer = false});
    Answer out{.notes = model->notes()};
    Request request;
    for (int32_t i = 0; i < 24; ++i) request.prompt.push_back(i * 37 % 96);
    request.sampling.temperature = 0;
    request.max_tokens = 8;
    request.on_prompt_logits = [&](const PromptLogits& logits) {
        for (size_t i = 0; i < logits.count(); ++i)
            out.logits.insert(out.logits.end(), logits.row(i).begin(), logits.row(i).end());
    };
    Engine engine(*model, *backend, {.step_tokens = 64});
    out.tokens = engine.run(std::move(request)).tokens;
    return out;
}

double error(const Answer& a, const Answer& b) {
    REQUIRE(a.logits.size() == b.logits.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < a.logits.size(); ++i) {
        difference += std::pow(static_cast<double>(a.logits[i]) - b.logits[i], 2);
        norm += std::pow(static_cast<double>(b.logits[i]), 2);
    }
    return std::sqrt(difference / norm);
}

/// Of the rows: a routing choice that flips spoils one of them.
double median_error(const Answer& a, const Answer& b, size_t rows = 24) {
    std::vector<double> errors;
    const size_t width = a.logits.size() / rows;
    for (size_t r = 0; r < rows; ++r) {
        const auto row = [&](const Answer& x) {
            const auto begin = x.logits.begin() + static_cast<std::ptrdiff_t>(r * width);
            return Answer{.logits = {begin, begin + static_cast<std::ptrdiff_t>(width)}};
        };
        errors.push_back(error(row(a), row(b)));
    }
    std::sort(errors.begin(), errors.end());
    return errors[rows / 2];
}

bool has_note(const Answer& a, const std::string& part) {
    for (const std::string& note : a.notes)
        if (contains(note, part)) return true;
    return false;
}

/// `change` turns one checkpoint into another one of the same weights.
Answer after(const std::function<void(CheckpointCopy&)>& change, const std::string& name = "base/ct") {
    CheckpointCopy copy(name);
    change(copy);
    return answer_of(copy);
}

/// The matrix in F32, decoded by its definition.
void decode(CheckpointCopy& copy, const std::string& module, int64_t rows, int64_t cols) {
    copy.write();
    const Checkpoint checkpoint = Checkpoint::open(copy.dir.str());
    TensorUse use(checkpoint);
    const WeightSegment segment = read_linear(checkpoint, module, rows, cols, use);
    std::string data(static_cast<size_t>(rows * cols) * sizeof(float), '\0');
    for (int64_t r = 0; r < rows; ++r)
        dequantize_row(segment, r, reinterpret_cast<float*>(data.data()) + r * cols);
    for (const char* suffix :
         {".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"})
        copy.weights.remove(module + suffix);
    copy.weights.add(module + ".weight", "F32", {rows, cols}, data);
}

/// Gate beside another up, an expert beside others, in three layers.
void mix_experts(CheckpointCopy& c) {
    decode(c, experts_of(0) + "3.up_proj", 16, 32);
    for (const char* part : {"gate_proj", "up_proj"}) decode(c, experts_of(1) + "5." + part, 16, 32);
    decode(c, experts_of(2) + "0.down_proj", 32, 16);
}

/// The same of a dense model, whose MLP is [rows, 32].
void mix_mlp(CheckpointCopy& c) {
    decode(c, kPrefix + "0.mlp.up_proj", c.config["text_config"]["intermediate_size"], 32);
}

std::vector<KvScales> kv_scales_of(const CheckpointCopy& copy, std::vector<std::string>& notes) {
    copy.write();
    const Checkpoint checkpoint = Checkpoint::open(copy.dir.str());
    TensorUse use(checkpoint);
    const auto config = parse_qwen3_6_moe_config(checkpoint.config(), "config.json");
    const Qwen36MoeWeights weights = read_qwen3_6_moe_weights(checkpoint, config, use, 2);
    const Audit audit = use.audit();
    CHECK(audit.ok());
    notes = audit.notes;
    std::vector<KvScales> out;
    for (const LayerWeights& layer : weights.layers)
        if (layer.attention.in_proj) out.push_back(layer.attention.kv_scales);
    return out;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("layouts: NVFP4 experts stacked in one tensor, with a global scale for each") {
        const Answer single = after([](CheckpointCopy&) {});
        const Answer stacked = after([](CheckpointCopy& c) { stack(c.weights, false); });
        CHECK(stacked.logits == single.logits);
        CHECK(stacked.tokens == single.tokens);
    }

    TEST_CASE("layouts: FP8 experts stacked in one parameter") {
        const auto form = [](bool stacked) {
            return [stacked](CheckpointCopy& c) { stack_fp8(c.weights, stacked); };
        };
        const Answer single = after(form(false), "real_heads/fp8_block");
        const Answer stacked = after(form(true), "real_heads/fp8_block");
        CHECK(stacked.logits == single.logits);
        CHECK(stacked.tokens == single.tokens);
        CHECK(stacked.notes == single.notes);
    }

    TEST_CASE("layouts: stacked NVFP4 experts are inspected and compared") {
        CheckpointCopy copy("base/ct");
        stack(copy.weights, false);
        copy.write();
        const std::string directory = copy.dir.str();
        CHECK(test::inspect_exit_code("--audit " + directory) == 0);
        std::string health;
        CHECK(test::inspect_exit_code("--health " + directory, &health) == 0);
        const std::string original = test::source_dir() + "/tests/vectors/parity/base/";
        CHECK(test::inspect_exit_code("--against " + original + "bf16 " + directory) == 0);
        CHECK(test::inspect_exit_code("--against " + directory + " " + original + "ct") == 0);
        // Gate and up of one expert exchanged.
        std::string& codes = copy.weights.at(experts_of(2) + "gate_up_proj.weight_packed").data;
        std::rotate(codes.begin() + 6 * 512, codes.begin() + 6 * 512 + 256, codes.begin() + 7 * 512);
        copy.write();
        std::string said;
        CHECK(test::inspect_exit_code("--against " + original + "bf16 " + directory, &said) == 3);
        CHECK(contains(said, experts_of(2) + "6.gate_proj"));
        CHECK(!contains(said, experts_of(2) + "7.gate_proj: relative"));
        // A global scale that cannot be right, of one expert.
        auto& globals = copy.weights.at(experts_of(0) + "down_proj.weight_global_scale").data;
        globals.replace(5 * sizeof(float), sizeof(float), test::f32_bytes(1e-5f));
        copy.write();
        health.clear();
        CHECK(test::inspect_exit_code("--health " + directory, &health) == 3);
        CHECK(contains(health, "down_proj[5]"));
    }

    TEST_CASE("layouts: NVFP4 experts stacked in one tensor, with one global scale a layer") {
        const auto level_all = [](CheckpointCopy& c) {
            for (int layer = 0; layer < kLayers; ++layer)
                level(c.weights, layer, ".weight_global_scale", true);
        };
        const Answer single = after(level_all);
        const Answer stacked = after([&](CheckpointCopy& c) {
            level_all(c);
            stack(c.weights, true);
        });
        CHECK(stacked.logits == single.logits);
        CHECK(single.logits != after([](CheckpointCopy&) {}).logits);
    }

    TEST_CASE("layouts: gate and up, and the experts of a layer, in different formats") {
        const Answer stored = after([](CheckpointCopy&) {});
        const Answer mixed = after(mix_experts);
        CHECK(error(mixed, stored) < 1e-6);
        CHECK(mixed.tokens == stored.tokens);
        const Answer whole = after([](CheckpointCopy&) {}, "dense/ct");
        CHECK(error(after(mix_mlp, "dense/ct"), whole) < 1e-6);
    }

    TEST_CASE("one format: what kernels read together, else BF16 of each weight") {
        CheckpointCopy copy("base/ct");
        mix_experts(copy);
        copy.write();
        const auto model = open_model(copy.dir.str(), {.tokenizer = false});
        int mixed = 0, weights = 0;
        for (const WeightUse& use : model->weights().uses) {
            if (use.experts == nullptr || one_format(*use.experts)) continue;
            ++mixed;
            const InBf16<ExpertWeights> same = to_bf16(*use.experts, 2);
            CHECK(one_format(same.form));
            std::vector<float> expected(static_cast<size_t>(use.experts->cols)), found(expected.size());
            for (size_t e = 0; e < same.form.expert.size(); ++e)
                for (int64_t r = 0; r < use.experts->rows; ++r) {
                    dequantize_row(use.experts->expert[e], r, expected.data());
                    dequantize_row(same.form.expert[e], r, found.data());
                    for (size_t i = 0; i < found.size(); ++i, ++weights)
                        REQUIRE(found[i] == bf16_to_float(float_to_bf16(expected[i])));
                }
        }
        CHECK(mixed == 3);  // gate and up of layers 0 and 1, down of layer 2
        CHECK(weights == 2 * 8 * 32 * 32 + 8 * 32 * 16);
    }

    TEST_CASE("layouts: what is not read may have any dtype, and scales of a KV cache any form") {
        const Answer plain = after([](CheckpointCopy&) {});
        const Answer more = after([](CheckpointCopy& c) {
            c.weights.fill("mtp.layers.0.mlp.gate_proj.weight_scale", "F8_E8M0", {4, 2}, 8);
            c.weights.fill("mtp.layers.0.mlp.gate_proj.weight", "F4", {4, 64}, 128);
            c.weights.fill("model.visual.unheard_of.weight", "I3_K", {3, 5}, 7);
            c.weights.fill(kPrefix + "3.self_attn.q_scale", "F8_E8M0", {9}, 9);
            c.weights.fill(kPrefix + "3.self_attn.k_scale", "I32", {1}, 4);
        });
        CHECK(more.logits == plain.logits);
        // A tensor of the model itself has to be one that quern reads.
        CheckpointCopy bad("base/ct");
        bad.weights.at(kPrefix + "0.mlp.gate.weight").dtype = "MX9";
        bad.write();
        const auto backend = make_cpu_backend(1);
        const std::string message =
            test::model_error([&] { load_model(bad.dir.str(), *backend, {.tokenizer = false}); });
        CHECK(contains(message, "mlp.gate.weight"));
        CHECK(contains(message, "found [8, 32] MX9"));
    }

    TEST_CASE("layouts: what is not read is written as it is, whatever its dtype") {
        CheckpointCopy copy("base/bf16");
        copy.weights.add("mtp.norm.unheard_of", "I3_K", {3, 5}, "abcdefg");
        copy.weights.add("mtp.norm.half_bytes", "F4", {2, 3}, "xyz");
        copy.write();
        const std::string written = copy.dir / "written";
        std::string said;
        CHECK_MESSAGE(test::inspect_exit_code("--write " + written + " " + copy.dir.str(), &said) == 0, said);
        const Checkpoint checkpoint = Checkpoint::open(written);
        for (const auto& [name, text, data] : {std::tuple("mtp.norm.unheard_of", "[3, 5] I3_K", "abcdefg"),
                                               std::tuple("mtp.norm.half_bytes", "[2, 3] F4", "xyz")}) {
            const uint32_t i = checkpoint.find(name);
            REQUIRE(i != Checkpoint::kNone);
            const SafeTensor& t = *checkpoint.tensors()[i].tensor;
            CHECK(describe(t) == text);
            CHECK(std::string_view(reinterpret_cast<const char*>(t.data), t.bytes()) == data);
        }
    }

    TEST_CASE("layouts: scales of keys and values are kept with their layer") {
        CheckpointCopy copy("base/ct");
        const std::string attention = kPrefix + "3.self_attn.";  // the only one of base; it has 2 kv heads
        std::vector<std::string> notes;
        CHECK(kv_scales_of(copy, notes).at(0).k.empty());
        copy.weights.bf16(attention + "k_scale", {1}, 0x3f00);  // 0.5
        copy.weights.add(attention + "v_scale", "F32", {2, 1, 1},
                         test::f32_bytes(0.25f) + test::f32_bytes(3));
        copy.weights.bf16(attention + "q_scale", {1});
        const KvScales both = kv_scales_of(copy, notes).at(0);
        CHECK(both.k == std::vector<float>{0.5f});
        CHECK(both.v == std::vector<float>{0.25f, 3.0f});
        CHECK(notes.empty());
        // ModelOpt's names; a scale of zero is left out.
        copy.weights.remove(attention + "k_scale").remove(attention + "v_scale");
        copy.weights.add(attention + "k_proj.k_scale", "F32", {}, test::f32_bytes(0.75f));
        copy.weights.add(attention + "v_proj.v_scale", "F32", {}, test::f32_bytes(0));
        const KvScales modelopt = kv_scales_of(copy, notes).at(0);
        CHECK(modelopt.k == std::vector<float>{0.75f});
        CHECK(modelopt.v.empty());
        REQUIRE(notes.size() == 1);
        CHECK(contains(notes[0], "v_proj.v_scale': expected positive numbers, found 0"));
    }

    TEST_CASE("layouts: a head of its own wins over a tie, as in the reference") {
        const Answer untied = after([](CheckpointCopy&) {});
        const Answer tied = after([](CheckpointCopy& c) {
            c.config["tie_word_embeddings"] = true;
            c.config["text_config"]["tie_word_embeddings"] = true;
        });
        CHECK(tied.logits == untied.logits);
        CHECK(has_note(tied, "tie_word_embeddings is true, but the checkpoint has an lm_head of its own"));
        CHECK_FALSE(has_note(untied, "tie_word_embeddings"));
    }

    TEST_CASE("layouts: auto-round's checkpoints are read by their tensors") {
        const Answer plain = after([](CheckpointCopy&) {});
        const Answer auto_round = after([](CheckpointCopy& c) {
            c.config["quantization_config"] = {{"quant_method", "auto-round"},
                                               {"packing_format", "auto_round:llm_compressor"},
                                               {"data_type", "nv_fp"},
                                               {"bits", 4},
                                               {"group_size", 16},
                                               {"autoround_version", "0.9.2"}};
        });
        CHECK(auto_round.logits == plain.logits);
        CHECK(auto_round.notes == plain.notes);
    }

    TEST_CASE("layouts: global scales in BF16") {
        const auto narrow = [](CheckpointCopy& c, bool stored) {  // the value that BF16 has for it
            for (auto& e : c.weights.entries) {
                if (!e.name.ends_with(".weight_global_scale")) continue;
                const std::string upper = e.data.substr(2);
                e.data = stored ? upper : std::string(2, '\0') + upper;
                if (stored) e.dtype = "BF16";
            }
        };
        const Answer f32 = after([&](CheckpointCopy& c) { narrow(c, false); });
        const Answer bf16 = after([&](CheckpointCopy& c) { narrow(c, true); });
        CHECK(bf16.logits == f32.logits);
    }

    TEST_CASE("layouts: any number of experts, as of pruned models") {
        // Expert n becomes the experts that `numbers` lists for it, with its row of the router.
        const auto renumber = [](CheckpointCopy& c, const std::vector<int>& sources, int used) {
            SafetensorsWriter out;
            for (const auto& e : c.weights.entries) {
                const size_t digit = e.name.find(".mlp.experts.") + 13;
                if (e.name.find(".mlp.experts.") == std::string::npos) {
                    out.entries.push_back(e);
                    continue;
                }
                for (size_t to = 0; to < sources.size(); ++to) {
                    if (sources[to] != e.name[digit] - '0') continue;
                    out.entries.push_back(e);
                    out.entries.back().name.replace(digit, 1, std::to_string(to));
                }
            }
            for (int layer = 0; layer < kLayers; ++layer) {
                auto& router = out.at(fmt::format("{}{}.mlp.gate.weight", kPrefix, layer));
                const size_t row = router.data.size() / kExperts;
                std::string rows;
                for (const int e : sources) rows += router.data.substr(static_cast<size_t>(e) * row, row);
                router.data = rows;
                router.shape[0] = static_cast<int64_t>(sources.size());
            }
            c.weights = out;
            c.config["text_config"]["num_experts"] = sources.size();
            c.config["text_config"]["num_experts_per_tok"] = used;
        };
        // Copies share the weight of the one that they are copies of, so three of each are the same model.
        const std::vector<int> kept = {1, 2, 4, 6, 7};
        std::vector<int> copies;
        for (int i = 0; i < 15; ++i) copies.push_back(kept[static_cast<size_t>(i * 7 % 5)]);
        const Answer pruned = after([&](CheckpointCopy& c) { renumber(c, kept, 2); });
        const Answer tripled = after([&](CheckpointCopy& c) { renumber(c, copies, 6); });
        CHECK(error(tripled, pruned) < 1e-5);
        CHECK(tripled.tokens == pruned.tokens);
        CHECK(error(pruned, after([](CheckpointCopy&) {})) > 1e-3);  // another model than the whole one
        std::vector<int> reap(180);
        for (size_t i = 0; i < reap.size(); ++i) reap[i] = kept[i % kept.size()];
        const Answer many = after([&](CheckpointCopy& c) { renumber(c, reap, 72); });
        CHECK(error(many, pruned) < 1e-5);
    }
}

TEST_SUITE("cuda") {
    // The GPU rounds activations to BF16, so what it may be off is what it is off for the layout as it was.
    TEST_CASE("gpu model: layouts that the kernels cannot read as they are stored") {
        const auto off = [](const std::function<void(CheckpointCopy&)>& change, const std::string& name) {
            CheckpointCopy copy(name);
            change(copy);
            const Answer cpu = answer_of(copy), gpu = answer_of(copy, test::make_test_cuda_backend());
            return median_error(gpu, cpu);
        };
        const auto as_it_is = [](CheckpointCopy&) {};
        const double experts = off(as_it_is, "base/ct"), mlp = off(as_it_is, "dense/ct");
        CHECK(experts < 0.1);
        CHECK(mlp < 0.03);
        CHECK(off(mix_experts, "base/ct") < 1.5 * experts);
        CHECK(off(mix_mlp, "dense/ct") < 1.5 * mlp);
        CHECK(off([](CheckpointCopy& c) { stack(c.weights, false); }, "base/ct") == experts);
    }
}

}  // namespace quern
