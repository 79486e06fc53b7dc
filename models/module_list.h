// A list of module names as quantization configs write it: exact names, `re:` expressions, shell wildcards.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ggml-like/name_hash.h"

namespace quern {

/// Regular expressions come from the checkpoint and are never run: those that use only ".*" and single characters
/// become wildcards, others are counted as unread.
class ModuleList {
  public:
    enum class Syntax : uint8_t {
        regex,  // compressed-tensors: exact names, and "re:" matched at the start
        glob,   // ModelOpt: shell wildcards, and names that include all modules below them
    };
    /// Entries that are not strings are ignored.
    void add(const nlohmann::json& list, Syntax syntax);

    bool empty() const { return exact_.empty() && wildcards_.empty() && unread_ == 0; }
    int64_t unread() const { return unread_; }
    size_t wildcards() const { return wildcards_.size(); }
    /// `official`: models/tensor_names.h; `in_file`: the name the checkpoint gives the module.
    bool contains(std::string_view official, std::string_view in_file) const;

  private:
    void add_exact(const std::string& name);

    std::unordered_set<std::string, NameHash, std::equal_to<>> exact_;  // as written, and official
    std::vector<std::string> wildcards_;
    bool below_ = false;  // a name covers the modules below it
    int64_t unread_ = 0;
};

/// `?` is one character, `*` any number. Time: at most the product of the lengths.
bool matches_wildcard(std::string_view pattern, std::string_view text);

}  // namespace quern
