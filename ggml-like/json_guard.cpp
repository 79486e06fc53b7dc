#include "ggml-like/json_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "ggml-like/text_prefix.h"

namespace quern {
namespace {

constexpr const char* kAdvice =
    "; was the file cut off or damaged? Compare its size with the original's, or download it again";

/// For messages, which go to terminals and into JSON answers: at most `limit` bytes of printable ASCII.
std::string printable(std::string_view text, size_t limit) {
    std::string out;
    for (char c : text.substr(0, limit)) out += c >= 0x20 && c < 0x7f ? c : '?';
    if (text.size() > limit) out += "...";
    return out;
}

/// "line 3, column 14" of a byte offset; columns count bytes.
std::string position_text(std::string_view text, size_t offset) {
    const std::string_view before = text.substr(0, std::min(offset, text.size()));
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t newline = before.rfind('\n');
    const size_t column = newline == std::string_view::npos ? before.size() : before.size() - newline - 1;
    return fmt::format("line {}, column {}", line, std::max<size_t>(column, 1));
}

/// Builds the document from parser events and refuses what the parser itself would let through.
template <typename Json>
class GuardedBuilder : public nlohmann::json_sax<Json> {
  public:
    using Base = nlohmann::json_sax<Json>;
    using Object = typename Json::object_t;
    using Array = typename Json::array_t;
    using Text = typename Base::string_t;
    using Kind = typename Json::value_t;

    GuardedBuilder(std::string_view text, const std::string& what, const JsonOptions& options)
        : text_(text), what_(what), options_(options) {}

    Json take() { return std::move(root_); }

    bool null() override { return place(nullptr), true; }
    bool boolean(bool value) override { return place(value), true; }
    bool number_integer(typename Base::number_integer_t value) override { return place(value), true; }
    bool number_unsigned(typename Base::number_unsigned_t value) override { return place(value), true; }
    bool number_float(typename Base::number_float_t value, const Text&) override {
        return place(value), true;
    }
    bool string(Text& value) override { return place(std::move(value)), true; }
    bool binary(typename Base::binary_t&) override { return false; }  // never produced from text

    bool start_object(size_t) override { return open(Kind::object); }
    bool start_array(size_t) override { return open(Kind::array); }
    bool end_object() override {
        if constexpr (kOrdered) refuse_duplicates(stack_.back()->template get_ref<Object&>());
        return stack_.pop_back(), true;
    }
    bool end_array() override { return stack_.pop_back(), true; }

    bool key(Text& name) override {
        auto& object = stack_.back()->template get_ref<Object&>();
        if constexpr (kOrdered) {
            member_ =
                &object.emplace_back(std::move(name), nullptr).second;  // checked once the object is whole
        } else {
            const size_t before = object.size();
            // Files list their keys in order surprisingly often; the hint makes that case cheap.
            const auto member = object.emplace_hint(object.end(), std::move(name), nullptr);
            if (object.size() == before && options_.reject_duplicate_keys) fail_duplicate(member->first);
            member_ = &member->second;
        }
        return true;
    }

    bool parse_error(size_t offset, const std::string&, const nlohmann::json::exception& error) override {
        std::string_view reason = error.what();
        // Drop nlohmann's own "[json.exception...] parse error at line..., column ...: " prefix: we say
        // where.
        const size_t colon = reason.find(": ");
        if (colon != std::string_view::npos) reason.remove_prefix(colon + 2);
        fail(fmt::format("{} ({})", printable(reason, 200), position_text(text_, offset)));
        return false;
    }

  private:
    static constexpr bool kOrdered = std::is_same_v<Json, nlohmann::ordered_json>;

    [[noreturn]] void fail(const std::string& reason) const {
        const bool of_model = options_.kind == ErrorKind::model;
        throw Error(options_.kind,
                    fmt::format("{} is not valid JSON: {}{}", what_, reason, of_model ? kAdvice : ""),
                    __FILE__, __LINE__);
    }

    [[noreturn]] void fail_duplicate(std::string_view name) const {
        fail(fmt::format("duplicate key \"{}\"", printable(name, 80)));
    }

    void refuse_duplicates(const Object& object) const {
        if (!options_.reject_duplicate_keys) return;
        std::vector<std::pair<uint64_t, std::string_view>> names;
        names.reserve(object.size());
        for (const auto& [name, value] : object) names.emplace_back(text_prefix(name), name);
        std::sort(names.begin(), names.end());
        const auto twice = std::adjacent_find(names.begin(), names.end());
        if (twice != names.end()) fail_duplicate(twice->second);
    }

    template <typename T>
    Json* place(T&& value) {
        if (stack_.empty()) {
            root_ = Json(std::forward<T>(value));
            return &root_;
        }
        if (stack_.back()->is_array()) {
            auto& array = stack_.back()->template get_ref<Array&>();
            return &array.emplace_back(std::forward<T>(value));
        }
        *member_ = Json(std::forward<T>(value));
        return member_;
    }

    bool open(Kind type) {
        if (stack_.size() >= static_cast<size_t>(std::max(options_.max_depth, 0))) {
            fail(fmt::format("nested deeper than {} levels", options_.max_depth));
        }
        stack_.push_back(place(Json(type)));
        return true;
    }

    std::string_view text_;
    const std::string& what_;
    const JsonOptions& options_;
    Json root_;
    std::vector<Json*> stack_;  // open containers; addresses are stable because only the innermost one grows
    Json* member_ = nullptr;    // value slot of the key read last
};

template <typename Json>
Json parse(std::string_view text, const std::string& what, const JsonOptions& options) {
    GuardedBuilder<Json> builder(text, what, options);
    Json::sax_parse(text.begin(), text.end(), &builder);
    return builder.take();
}

}  // namespace

nlohmann::json parse_json(std::string_view text, const std::string& what, const JsonOptions& options) {
    return parse<nlohmann::json>(text, what, options);
}

nlohmann::ordered_json parse_json_ordered(std::string_view text, const std::string& what,
                                          const JsonOptions& options) {
    return parse<nlohmann::ordered_json>(text, what, options);
}

}  // namespace quern
