#include "tools/engine/schema_exclusive.h"

#include <algorithm>

namespace quern {

using nlohmann::ordered_json;

namespace {

class Exclusion {
  public:
    explicit Exclusion(const SchemaTarget& target) : target_(target) {}

    bool of(const ordered_json& list) {
        for (size_t i = 0; i < list.size(); ++i)
            for (size_t j = 0; j < i; ++j)
                if (!of(list[j], list[i], true)) return false;
        return true;
    }

  private:
    static constexpr int kMaxRefs = 32;

    /// Counts comparisons; false when there were too many.
    bool may_compare(size_t count) {
        if (count > left_) return false;
        left_ -= count;
        return true;
    }

    const ordered_json& behind_refs(const ordered_json& schema) const {
        const ordered_json* at = &schema;
        for (int i = 0; i < kMaxRefs && at->is_object() && at->contains("$ref"); ++i)
            at = &target_((*at)["$ref"]);
        return *at;
    }

    /// Null: none are listed.
    static const ordered_json* values(const ordered_json& schema) {
        for (const char* key : {"const", "enum"})
            if (const auto found = schema.find(key); found != schema.end()) return &*found;
        return nullptr;
    }

    /// `by_tag`: also objects one of which requires a property that has other values in the other one.
    bool of(const ordered_json& one, const ordered_json& other, bool by_tag) {
        const ordered_json &a = behind_refs(one), &b = behind_refs(other);
        if (a == false || b == false) return true;
        if (!a.is_object() || !b.is_object()) return false;
        if (const ordered_json* x = values(a), *y = values(b); x != nullptr && y != nullptr) {
            const bool x_list = a.contains("enum") && !a.contains("const"),
                       y_list = b.contains("enum") && !b.contains("const");
            if (!may_compare((x_list ? x->size() : 1) * (y_list ? y->size() : 1))) return false;
            return common_values(x_list ? *x : ordered_json::array({*x}),
                                 y_list ? *y : ordered_json::array({*y}))
                .empty();
        }
        if (a.contains("type") && b.contains("type") && common_types(a["type"], b["type"]).empty())
            return true;
        return by_tag && is_object(a) && is_object(b) && (by_property(a, b) || by_property(b, a));
    }

    static bool is_object(const ordered_json& schema) {
        return schema.contains("type") ? schema["type"] == "object" : schema.contains("properties");
    }

    /// A property that `a` requires.
    bool by_property(const ordered_json& a, const ordered_json& b) {
        const auto required = a.find("required"), here = a.find("properties"), there = b.find("properties");
        if (required == a.end() || !required->is_array() || here == a.end() || there == b.end()) return false;
        return std::any_of(required->begin(), required->end(), [&](const ordered_json& key) {
            if (!key.is_string() || !may_compare(here->size() + there->size())) return false;
            const auto x = here->find(key.get<std::string>()), y = there->find(key.get<std::string>());
            return x != here->end() && y != there->end() && of(*x, *y, false);
        });
    }

    const SchemaTarget& target_;
    size_t left_ = 40000;
};

}  // namespace

ordered_json as_list(const ordered_json& value) {
    return value.is_array() ? value : ordered_json::array({value});
}

ordered_json common_values(const ordered_json& a, const ordered_json& b) {
    ordered_json out = ordered_json::array();
    for (const auto& value : a)
        if (std::find(b.begin(), b.end(), value) != b.end()) out.push_back(value);
    return out;
}

ordered_json common_types(const ordered_json& a, const ordered_json& b) {
    const ordered_json one = as_list(a), other = as_list(b);
    ordered_json out = common_values(one, other);
    const auto has = [](const ordered_json& list, const char* type) {
        return std::find(list.begin(), list.end(), type) != list.end();
    };
    const bool integer =
        (has(one, "integer") && has(other, "number")) || (has(one, "number") && has(other, "integer"));
    if (integer && !has(out, "number") && !has(out, "integer")) out.push_back("integer");
    return out;
}

bool exclude_each_other(const ordered_json& list, const SchemaTarget& target) {
    return list.is_array() && Exclusion(target).of(list);
}

}  // namespace quern
