// A text to compare models on: prose, code, JSON, tables and a tool call in eleven languages, written for
// quern.
#pragma once

#include <string_view>

namespace quern {

extern const std::string_view kSampleText;

}  // namespace quern
