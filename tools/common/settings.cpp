#include "tools/common/settings.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "models/model.h"
#include "tools/common/cli_values.h"
#include "tools/engine/defaults.h"
#include "tools/engine/sampling_ranges.h"

namespace quern {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

std::string with_underscores(std::string_view name) {
    std::string key(name);
    std::replace(key.begin(), key.end(), '-', '_');
    return key;
}

void set_sampling(const SamplingField& field, Settings& s, std::string_view text, const std::string& shown) {
    const auto value = field.range.whole ? std::optional<double>(integer_of(text)) : number_of(text);
    if (!value || !field.range.holds(*value))
        FAIL(usage, "{}", field.range.message(shown, fmt::format("'{}'", printable(text))));
    field.set(s.sampling, *value);
}

void set_seed(Settings& s, std::string_view value, const std::string& shown) {
    const int64_t seed = parse_integer(value, shown);
    s.random_seed = seed == kRandomSeed;
    s.sampling.seed = seed_of(seed);
}

// ID+V or ID-V, as llama.cpp writes it.
void add_logit_bias(Settings& s, std::string_view value, const std::string& shown) {
    const size_t sign = value.find_first_of("+-", 1);
    if (sign == std::string_view::npos)
        FAIL(usage, "{}: expected a token id and a bias, such as 15043+1 or 15043-1, found '{}'", shown,
             printable(value));
    const int64_t id = parse_integer(value.substr(0, sign), shown, 0, std::numeric_limits<int32_t>::max());
    const auto bias = number_of(value.substr(sign));
    if (!bias || !kLogitBiasRange.holds(*bias))
        FAIL(usage, "{}", kLogitBiasRange.message(shown, fmt::format("'{}'", printable(value.substr(sign)))));
    s.sampling.logit_bias.emplace_back(static_cast<int32_t>(id), static_cast<float>(*bias));
}

struct Entry {
    const char* name;
    std::vector<std::string> synonyms;
    void (*set)(Settings&, std::string_view value, const std::string& shown);
    std::string (*show)(const Settings&);
};

/// Settings that are not fields of the sampler.
const std::vector<Entry>& other_entries() {
    using S = Settings;
    using V = std::string_view;
    using N = const std::string&;
    static const std::vector<Entry> table = {
        {"logit_bias",
         {},
         add_logit_bias,
         [](const S& s) { return fmt::format("{} ids", s.sampling.logit_bias.size()); }},
        {"seed",
         {},
         set_seed,
         [](const S& s) { return fmt::format("{}{}", s.sampling.seed, s.random_seed ? " (random)" : ""); }},
        {"n",
         {"predict", "n_predict", "num_predict", "max_tokens"},
         [](S& s, V v, N n) {
             const int64_t tokens = parse_integer(v, n, -1);
             s.max_tokens = tokens < 0 ? kUnlimited : tokens;
         },
         [](const S& s) {
             return s.max_tokens == kUnlimited ? "until the answer ends" : fmt::format("{}", s.max_tokens);
         }},
        {"reasoning_budget",
         {"think_budget"},
         [](S& s, V v, N n) { s.reasoning_budget = parse_integer(v, n, -1); },
         [](const S& s) {
             return s.reasoning_budget < 0 ? "no limit" : fmt::format("{} tokens", s.reasoning_budget);
         }},
        {"think",
         {"thinking", "reasoning"},
         [](S& s, V v, N n) { s.thinking = v == "auto" || parse_switch(v, n); },
         [](const S& s) { return std::string(s.thinking ? "on" : "off"); }},
    };
    return table;
}

}  // namespace

std::vector<std::string> setting_names() {
    std::vector<std::string> names;
    for (const SamplingField& f : sampling_fields()) {
        names.emplace_back(f.name);
        if (f.synonym != nullptr) names.emplace_back(f.synonym);
    }
    for (const Entry& entry : other_entries()) {
        names.emplace_back(entry.name);
        names.insert(names.end(), entry.synonyms.begin(), entry.synonyms.end());
    }
    return names;
}

bool is_setting(std::string_view name) {
    const std::vector<std::string> names = setting_names();
    return std::find(names.begin(), names.end(), with_underscores(name)) != names.end();
}

Settings default_settings(const Model& model) {
    Settings out;
    const GenerationDefaults& given = model.generation();
    out.sampling = default_sampling(model);
    const auto mark = [&](const char* name, bool has) {
        if (has) out.origin[name] = given.origin;
    };
    mark("temperature", given.temperature.has_value() || given.greedy);
    mark("top_k", given.top_k.has_value());
    mark("top_p", given.top_p.has_value());
    mark("min_p", given.min_p.has_value());
    mark("repeat_penalty", given.repetition_penalty.has_value());
    out.sampling.seed = random_seed();
    return out;
}

void set_value(Settings& settings, std::string_view name, std::string_view value, const std::string& shown,
               const std::string& origin) {
    const std::string key = with_underscores(name);
    if (const SamplingField* field = find_sampling_field(key)) {
        set_sampling(*field, settings, value, shown);
        settings.origin[field->name] = origin;
        return;
    }
    for (const Entry& entry : other_entries()) {
        const auto& also = entry.synonyms;
        if (key != entry.name && std::find(also.begin(), also.end(), key) == also.end()) continue;
        entry.set(settings, value, shown);
        settings.origin[entry.name] = origin;
        return;
    }
    FAIL(usage, "there is no setting '{}'{}", printable(name), did_you_mean(key, setting_names()));
}

std::string describe(const Settings& settings) {
    std::string out;
    const auto line = [&](const char* name, const std::string& value) {
        const auto found = settings.origin.find(name);
        const std::string origin = found == settings.origin.end() ? "default" : found->second;
        out += fmt::format("  {:<18} {:<22} ({})\n", name, value, printable(origin, 120));
    };
    for (const SamplingField& f : sampling_fields())
        line(f.name, fmt::format("{}", static_cast<float>(f.get(settings.sampling))));
    for (const Entry& entry : other_entries()) line(entry.name, entry.show(settings));
    return out;
}

std::optional<ReasoningEffort> parse_effort(std::string_view name) {
    if (name == "minimal" || name == "low") return ReasoningEffort::low;
    if (name == "medium") return ReasoningEffort::medium;
    if (name == "high" || name == "xhigh" || name == "max") return ReasoningEffort::high;
    return std::nullopt;
}

}  // namespace quern
