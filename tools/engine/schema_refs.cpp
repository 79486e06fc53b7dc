#include "tools/engine/schema_refs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <map>
#include <string_view>

namespace quern {

using nlohmann::ordered_json;

namespace {

/// A name for the document where it has no $id; no scheme of a URI begins so.
constexpr const char* kRoot = "";

bool is_hex(char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; }

std::string percent_decoded(std::string_view text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
        if (text[i] == '%' && i + 2 < text.size() && is_hex(text[i + 1]) && is_hex(text[i + 2])) {
            out += static_cast<char>(std::stoi(std::string(text.substr(i + 1, 2)), nullptr, 16));
            i += 2;
        } else {
            out += text[i];
        }
    }
    return out;
}

/// The place of a scheme's colon, or npos: "https", "urn".
size_t scheme_end(std::string_view uri) {
    const size_t colon = uri.find(':');
    if (colon == uri.npos || colon == 0 || uri.find_first_of("/?#") < colon) return uri.npos;
    return colon;
}

/// A reference without a fragment, seen from `base` (RFC 3986, 5.2, but for dots within the path).
std::string joined(const std::string& base, const std::string& reference) {
    if (reference.empty()) return base;
    if (scheme_end(reference) != std::string::npos || base.empty()) return reference;
    const size_t colon = scheme_end(base);
    const size_t after = colon == std::string::npos ? 0 : colon + 1;
    if (reference.starts_with("//")) return base.substr(0, after) + reference;
    const bool authority = base.compare(after, 2, "//") == 0;
    const size_t path = authority ? std::min(base.find('/', after + 2), base.size()) : after;
    if (reference.starts_with("/")) return base.substr(0, path) + reference;
    const size_t slash = base.rfind('/');
    const bool in_path = slash != std::string::npos && slash >= path;
    return base.substr(0, in_path ? slash + 1 : path) + (authority && !in_path ? "/" : "") + reference;
}

struct Split {
    std::string document, fragment;  // the fragment without its #, decoded
};

Split split(const std::string& reference) {
    const size_t hash = reference.find('#');
    if (hash == std::string::npos) return {reference, ""};
    return {reference.substr(0, hash), percent_decoded(std::string_view(reference).substr(hash + 1))};
}

template <size_t N>
bool is_one_of(const std::string& key, const std::array<const char*, N>& names) {
    return std::find(names.begin(), names.end(), key) != names.end();
}

constexpr std::array kData = {"enum", "const", "default", "examples", "example"};
/// Objects whose keys are names, not keywords.
constexpr std::array kMaps = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"};

constexpr int kMaxDepth = 256;  // deeper schemas are refused anyway
// What is longer, or more, is no name: a hostile schema must not cost more than its own size.
constexpr size_t kMaxName = 2048, kMaxPlaces = 10000, kMaxLookups = 10000;

const std::string* text_of(const ordered_json& schema, const char* key) {
    const auto at = schema.find(key);
    return at != schema.end() && at->is_string() ? at->get_ptr<const std::string*>() : nullptr;
}

class References {
  public:
    explicit References(ordered_json& root) : root_(root) {
        places_.emplace(kRoot, "");
        note_names(root, kRoot, false, 0);
        rewrite(root, kRoot, false, 0);
    }

  private:
    static std::string base_of(const ordered_json& schema, const std::string& base) {
        const std::string* id = schema.is_object() ? text_of(schema, "$id") : nullptr;
        if (id == nullptr || id->size() > kMaxName || base.size() > kMaxName) return base;
        return joined(base, split(*id).document);
    }

    void note_name(const std::string& name) {
        if (name.size() <= 2 * kMaxName && place_.size() <= kMaxName && places_.size() < kMaxPlaces)
            places_.emplace(name, place_);
    }

    /// `map`: the keys are names.
    void note_names(const ordered_json& schema, const std::string& outer, bool map, int depth) {
        if (depth > kMaxDepth) return;
        const size_t length = place_.size();
        const auto enter = [&](const std::string& key, const ordered_json& value, const std::string& base,
                               bool inner_map) {
            place_ += "/" + escaped(key);
            note_names(value, base, inner_map, depth + 1);
            place_.resize(length);
        };
        if (schema.is_array())
            for (size_t i = 0; i < schema.size(); ++i) enter(std::to_string(i), schema[i], outer, false);
        if (!schema.is_object()) return;
        const std::string base = map ? outer : base_of(schema, outer);
        if (base != outer) note_name(base);
        for (const char* key : {"$anchor", "$dynamicAnchor"})
            if (const std::string* name = map ? nullptr : text_of(schema, key)) note_name(base + "#" + *name);
        for (const auto& [key, value] : schema.items())
            if (map || !is_one_of(key, kData)) enter(key, value, base, !map && is_one_of(key, kMaps));
    }

    static std::string escaped(const std::string& key) {
        std::string out;
        for (const char c : key) out += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
        return out;
    }

    void rewrite(ordered_json& schema, const std::string& outer, bool map, int depth) {
        if (depth > kMaxDepth) return;
        if (schema.is_array())
            for (ordered_json& one : schema) rewrite(one, outer, false, depth + 1);
        if (!schema.is_object()) return;
        const std::string base = map ? outer : base_of(schema, outer);
        const std::string* ref = map ? nullptr : text_of(schema, "$ref");
        if (ref != nullptr && !(base == kRoot && is_plain(*ref)))
            if (const std::string* place = find(*ref, base)) schema["$ref"] = "#" + *place;
        for (auto& [key, value] : schema.items())
            if (map || !is_one_of(key, kData)) rewrite(value, base, !map && is_one_of(key, kMaps), depth + 1);
    }

    /// A pointer that says where it leads as it is.
    static bool is_plain(const std::string& ref) {
        return ref == "#" || (ref.starts_with("#/") && ref.find('%') == ref.npos);
    }

    /// The pointer to what a reference leads to; null if that is not in the document.
    const std::string* find(const std::string& reference, const std::string& base) {
        if (reference.size() > kMaxName || ++lookups_ > kMaxLookups) return nullptr;
        const Split parts = split(reference);
        const std::string document = joined(base, parts.document);
        const bool pointer = parts.fragment.empty() || parts.fragment.starts_with("/");
        const auto at = places_.find(pointer ? document : document + "#" + parts.fragment);
        if (at == places_.end()) return nullptr;
        if (!pointer || parts.fragment.empty()) return &at->second;
        found_ = at->second + parts.fragment;
        try {
            return root_.contains(ordered_json::json_pointer(found_)) ? &found_ : nullptr;
        } catch (const ordered_json::exception&) {
            return nullptr;
        }
    }

    const ordered_json& root_;
    std::map<std::string, std::string> places_;  // pointers by name: "https://a.b/c", "https://a.b/c#anchor"
    std::string place_, found_;                  // where note_names is; what find found
    size_t lookups_ = 0;
};

}  // namespace

ordered_json with_local_refs(const ordered_json& schema) {
    ordered_json out = schema;
    References{out};
    return out;
}

bool is_external(const std::string& ref) { return !ref.starts_with("#"); }

}  // namespace quern
