#include "ggml-like/json_guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace quern {
namespace {

using nlohmann::json;

/// Messages travel to terminals and into JSON answers: at most `limit` bytes, printable ASCII only.
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
class GuardedBuilder : public nlohmann::json_sax<json> {
  public:
    GuardedBuilder(std::string_view text, const std::string& what, const JsonOptions& options)
        : text_(text), what_(what), options_(options) {}

    json take() { return std::move(root_); }

    bool null() override { return place(nullptr), true; }
    bool boolean(bool value) override { return place(value), true; }
    bool number_integer(number_integer_t value) override { return place(value), true; }
    bool number_unsigned(number_unsigned_t value) override { return place(value), true; }
    bool number_float(number_float_t value, const string_t&) override { return place(value), true; }
    bool string(string_t& value) override { return place(std::move(value)), true; }
    bool binary(binary_t&) override { return false; }  // never produced from text

    bool start_object(size_t) override { return open(json::value_t::object); }
    bool start_array(size_t) override { return open(json::value_t::array); }
    bool end_object() override { return stack_.pop_back(), true; }
    bool end_array() override { return stack_.pop_back(), true; }

    bool key(string_t& name) override {
        auto& object = stack_.back()->get_ref<json::object_t&>();
        // Files list their keys in order surprisingly often; the hint makes that case cheap.
        const size_t before = object.size();
        member_ = &object.emplace_hint(object.end(), std::move(name), nullptr)->second;
        if (object.size() == before && options_.reject_duplicate_keys) {
            fail(fmt::format("duplicate key \"{}\"", printable(duplicate_name(object), 80)));
        }
        return true;
    }

    bool parse_error(size_t offset, const std::string&, const json::exception& error) override {
        std::string_view reason = error.what();
        // Drop nlohmann's own "[json.exception...] parse error at line..., column ...: " prefix: we say
        // where.
        const size_t colon = reason.find(": ");
        if (colon != std::string_view::npos) reason.remove_prefix(colon + 2);
        fail(fmt::format("{} ({})", printable(reason, 200), position_text(text_, offset)));
    }

  private:
    [[noreturn]] void fail(const std::string& reason) const {
        throw Error(options_.kind, fmt::format("{} is not valid JSON: {}", what_, reason), __FILE__,
                    __LINE__);
    }

    std::string duplicate_name(const json::object_t& object) const {
        for (const auto& [name, value] : object) {
            if (&value == member_) return name;
        }
        return {};
    }

    template <typename T>
    json* place(T&& value) {
        if (stack_.empty()) {
            root_ = json(std::forward<T>(value));
            return &root_;
        }
        if (stack_.back()->is_array()) {
            auto& array = stack_.back()->get_ref<json::array_t&>();
            return &array.emplace_back(std::forward<T>(value));
        }
        *member_ = json(std::forward<T>(value));
        return member_;
    }

    bool open(json::value_t type) {
        if (stack_.size() >= static_cast<size_t>(std::max(options_.max_depth, 0))) {
            fail(fmt::format("nested deeper than {} levels", options_.max_depth));
        }
        stack_.push_back(place(json(type)));
        return true;
    }

    std::string_view text_;
    const std::string& what_;
    const JsonOptions& options_;
    json root_;
    std::vector<json*> stack_;  // open containers; addresses are stable because only the innermost one grows
    json* member_ = nullptr;    // value slot of the key read last
};

}  // namespace

json parse_json(std::string_view text, const std::string& what, const JsonOptions& options) {
    GuardedBuilder builder(text, what, options);
    json::sax_parse(text.begin(), text.end(), &builder);
    return builder.take();
}

}  // namespace quern
