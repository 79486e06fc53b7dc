// JSON Schema with references and combinations worked out, one level at a time.
#pragma once

#include <string>
#include <vector>

#include "ggml-like/json.h"

namespace quern {

/// A schema that does not nest its combinations: an object without $ref, allOf and oneOf whose anyOf, if it has one, is all
/// that it says; or true or false. Schemas of members and items are as they were.
class SchemaMerger {
  public:
    /// `root`: what with_local_refs (schema_refs.h) gave.
    explicit SchemaMerger(const nlohmann::ordered_json& root) : root_(root) {}

    /// Throws Error(usage) naming `where`: a $ref that leads nowhere, combinations without end, more alternatives than
    /// kMaxAlternatives. A $ref to another document is left out.
    nlohmann::ordered_json flat(const nlohmann::ordered_json& schema, const std::string& where);
    /// The schema that a $ref leads to.
    const nlohmann::ordered_json& target(const nlohmann::ordered_json& ref, const std::string& where);
    /// What merging had to leave out.
    const std::vector<std::string>& lost() const { return lost_; }

    static constexpr size_t kMaxAlternatives = 256;

  private:
    nlohmann::ordered_json combined(const nlohmann::ordered_json& schema, const std::string& where,
                                    int depth);
    nlohmann::ordered_json both(nlohmann::ordered_json a, const nlohmann::ordered_json& b,
                                const std::string& where);
    void add(nlohmann::ordered_json& to, const std::string& key, const nlohmann::ordered_json& value,
             const std::string& where);

    const nlohmann::ordered_json& root_;
    std::vector<std::string> lost_;
};

/// A value of a schema for a message: ASCII, shortened.
std::string brief(const nlohmann::ordered_json& value);

/// Words that say nothing about what fits.
bool is_annotation(const std::string& keyword);

}  // namespace quern
