// ChatBody: a request of any API in the form of a chat request, before its fields are checked.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/common/fields.h"

namespace quern {

/// Tools that the model sees as functions and the client knows as something else.
struct ToolKinds {
    struct Place {
        std::string space, name;
    };
    std::set<std::string> custom;         // of free text, which is the parameter kCustomInput
    std::map<std::string, Place> spaces;  // functions of a namespace, by the name that the model sees
    bool legacy = false;  // functions, as they were before tools: an answer has one call at most
};

inline constexpr const char* kCustomInput = "input";

struct ChatBody {
    nlohmann::ordered_json body;
    std::vector<std::string> origins;  // of every message: where it was in the request; empty: as it is
    std::map<std::string, std::string>
        names;                         // fields that the request has under another name, with that one
    std::vector<std::string> dropped;  // parts of the request that have no effect
    ToolKinds kinds;
};

/// Of a chat request itself: what clients send and means nothing is left out (empty stops, grammars and efforts,
/// "functions" without any), functions become tools (legacy_functions.h), a tool_choice that is an object of a plain word becomes the word, tools of free text
/// become functions, and other tools that are no functions are dropped. Throws FieldError.
ChatBody chat_body(nlohmann::ordered_json body);

/// A tool of free text, with its grammar if there is one as words, as a function tool.
nlohmann::ordered_json custom_as_function(const nlohmann::ordered_json& tool);
/// The free text of a call whose arguments these are.
std::string custom_input(const std::string& arguments);
/// The arguments of a call with this free text.
std::string custom_arguments(const std::string& input);

/// The error with the name that the field has in the request that was sent.
FieldError as_named(const FieldError& error, const std::map<std::string, std::string>& names);

/// The error with the place in the request that was sent, not in the one it was made into.
FieldError at_origin(const FieldError& error, const std::vector<std::string>& origins);

}  // namespace quern
