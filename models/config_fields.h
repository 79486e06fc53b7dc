// ConfigFields: checked access to a config.json.
#pragma once

#include <cstdint>
#include <string>

#include "ggml-like/check.h"
#include "ggml-like/json.h"

namespace quern {

/// Checked access to an object of a config.json; remembers the file for messages.
class ConfigFields {
  public:
    ConfigFields(const nlohmann::json& object, const std::string& file) : object_(object), file_(file) {}

    const nlohmann::json* find(const char* key) const {
        const auto it = object_.find(key);
        return it == object_.end() || it->is_null() ? nullptr : &*it;
    }

    int64_t integer(const char* key, int64_t fallback, int64_t low, int64_t high) const {
        const nlohmann::json* v = find(key);
        if (v == nullptr) return fallback;
        if (!v->is_number_integer()) fail(key, fmt::format("an integer from {} to {}", low, high), *v);
        const bool too_big = v->is_number_unsigned() && v->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
        if (too_big || v->get<int64_t>() < low || v->get<int64_t>() > high)
            fail(key, fmt::format("an integer from {} to {}", low, high), *v);
        return v->get<int64_t>();
    }

    double number(const char* key, double fallback, double low, double high) const {
        const nlohmann::json* v = find(key);
        if (v == nullptr) return fallback;
        if (!v->is_number() || !(v->get<double>() >= low && v->get<double>() <= high))
            fail(key, fmt::format("a number from {} to {}", low, high), *v);
        return v->get<double>();
    }

    /// A switch that quern implements in one position only.
    void must_be(const char* key, const nlohmann::json& expected, const char* meaning) const {
        const nlohmann::json* v = find(key);
        if (v != nullptr && *v != expected) fail(key, fmt::format("{} ({})", expected.dump(), meaning), *v);
    }

    [[noreturn]] void fail(const char* key, const std::string& expected, const nlohmann::json& found) const {
        std::string text = found.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
        if (text.size() > 80) text = text.substr(0, 77) + "...";
        FAIL(model, "{}: '{}' should be {}, but is {}", file_, key, expected, text);
    }

    const std::string& file() const { return file_; }

  private:
    const nlohmann::json& object_;
    const std::string& file_;
};

}  // namespace quern
