// Fields: checked reading of a JSON object that people or programs wrote. Remembers which fields were read, so that
// unknown ones can be reported.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ggml-like/error.h"
#include "ggml-like/json.h"

namespace quern {

/// A bad field: Error(usage) with the field's full name and a stable code for programs.
struct FieldError : Error {
    FieldError(std::string field_, const std::string& message, std::string code_ = "invalid_value")
        : Error(ErrorKind::usage, message), field(std::move(field_)), code(std::move(code_)) {}

    std::string field, code;
};

/// A value as messages show it: texts in quotes, shortened; of lists and objects only that they are some.
std::string found_text(const nlohmann::ordered_json& value);
/// "FIELD must be EXPECTED, found VALUE"
FieldError wrong_value(const std::string& field, const std::string& expected,
                       const nlohmann::ordered_json& found);

class Fields {
  public:
    /// `where`: the name of the object in messages; empty for the body of a request. Throws FieldError if it is not
    /// an object.
    explicit Fields(const nlohmann::ordered_json& object, std::string where = {});

    /// All of these: empty if absent or null; FieldError for a wrong type or value.
    std::optional<bool> boolean(const std::string& name);
    std::optional<int64_t> integer(const std::string& name, int64_t min, int64_t max);
    std::optional<std::string> string(const std::string& name);
    const nlohmann::ordered_json* value(const std::string& name);
    const nlohmann::ordered_json* list(const std::string& name);
    const nlohmann::ordered_json* object(const std::string& name);
    /// Accepted without effect.
    void ignore(std::initializer_list<const char*> names);
    /// FieldError if it is there.
    void refuse(std::initializer_list<const char*> names);

    /// The name with its path: "messages[2].role".
    std::string full(const std::string& name) const;
    /// Another one to report, of an object inside.
    void note_unknown(const std::string& name) { noted_.push_back(name); }
    /// Fields that nobody read, and those noted.
    std::vector<std::string> unknown() const;

  private:
    const nlohmann::ordered_json& object_;
    std::string where_;
    std::set<std::string> asked_;
    std::vector<std::string> noted_;
};

/// JSON on one line, invalid UTF-8 replaced.
std::string dump(const nlohmann::ordered_json& json);

}  // namespace quern
