// --dense: requantizing at load, what it costs, and what is refused.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/requantize.h"
#include "ggml-like/safetensors.h"
#include "tools/common/loading.h"
#include "tools/engine/dense_cost.h"
#include "tools/engine/memory_plan.h"
#include "tools/inspect/plan.h"

namespace quern {
namespace {

const std::string kDemo = std::string(QUERN_SOURCE_DIR) + "/models/demo";
const std::string kVectors = std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/";

std::vector<float> random_logits(size_t count, unsigned seed, float scale) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> out(count);
    for (float& x : out) x = normal(random);
    return out;
}

/// KL(p || q) over all tokens, in double precision.
double full_divergence(const std::vector<float>& p, const std::vector<float>& q) {
    const auto log_sum = [](const std::vector<float>& v) {
        double sum = 0;
        for (const float x : v) sum += std::exp(static_cast<double>(x));
        return std::log(sum);
    };
    const double lp = log_sum(p), lq = log_sum(q);
    double kl = 0;
    for (size_t i = 0; i < p.size(); ++i) kl += std::exp(p[i] - lp) * ((p[i] - lp) - (q[i] - lq));
    return kl;
}

/// A matrix of BF16 in memory of its own.
struct Matrix {
    Matrix(int64_t rows, int64_t cols, unsigned seed) {
        for (const float x : random_logits(static_cast<size_t>(rows * cols), seed, 0.02f))
            bits.push_back(float_to_bf16(x));
        WeightSegment s;
        s.name = "w";
        s.rows = rows;
        s.cols = cols;
        s.data = bits.data();
        weight = Weight("w", {s});
    }
    std::vector<uint16_t> bits;
    Weight weight;
};

double relative_error(const Weight& a, const Weight& b) {
    std::vector<float> x(static_cast<size_t>(a.cols)), y(x);
    double difference = 0, norm = 0;
    for (int64_t row = 0; row < a.rows; ++row) {
        dequantize_row(a, row, x.data());
        dequantize_row(b, row, y.data());
        for (size_t i = 0; i < x.size(); ++i) {
            difference += (y[i] - x[i]) * (y[i] - x[i]);
            norm += x[i] * x[i];
        }
    }
    return std::sqrt(difference / norm);
}

Result greedy_answer(Engine& engine, const std::vector<int32_t>& prompt) {
    Request r;
    r.prompt = prompt;
    r.sampling.temperature = 0;
    r.max_tokens = 12;
    return engine.run(std::move(r));
}

std::string message_of(const std::function<void()>& f, ErrorKind kind) {
    try {
        f();
    } catch (const Error& error) {
        CHECK(error.kind() == kind);
        return error.what();
    }
    return {};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The demo checkpoint with a head that many times larger: it is sure of everything, and any rounding turns
/// it over.
void write_sure_demo(const test::TempDir& dir, int doublings) {
    for (const auto& entry : std::filesystem::directory_iterator(kDemo))
        std::filesystem::copy(entry.path(), dir.str() + "/" + entry.path().filename().string());
    const std::string path = dir.str() + "/model.safetensors";
    int64_t begin = 0, bytes = 0;
    {
        const SafetensorsFile file = SafetensorsFile::open(kDemo + "/model.safetensors");
        std::ifstream size_of(path, std::ios::binary | std::ios::ate);
        for (const SafeTensor& t : file.tensors()) {
            if (t.name != "lm_head.weight") continue;
            bytes = static_cast<int64_t>(t.bytes());
            std::string whole(static_cast<size_t>(size_of.tellg()), '\0');
            std::ifstream(path, std::ios::binary)
                .read(whole.data(), static_cast<std::streamsize>(whole.size()));
            begin = static_cast<int64_t>(whole.find(
                std::string_view(reinterpret_cast<const char*>(t.data), static_cast<size_t>(bytes))));
        }
    }
    REQUIRE(bytes > 0);
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    std::vector<uint16_t> head(static_cast<size_t>(bytes / 2));
    file.seekg(begin);
    file.read(reinterpret_cast<char*>(head.data()), bytes);
    for (uint16_t& v : head)
        if ((v & 0x7f80) != 0) v = static_cast<uint16_t>(v + (doublings << 7));
    file.seekp(begin);
    file.write(reinterpret_cast<const char*>(head.data()), bytes);
    REQUIRE(file.good());
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("requantize: FP8 by rows and NVFP4, the same bytes by any number of threads") {
        const Matrix m(70, 272, 1);
        for (const auto& [format, least, most] :
             {std::tuple{DenseFormat::fp8, 0.01, 0.03}, std::tuple{DenseFormat::nvfp4, 0.05, 0.1}}) {
            const auto& this_format = format;
            CAPTURE(std::string(dense_format_name(this_format)));
            REQUIRE(can_requantize(m.weight, format));
            Weight one = requantized_form(m.weight, format), many = one;
            CHECK(one.segments[0].data == nullptr);
            CHECK(one.bytes() < m.weight.bytes() * (format == DenseFormat::fp8 ? 0.51 : 0.3));
            const auto a = requantize(m.weight, one, 1), b = requantize(m.weight, many, 5);
            const auto size = static_cast<size_t>(dtype_bytes(one.segments[0].dtype, 70 * 272));
            CHECK(std::memcmp(one.segments[0].data, many.segments[0].data, size) == 0);
            CHECK(relative_error(one, many) == 0);
            const double error = relative_error(m.weight, one);
            CHECK(error > least);
            CHECK(error < most);
            CHECK(!can_requantize(one, DenseFormat::fp8));  // once is enough
        }
    }

    TEST_CASE("requantize: a row's scale is its own; rows of zeros stay; what is not finite is an error") {
        Matrix m(4, 32, 2);
        for (size_t i = 0; i < 32; ++i) {
            m.bits[i] = float_to_bf16(bf16_to_float(m.bits[i]) * 1e4f);
            m.bits[64 + i] = 0;
        }
        Weight fp8 = requantized_form(m.weight, DenseFormat::fp8);
        const auto memory = requantize(m.weight, fp8, 1);
        std::vector<float> before(32), after(32);
        for (int64_t row = 0; row < 4; ++row) {
            CAPTURE(row);
            dequantize_row(m.weight, row, before.data());
            dequantize_row(fp8, row, after.data());
            for (size_t i = 0; i < 32; ++i)
                CHECK(std::fabs(after[i] - before[i]) <=
                      std::fabs(before[i]) / 16 + 1e-30 + (row == 0 ? 1e-1 : 1e-5));
        }
        m.bits[40] = 0x7f80;  // infinity
        Weight again = requantized_form(m.weight, DenseFormat::nvfp4);
        CHECK(has(message_of([&] { requantize(m.weight, again, 1); }, ErrorKind::model), "NaN or infinite"));
    }

    TEST_CASE("dense cost: the divergence of likely tokens is that of all of them") {
        for (const float scale : {0.5f, 2.0f, 8.0f}) {
            const auto p = random_logits(3000, 3, scale), noise = random_logits(3000, 4, 0.2f);
            std::vector<float> q = p;
            for (size_t i = 0; i < q.size(); ++i) q[i] += noise[i];
            const LikelyTokens likely = likely_tokens(p);
            CHECK(likely.best == std::max_element(p.begin(), p.end()) - p.begin());
            const double full = full_divergence(p, q), coarse = divergence(likely, q);
            CHECK(coarse <= full * (1 + 1e-4));  // merging outcomes can only lose
            CHECK(coarse > full * 0.9);
            CHECK(divergence(likely, p) < 1e-6);
            q[5] = NAN;
            CHECK(std::isinf(divergence(likely, q)));
        }
    }

    TEST_CASE("--dense: the load never holds more than the model as stored, and ends with less") {
        for (const char* checkpoint : {"base/ct", "real_heads/ct", "tied_text/ct"}) {
            CAPTURE(checkpoint);
            test::CountedBackend backend(1ll << 32);
            const auto model =
                open_model(kVectors + checkpoint, {.tokenizer = false, .dense = DenseFormat::fp8});
            const int64_t planned = make_memory_plan(*model, backend, {.context = 64}, false).weight_bytes();
            const int64_t extra = extra_bytes_as_stored(*model, backend);
            place_weights(*model, backend);
            const bool tied = std::string(checkpoint).starts_with("tied");
            CHECK(backend.used == planned + extra);
            CHECK(model->info().dense == DenseFormat::fp8);
            CHECK(has(model->info().formats, "F8_E4M3"));
            const std::vector<int32_t> prompt = {1, 2, 3, 4, 5};
            std::vector<int32_t> before;
            {
                Engine engine(*model, backend, {.context = 64});
                before = greedy_answer(engine, prompt).tokens;
            }
            const int64_t stored = backend.used;
            requantize_weights(*model, backend);
            CHECK(backend.most >= stored);
            CHECK(backend.used == planned);
            if (!tied) CHECK(backend.used < stored);
            Engine engine(*model, backend, {.context = 64});
            const Result after = greedy_answer(engine, prompt);
            CHECK(after.reason == FinishReason::length);
            CHECK(after.tokens.size() == before.size());
            test::CountedBackend plain_backend(1ll << 32);
            const auto plain = load_model(kVectors + checkpoint, plain_backend, {.tokenizer = false});
            CHECK(plain->digest() != model->digest());  // states of one are no good for the other
            Engine plain_engine(*plain, plain_backend, {.context = 64});
            CHECK(greedy_answer(plain_engine, prompt).tokens == before);
        }
    }

    TEST_CASE("--dense: a checkpoint that is quantized already is told so") {
        const auto load = [](const char* checkpoint) {
            test::CountedBackend backend(1ll << 32);
            load_model(kVectors + checkpoint, backend, {.tokenizer = false, .dense = DenseFormat::fp8});
        };
        // all in FP8 and NVFP4 but in_proj_a and in_proj_b; then with a head in BF16
        CHECK(has(message_of([&] { load("mixed/modelopt_mixed"); }, ErrorKind::usage), "quantized already"));
        CHECK_NOTHROW(load("odd_pattern/modelopt_xs"));
        CHECK(message_of([] { parse_dense("int8"); }, ErrorKind::usage) ==
              "--dense: expected fp8 or nvfp4, found 'int8'");
    }

    TEST_CASE("--dense: the plan counts requantized bytes" * doctest::test_suite("slow")) {
        const auto plan = [](DenseFormat dense) {
            return make_cost_plan(
                {.synthetic = "qwen3.6-35b-a3b", .dense = dense, .engine = {.context = 2048}});
        };
        const CostPlan stored = plan(DenseFormat::as_stored), fp8 = plan(DenseFormat::fp8),
                       nvfp4 = plan(DenseFormat::nvfp4);
        CHECK(fp8.token_bytes() == doctest::Approx(2.51e9).epsilon(0.005));
        CHECK(nvfp4.token_bytes() == doctest::Approx(1.84e9).epsilon(0.005));
        CHECK(fp8.as_stored_token_bytes == doctest::Approx(stored.token_bytes()));
        CHECK(fp8.cards[3].memory.weight_bytes() < stored.cards[3].memory.weight_bytes() - 1'400'000'000);
        CHECK(has(describe(fp8), "--dense fp8: 20.9"));
        CHECK(has(describe(fp8), "ceilings 1.60x"));
        CHECK(!has(describe(stored), "--dense"));
        CHECK(to_json(fp8)["dense"] == "fp8");
    }
}

TEST_SUITE("model") {
    TEST_CASE("--dense fp8: the demo answers as before, and its cost is measured" *
              doctest::test_suite("slow")) {
        const LoadedModel loaded =
            load_and_start({.gpu = GpuOptions::none, .dense = DenseFormat::fp8, .engine = {.context = 256}});
        REQUIRE(loaded.dense_cost);
        const DenseCost& cost = *loaded.dense_cost;
        CHECK(cost.tokens == 2000);
        CHECK(cost.kl_mean > 1e-4);
        CHECK(cost.kl_mean < cost.kl_p99);
        CHECK(cost.kl_p99 <= cost.kl_max);
        CHECK(cost.agreement > 0.85);
        CHECK(cost.acceptable());
        CHECK(has(describe(cost), "mean KL 0.0"));
        CHECK(loaded.engine->memory_plan().context == 256);
    }

    TEST_CASE("--dense: what changes a model too much is refused" * doctest::test_suite("slow")) {
        test::TempDir dir;
        write_sure_demo(dir, 6);
        const std::string text = message_of(
            [&] {
                load_and_start({.model = dir.str(), .gpu = GpuOptions::none, .dense = DenseFormat::nvfp4});
            },
            ErrorKind::model);
        CHECK(has(text, "--dense nvfp4 changes this model too much: mean KL "));
        CHECK(has(text, "or try --dense fp8"));
    }
}

}  // namespace quern
