// From the text between <function=...> tags to a call with typed arguments.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "models/chat_format.h"

namespace quern {

/// `body`: what follows "<function=", up to and without "</function>". Nothing if it is not NAME> and
/// parameters. Types come from the tool's JSON schema; see tool_arguments.cpp.
std::optional<ToolCall> parse_function(std::string_view body, const nlohmann::ordered_json& tools);

}  // namespace quern
