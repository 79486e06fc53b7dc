#include "tools/engine/sampling_ranges.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr double kMaxInt = std::numeric_limits<int>::max();

/// get and set of a member of Sampling.
template <auto member>
constexpr SamplingField field(const char* name, const char* synonym, SamplingRange range) {
    using Value = std::remove_reference_t<decltype(Sampling{}.*member)>;
    return {name, synonym, range, [](const Sampling& s) { return static_cast<double>(s.*member); },
            [](Sampling& s, double value) { s.*member = static_cast<Value>(value); }};
}

// repeat_penalty divides logits: 0 would be infinity. Penalties go as far as the bias of a logit.
constexpr SamplingField kFields[] = {
    field<&Sampling::temperature>("temperature", "temp", {0, 100, false, "0: always the likeliest token"}),
    field<&Sampling::top_k>("top_k", nullptr, {-1, kMaxInt, true, "0 and -1: off"}),
    field<&Sampling::top_p>("top_p", nullptr, {0, 1, false, "0: always the likeliest token, 1: off"}),
    field<&Sampling::min_p>("min_p", nullptr, {0, 1, false, "0: off"}),
    field<&Sampling::repetition_penalty>("repeat_penalty", "repetition_penalty",
                                         {0.01, 100, false, "1: off"}),
    field<&Sampling::presence_penalty>("presence_penalty", nullptr, {-100, 100, false, "0: off"}),
    field<&Sampling::frequency_penalty>("frequency_penalty", nullptr, {-100, 100, false, "0: off"}),
    field<&Sampling::penalty_window>("repeat_last_n", "penalty_window", {-1, kMaxInt, true, "-1: all"}),
};

}  // namespace

bool SamplingRange::holds(double value) const {
    if (!(value >= low - 1 && value <= high + 1)) return false;
    if (whole) return value >= low && value <= high && value == std::floor(value);
    return static_cast<float>(value) >= static_cast<float>(low) &&
           static_cast<float>(value) <= static_cast<float>(high);
}

std::string SamplingRange::message(std::string_view field, std::string_view found) const {
    return fmt::format("{}: expected a {} from {} to {} ({}), found {}", field,
                       whole ? "whole number" : "number", low, high, note, found);
}

std::span<const SamplingField> sampling_fields() { return kFields; }

const SamplingField* find_sampling_field(std::string_view name) {
    const auto* found = std::find_if(std::begin(kFields), std::end(kFields), [&](const SamplingField& f) {
        return name == f.name || (f.synonym != nullptr && name == f.synonym);
    });
    return found == std::end(kFields) ? nullptr : found;
}

void check_sampling(const Sampling& s, int64_t vocab) {
    for (const SamplingField& f : kFields)
        if (const double value = f.get(s); !f.range.holds(value))
            FAIL(usage, "{}", f.range.message(f.name, fmt::format("{}", value)));
    for (const auto& [id, bias] : s.logit_bias) {
        if (id < 0 || id >= vocab)
            FAIL(usage, "logit_bias: expected token ids from 0 to {}, found {}", vocab - 1, id);
        if (!kLogitBiasRange.holds(bias))
            FAIL(usage, "{}",
                 kLogitBiasRange.message(fmt::format("logit_bias of token {}", id), fmt::format("{}", bias)));
    }
}

}  // namespace quern
