// The table of sampling ranges: flags, settings, requests and the engine take the same values.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>

#include "ggml-like/error.h"
#include "tools/common/settings.h"
#include "tools/engine/sampling_ranges.h"
#include "tools/serve/sampling_fields.h"

namespace quern {
namespace {

constexpr int64_t kVocab = 100;

/// The message of the error, empty without one.
template <typename F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::usage);
        return error.what();
    }
    return "";
}

/// Of a flag or of /set.
std::string by_text(const std::string& name, const std::string& value, Sampling& out) {
    Settings settings;
    const std::string message = message_of([&] { set_value(settings, name, value, name, "test"); });
    out = settings.sampling;
    return message;
}

std::string by_request(const nlohmann::ordered_json& body, Sampling& out) {
    return message_of([&] {
        Fields fields(body);
        read_sampling(fields, out, true, kVocab);
        CHECK(fields.unknown().empty());
    });
}

std::string by_engine(const Sampling& s) {
    return message_of([&] { check_sampling(s, kVocab); });
}

/// Borders, what is directly beside them, and values that are never good.
std::vector<double> values_of(const SamplingRange& range) {
    const double step = range.whole ? 1 : 1e-3;
    return {range.low,
            range.low - step,
            range.low + step,
            range.high,
            range.high + step,
            range.high - step,
            0,
            1,
            0.5,
            -1,
            2,
            1e9};
}

/// Whether a field of Sampling can have this value, good or not.
bool storable(const SamplingRange& range, double value) {
    return !range.whole || (value == std::floor(value) && std::abs(value) <= 2147483647.0);
}

TEST_SUITE("cpu") {
    TEST_CASE("sampling: flags, requests and the engine take the same values of every field") {
        for (const SamplingField& field : sampling_fields())
            for (const double value : values_of(field.range)) {
                CAPTURE(field.name);
                CAPTURE(value);
                const bool good = field.range.holds(value);
                const std::string text = fmt::format("{}", value);
                Sampling flag, request, direct;
                const std::string flag_says = by_text(field.name, text, flag);
                const std::string request_says = by_request({{field.name, value}}, request);
                CHECK(flag_says.empty() == good);
                CHECK(request_says.empty() == good);
                if (storable(field.range, value)) {
                    field.set(direct, value);
                    CHECK(by_engine(direct).empty() == good);
                }
                if (good) {
                    CHECK(field.get(flag) == field.get(direct));
                    CHECK(field.get(request) == field.get(direct));
                    CHECK(by_engine(flag).empty());
                } else {
                    for (const std::string& says : {flag_says, request_says}) {
                        CAPTURE(says);
                        CHECK(says.starts_with(field.name));
                        CHECK(says.find(fmt::format("from {} to {}", field.range.low, field.range.high)) !=
                              std::string::npos);
                        CHECK(says.find("found ") != std::string::npos);
                    }
                }
            }
    }

    TEST_CASE("sampling: what makes no sense is refused") {
        const auto refused = [](auto change) {
            Sampling s;
            change(s);
            return !by_engine(s).empty();
        };
        CHECK(refused([](Sampling& s) { s.temperature = -1; }));
        CHECK(refused([](Sampling& s) { s.temperature = std::nanf(""); }));
        CHECK(refused([](Sampling& s) { s.top_p = -0.1f; }));
        CHECK(refused([](Sampling& s) { s.top_p = 1.1f; }));
        CHECK(refused([](Sampling& s) { s.top_k = -2; }));
        CHECK(refused([](Sampling& s) { s.min_p = 2; }));
        CHECK(refused([](Sampling& s) { s.repetition_penalty = 0; }));
        CHECK(refused([](Sampling& s) { s.presence_penalty = 101; }));
        CHECK(refused([](Sampling& s) { s.frequency_penalty = -101; }));
        CHECK(refused([](Sampling& s) { s.penalty_window = -2; }));
        CHECK(refused([](Sampling& s) { s.logit_bias = {{100, 1.0f}}; }));
        CHECK(refused([](Sampling& s) { s.logit_bias = {{-1, 1.0f}}; }));
        CHECK(refused([](Sampling& s) { s.logit_bias = {{1, 1e30f}}; }));
        CHECK_FALSE(refused([](Sampling& s) { s.top_p = 0, s.top_k = -1, s.repetition_penalty = 0.01f; }));
        CHECK_FALSE(refused([](Sampling&) {}));
    }

    TEST_CASE("sampling: every other name of a field is the same field") {
        for (const SamplingField& field : sampling_fields()) {
            if (field.synonym == nullptr) continue;
            CAPTURE(field.synonym);
            CHECK(find_sampling_field(field.synonym) == &field);
            Sampling flag, request;
            CHECK(by_text(field.synonym, "3", flag).empty());
            CHECK(by_request({{field.synonym, 3}}, request).empty());
            CHECK(field.get(flag) == 3);
            CHECK(field.get(request) == 3);
        }
        CHECK(find_sampling_field("temperatur") == nullptr);
    }

    TEST_CASE("sampling: what is no number is refused") {
        Sampling s;
        for (const char* text : {"", "x", "nan", "inf", "1x", "--1", "1e999"}) {
            CAPTURE(text);
            for (const SamplingField& field : sampling_fields())
                CHECK_FALSE(by_text(field.name, text, s).empty());
            CHECK_FALSE(by_request({{"temperature", text}}, s).empty());
        }
        s.temperature = std::nanf("");
        CHECK(by_engine(s).starts_with("temperature: expected a number from 0 to 100 (0: "));
        s.temperature = INFINITY;
        CHECK(by_engine(s).ends_with("found inf"));
    }

    TEST_CASE("sampling: the bias of a logit is from -100 to 100 everywhere") {
        for (const double bias : {-100.0, 100.0, 0.0, -100.5, 100.5, 1e4, 1e6}) {
            CAPTURE(bias);
            const bool good = std::abs(bias) <= 100;
            Sampling flag, request, direct;
            direct.logit_bias = {{7, static_cast<float>(bias)}};
            CHECK(by_text("logit_bias", fmt::format("7{:+}", bias), flag).empty() == good);
            CHECK(by_request({{"logit_bias", {{"7", bias}}}}, request).empty() == good);
            CHECK(by_engine(direct).empty() == good);
            if (!good) continue;
            CHECK(flag.logit_bias == direct.logit_bias);
            CHECK(request.logit_bias == direct.logit_bias);
        }
        Sampling request, direct;
        direct.logit_bias = {{static_cast<int32_t>(kVocab), 1.0f}};
        CHECK(by_engine(direct) == "logit_bias: expected token ids from 0 to 99, found 100");
        CHECK_FALSE(by_request({{"logit_bias", {{"100", 1}}}}, request).empty());
    }

    TEST_CASE("sampling: a seed is any signed 64-bit number, -1 a new one") {
        for (const int64_t seed : {int64_t{0}, int64_t{7}, int64_t{-2}, INT64_MAX, INT64_MIN}) {
            CAPTURE(seed);
            Sampling flag, request;
            CHECK(by_text("seed", fmt::format("{}", seed), flag).empty());
            CHECK(by_request({{"seed", seed}}, request).empty());
            CHECK(flag.seed == static_cast<uint64_t>(seed));
            CHECK(request.seed == flag.seed);
        }
        Sampling a, b;
        by_request({{"seed", -1}}, a);
        by_request({{"seed", -1}}, b);
        CHECK(a.seed != b.seed);  // one run in two thousand million
        CHECK_FALSE(by_text("seed", "9223372036854775808", a).empty());
        CHECK_FALSE(by_request({{"seed", uint64_t{1} << 63}}, a).empty());
        CHECK_FALSE(by_request({{"seed", 1.5}}, a).empty());
    }
}

}  // namespace
}  // namespace quern
