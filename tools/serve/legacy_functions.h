// Functions, as chat requests had them before tools.
#pragma once

#include "ggml-like/json.h"

namespace quern {

/// `functions` and `function_call` become tools and a tool_choice, one call at most; calls of earlier assistant messages and
/// messages of the role "function" become calls of tools and their results. True if the request offers functions: then the
/// answer has the old form, too. A request with both functions and tools stays as it is, and is refused by its fields.
bool functions_to_tools(nlohmann::ordered_json& body);

}  // namespace quern
