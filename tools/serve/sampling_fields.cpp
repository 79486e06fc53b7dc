#include "tools/serve/sampling_fields.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <limits>

#include "tools/common/cli_values.h"
#include "tools/engine/defaults.h"
#include "tools/engine/sampling_ranges.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

double checked(const SamplingRange& range, const ordered_json& value, const std::string& field,
               const std::string& shown) {
    if (!value.is_number() || !range.holds(value.get<double>()))
        throw FieldError(field, range.message(shown, printable(dump(value))));
    return value.get<double>();
}

int32_t token_id(const std::string& text, int64_t vocab) {
    int32_t id = -1;
    const char* end = text.data() + text.size();
    const auto [stop, failed] = std::from_chars(text.data(), end, id);
    if (failed != std::errc{} || stop != end || id < 0 || id >= vocab)
        throw FieldError("logit_bias", fmt::format("logit_bias: expected token ids from 0 to {}, found '{}'",
                                                   vocab - 1, printable(text)));
    return id;
}

}  // namespace

void read_sampling(Fields& fields, Sampling& s, bool fixed_seed, int64_t vocab) {
    for (const SamplingField& f : sampling_fields())
        for (const char* name : {f.synonym, f.name}) {
            const ordered_json* value = name != nullptr ? fields.value(name) : nullptr;
            if (value != nullptr) f.set(s, checked(f.range, *value, name, name));
        }
    constexpr int64_t kLow = std::numeric_limits<int64_t>::min(), kHigh = std::numeric_limits<int64_t>::max();
    if (const auto seed = fields.integer("seed", kLow, kHigh); seed || !fixed_seed)
        s.seed = seed_of(seed.value_or(kRandomSeed));
    const ordered_json* biases = fields.object("logit_bias");
    if (biases == nullptr) return;
    for (const auto& [key, value] : biases->items()) {
        const int32_t id = token_id(key, vocab);
        const double bias =
            checked(kLogitBiasRange, value, "logit_bias", fmt::format("logit_bias of token {}", id));
        s.logit_bias.emplace_back(id, static_cast<float>(bias));
    }
}

double as_written(float value) { return std::strtod(fmt::format("{}", value).c_str(), nullptr); }

}  // namespace quern
