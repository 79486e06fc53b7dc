// The values of `format` in a JSON schema that are enforced. Internal to grammar*.cpp.
#pragma once

#include <string>

namespace quern {

/// A regular expression for whole texts of this format; null for one that is not enforced. From RFC 3339 (dates and times, without
/// leap seconds), RFC 5321 (email, without quotes and addresses in brackets), RFC 9562 (uuid), RFC 2673 and RFC 4291 (addresses),
/// RFC 3986 (uri), RFC 1123 (hostname) and ISO 8601 (duration).
const char* format_regex(const std::string& format);

}  // namespace quern
