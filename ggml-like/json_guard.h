// JSON from files and requests, all of which may be hostile: every document that becomes a tree is parsed here.
//
// One pass over the text builds the document and at the same time bounds nesting and finds duplicate keys.
// The parser below is nlohmann::json (iterative, RFC 8259: no comments, no NaN, no trailing text); a UTF-8
// byte order mark at the very start is accepted.
#pragma once

#include <string>
#include <string_view>

#include "ggml-like/error.h"
#include "ggml-like/json.h"

namespace quern {

struct JsonOptions {
    /// Nested containers; a document of exactly this depth is accepted.
    int max_depth = 64;
    /// RFC 8259 leaves duplicates open; two readers may then see two documents, so the default refuses them.
    bool reject_duplicate_keys = true;
    /// What a bad document means for the caller: `model` for checkpoint files, `usage` for requests.
    ErrorKind kind = ErrorKind::model;
};

/// Parses `text`; `what` names it in messages (a path, "request body"). Throws Error(options.kind) on a
/// syntax error, invalid UTF-8 in a string, a number outside double, nesting beyond max_depth or a duplicate
/// key; the message has line and column, is short and is plain ASCII apart from `what`.
nlohmann::json parse_json(std::string_view text, const std::string& what, const JsonOptions& options = {});

/// The same, but objects keep the order of the text. They are lists, quicker to build than trees and searched in
/// linear time: for documents with one huge object.
nlohmann::ordered_json parse_json_ordered(std::string_view text, const std::string& what,
                                          const JsonOptions& options = {});

}  // namespace quern
