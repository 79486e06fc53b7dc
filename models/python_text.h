// Python's str.strip(), json.dumps() and literals, which the reference chat template relies on. Rendered prompts are
// compared byte for byte with transformers, so these follow CPython.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "ggml-like/json.h"

namespace quern {

/// Length in bytes (1..3) of the white space character at the start of `text`, 0 if there is none there. The
/// set is that of str.isspace(): 9-13, 28-32, 0x85, 0xA0, U+1680, U+2000-200A, 2028, 2029, 202F, 205F, 3000.
size_t python_space_prefix(std::string_view text);

/// str.strip(), str.lstrip() and str.rstrip() of UTF-8. Bytes that are not UTF-8 are never white space.
std::string_view python_lstrip(std::string_view text);
std::string_view python_rstrip(std::string_view text);
std::string_view python_strip(std::string_view text);

/// json.dumps(value, ensure_ascii=False): ", " and ": " between items, keys in their order, only quotes, backslashes
/// and control characters escaped. Exact for all integers of 64 bits and all doubles (repr(): shortest digits that
/// read back, exponent below 1e-4 and from 1e16). Not exact: integers beyond 64 bits, which the JSON reader has
/// already made doubles. Strings are copied as bytes. Any depth.
std::string python_json(const nlohmann::ordered_json& value);

/// repr() of a float: "1.0", "0.1", "1e-05", "1e+16", "NaN", "Infinity" (the last two as json.dumps does).
std::string python_float(double value);

/// Appends `text` as a JSON string with quotes, escaped as json.dumps(ensure_ascii=False) does.
void append_python_json_string(std::string& out, std::string_view text);

/// Parses JSON that may be hostile, keeping the order of keys; empty for a syntax error or more than 64 nested
/// containers. A duplicate key keeps its first place and gets its last value, as in a Python dict. Linear time
/// (nlohmann's own reader is quadratic in the keys of an ordered object).
std::optional<nlohmann::ordered_json> parse_ordered_json(std::string_view text);

/// A Python literal (dict, list, tuple, str, int, float, True, False, None) as JSON; tuples become arrays, keys that
/// are not strings their text. Empty for anything else, or nesting beyond 64.
std::optional<nlohmann::ordered_json> parse_python_literal(std::string_view text);

}  // namespace quern
