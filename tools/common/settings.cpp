#include "tools/common/settings.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "models/model.h"
#include "tools/common/cli_values.h"
#include "tools/engine/defaults.h"

namespace quern {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

float number(std::string_view value, const std::string& shown, double min, double max) {
    return static_cast<float>(parse_number(value, shown, min, max));
}

void set_seed(Settings& s, std::string_view value, const std::string& shown) {
    const int64_t seed = parse_integer(value, shown, -1);
    s.random_seed = seed == -1;
    s.sampling.seed = s.random_seed ? random_seed() : static_cast<uint64_t>(seed);
}

// ID+V or ID-V, as llama.cpp writes it.
void add_logit_bias(Settings& s, std::string_view value, const std::string& shown) {
    const size_t sign = value.find_first_of("+-", 1);
    if (sign == std::string_view::npos)
        FAIL(usage, "{}: expected a token id and a bias, such as 15043+1 or 15043-1, found '{}'", shown,
             printable(value));
    const int64_t id = parse_integer(value.substr(0, sign), shown, 0, std::numeric_limits<int32_t>::max());
    const float bias = number(value.substr(sign), shown, -1e6, 1e6);
    s.sampling.logit_bias.emplace_back(static_cast<int32_t>(id), bias);
}

struct Entry {
    const char* name;
    std::vector<std::string> synonyms;
    void (*set)(Settings&, std::string_view value, const std::string& shown);
    std::string (*show)(const Settings&);
};

int whole(std::string_view value, const std::string& shown, int64_t min) {
    return static_cast<int>(parse_integer(value, shown, min, std::numeric_limits<int>::max()));
}

const std::vector<Entry>& entries() {
    using S = Settings;
    using V = std::string_view;
    using N = const std::string&;
    static const std::vector<Entry> table = {
        {"temp",
         {"temperature"},
         [](S& s, V v, N n) { s.sampling.temperature = number(v, n, 0, 100); },
         [](const S& s) { return fmt::format("{}", s.sampling.temperature); }},
        {"top_k",
         {},
         [](S& s, V v, N n) { s.sampling.top_k = std::max(0, whole(v, n, -1)); },
         [](const S& s) { return s.sampling.top_k > 0 ? fmt::format("{}", s.sampling.top_k) : "off"; }},
        {"top_p",
         {},
         [](S& s, V v, N n) { s.sampling.top_p = number(v, n, 1e-6, 1); },
         [](const S& s) { return fmt::format("{}", s.sampling.top_p); }},
        {"min_p",
         {},
         [](S& s, V v, N n) { s.sampling.min_p = number(v, n, 0, 1); },
         [](const S& s) { return fmt::format("{}", s.sampling.min_p); }},
        {"repeat_penalty",
         {"repetition_penalty"},
         [](S& s, V v, N n) { s.sampling.repetition_penalty = number(v, n, 0.01, 100); },
         [](const S& s) { return fmt::format("{}", s.sampling.repetition_penalty); }},
        {"repeat_last_n",
         {"penalty_window"},
         [](S& s, V v, N n) { s.sampling.penalty_window = whole(v, n, -1); },
         [](const S& s) {
             const int window = s.sampling.penalty_window;
             return window < 0 ? "all" : fmt::format("{}", window);
         }},
        {"presence_penalty",
         {},
         [](S& s, V v, N n) { s.sampling.presence_penalty = number(v, n, -100, 100); },
         [](const S& s) { return fmt::format("{}", s.sampling.presence_penalty); }},
        {"frequency_penalty",
         {},
         [](S& s, V v, N n) { s.sampling.frequency_penalty = number(v, n, -100, 100); },
         [](const S& s) { return fmt::format("{}", s.sampling.frequency_penalty); }},
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

Settings default_settings(const Model& model) {
    Settings out;
    const GenerationDefaults& given = model.generation();
    out.sampling = default_sampling(model);
    const auto mark = [&](const char* name, bool has) {
        if (has) out.origin[name] = given.origin;
    };
    mark("temp", given.temperature.has_value() || given.greedy);
    mark("top_k", given.top_k.has_value());
    mark("top_p", given.top_p.has_value());
    mark("min_p", given.min_p.has_value());
    mark("repeat_penalty", given.repetition_penalty.has_value());
    out.sampling.seed = random_seed();
    return out;
}

void set_value(Settings& settings, std::string_view name, std::string_view value, const std::string& shown,
               const std::string& origin) {
    std::string key(name);
    std::replace(key.begin(), key.end(), '-', '_');
    std::vector<std::string> names;
    for (const Entry& entry : entries()) {
        const auto& also = entry.synonyms;
        if (key == entry.name || std::find(also.begin(), also.end(), key) != also.end()) {
            entry.set(settings, value, shown);
            settings.origin[entry.name] = origin;
            return;
        }
        names.push_back(entry.name);
        names.insert(names.end(), also.begin(), also.end());
    }
    FAIL(usage, "there is no setting '{}'{}", printable(name), did_you_mean(key, names));
}

std::string describe(const Settings& settings) {
    std::string out;
    for (const Entry& entry : entries()) {
        const auto found = settings.origin.find(entry.name);
        const std::string origin = found == settings.origin.end() ? "default" : found->second;
        out +=
            fmt::format("  {:<18} {:<22} ({})\n", entry.name, entry.show(settings), printable(origin, 120));
    }
    return out;
}

}  // namespace quern
