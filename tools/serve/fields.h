// Fields: checked reading of a request's JSON object. Remembers what was asked for, so that the rest is
// known.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace quern {

class Fields {
  public:
    /// `where`: the name of the object in messages; empty for the body. Throws ApiError(400) if it is no
    /// object.
    explicit Fields(const nlohmann::ordered_json& object, std::string where = {});

    /// All of these: absent and null are nothing; a wrong type or value is ApiError(400) with the field's
    /// name.
    std::optional<bool> boolean(const std::string& name);
    std::optional<int64_t> integer(const std::string& name, int64_t min, int64_t max);
    std::optional<double> number(const std::string& name, double min, double max);
    std::optional<std::string> string(const std::string& name);
    const nlohmann::ordered_json* value(const std::string& name);
    const nlohmann::ordered_json* list(const std::string& name);
    const nlohmann::ordered_json* object(const std::string& name);
    /// Accepted without effect.
    void ignore(std::initializer_list<const char*> names);
    /// ApiError(400) if it is there.
    void refuse(std::initializer_list<const char*> names);

    /// The name with what is around it: "messages[2].role".
    std::string full(const std::string& name) const;
    /// Fields that nobody asked for.
    std::vector<std::string> unknown() const;

  private:
    const nlohmann::ordered_json& object_;
    std::string where_;
    std::set<std::string> asked_;
};

}  // namespace quern
