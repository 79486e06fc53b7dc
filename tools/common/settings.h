// Settings: what may be changed between two answers, by a flag at the start or by /set at the prompt.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "models/chat_format.h"
#include "tools/engine/request.h"

namespace quern {

class Model;

struct Settings {
    Sampling sampling;
    int64_t max_tokens = std::numeric_limits<int64_t>::max();
    int64_t reasoning_budget = -1;
    bool thinking = true;
    bool random_seed = true;                    // a new seed for every answer
    std::map<std::string, std::string> origin;  // name -> who set it; absent: nobody, so the value is neutral
};

/// The checkpoint's values, each with its origin.
Settings default_settings(const Model& model);

/// Sets one value by name: a field of the sampler (tools/engine/sampling_ranges.h), logit_bias, seed, n,
/// reasoning_budget, think. Dashes and underscores are the same; names that other programs use are understood.
/// `shown` names it in messages, `origin` is shown by /show. Throws Error(usage) for unknown names (with the nearest
/// one) and bad values.
void set_value(Settings& settings, std::string_view name, std::string_view value, const std::string& shown,
               const std::string& origin);

/// What set_value knows, by its first names and by those that other programs use.
std::vector<std::string> setting_names();
bool is_setting(std::string_view name);

/// Lines "name  value  (origin)", for /show params and --verbose.
std::string describe(const Settings& settings);

inline constexpr const char* kEffortNames = "minimal, low, medium, high, xhigh or max";
/// One of kEffortNames, as requests and templates write it; empty for anything else.
std::optional<ReasoningEffort> parse_effort(std::string_view name);

}  // namespace quern
