// A compiled part of a JsonSchema. Internal to json_schema.cpp and json_matcher.cpp.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "tools/engine/json_schema.h"

namespace quern {

enum JsonType : unsigned {
    kString = 1,
    kNumber = 2,
    kInteger = 4,
    kBoolean = 8,
    kNull = 16,
    kObject = 32,
    kArray = 64,
    kAnyType = 127
};

struct Property {
    std::string key;  // as JSON writes it, without the quotes
    const JsonSchema::Node* node;
    bool required;
};

struct JsonSchema::Node {
    std::vector<const Node*> any_of;    // if any: the value is one of these
    std::vector<std::string> literals;  // if any: the value is one of these texts
    unsigned types = 0;
    std::vector<Property> properties;
    bool closed = false;               // additionalProperties: false
    const Node* additional = nullptr;  // null: no other properties
    const Node* items = nullptr;
    int64_t min_items = 0, max_items = std::numeric_limits<int64_t>::max();
    int64_t min_length = 0, max_length = std::numeric_limits<int64_t>::max();  // in characters
};

}  // namespace quern
