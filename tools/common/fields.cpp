#include "tools/common/fields.h"

#include <fmt/format.h>

#include "tools/common/cli_values.h"

namespace quern {

using nlohmann::ordered_json;

std::string found_text(const ordered_json& value) {
    if (value.is_string()) return fmt::format("'{}'", printable(value.get_ref<const std::string&>()));
    if (value.is_array()) return value.empty() ? "an empty list" : fmt::format("a list of {}", value.size());
    return value.is_object() ? "an object" : dump(value);
}

FieldError wrong_value(const std::string& field, const std::string& expected, const ordered_json& found) {
    return {field, fmt::format("{} must be {}, found {}", field, expected, found_text(found))};
}

Fields::Fields(const ordered_json& object, std::string where) : object_(object), where_(std::move(where)) {
    if (!object_.is_object())
        throw FieldError(where_,
                         fmt::format("{} must be a JSON object, found {}",
                                     where_.empty() ? "the request body" : where_, found_text(object_)));
}

std::string Fields::full(const std::string& name) const {
    return where_.empty() ? name : where_ + "." + name;
}

const ordered_json* Fields::value(const std::string& name) {
    asked_.insert(name);
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
}

const ordered_json* Fields::list(const std::string& name) {
    const ordered_json* v = value(name);
    if (v != nullptr && !v->is_array()) throw wrong_value(full(name), "a list", *v);
    return v;
}

const ordered_json* Fields::object(const std::string& name) {
    const ordered_json* v = value(name);
    if (v != nullptr && !v->is_object()) throw wrong_value(full(name), "an object", *v);
    return v;
}

std::optional<bool> Fields::boolean(const std::string& name) {
    const ordered_json* v = value(name);
    if (v == nullptr) return {};
    if (!v->is_boolean()) throw wrong_value(full(name), "true or false", *v);
    return v->get<bool>();
}

std::optional<int64_t> Fields::integer(const std::string& name, int64_t min, int64_t max) {
    const ordered_json* v = value(name);
    if (v == nullptr) return {};
    bool good = v->is_number_integer();
    if (v->is_number_unsigned()) good = v->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX);
    const int64_t n = good ? v->get<int64_t>() : 0;
    if (!good || n < min || n > max)
        throw wrong_value(full(name),
                          max == INT64_MAX && min > INT64_MIN
                              ? fmt::format("a whole number of at least {}", min)
                              : fmt::format("a whole number from {} to {}", min, max),
                          *v);
    return n;
}

std::optional<std::string> Fields::string(const std::string& name) {
    const ordered_json* v = value(name);
    if (v == nullptr) return {};
    if (!v->is_string()) throw wrong_value(full(name), "a string", *v);
    return v->get<std::string>();
}

void Fields::ignore(std::initializer_list<const char*> names) {
    for (const char* name : names) asked_.insert(name);
}

void Fields::refuse(std::initializer_list<const char*> names) {
    for (const char* name : names)
        if (value(name) != nullptr)
            throw FieldError(full(name), full(name) + " is not supported by this server",
                             "unsupported_parameter");
}

std::vector<std::string> Fields::unknown() const {
    std::vector<std::string> names;
    for (const auto& [name, ignored] : object_.items())
        if (!asked_.contains(name)) names.push_back(name);
    names.insert(names.end(), noted_.begin(), noted_.end());
    return names;
}

std::string dump(const ordered_json& json) {
    return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace quern
