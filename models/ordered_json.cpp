// Reading JSON with the order of keys kept, safely: depth bounded, linear in the text.
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "models/python_text.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxDepth = 64;

/// Builds the document from parser events. Objects are filled through their vector, because looking up each
/// key in an ordered object takes time linear in its keys; duplicates are found by a hash table instead.
class OrderedBuilder : public nlohmann::json_sax<ordered_json> {
  public:
    ordered_json take() { return std::move(root_); }

    bool null() override { return place(nullptr); }
    bool boolean(bool value) override { return place(value); }
    bool number_integer(number_integer_t value) override { return place(value); }
    bool number_unsigned(number_unsigned_t value) override { return place(value); }
    bool number_float(number_float_t value, const string_t&) override { return place(value); }
    bool string(string_t& value) override { return place(std::move(value)); }
    bool binary(binary_t&) override { return false; }

    bool start_object(size_t) override { return open(ordered_json::value_t::object); }
    bool start_array(size_t) override { return open(ordered_json::value_t::array); }
    bool end_object() override { return close(); }
    bool end_array() override { return close(); }

    bool key(string_t& name) override {
        Frame& frame = open_.back();
        auto& object = frame.container->get_ref<ordered_json::object_t&>();
        const auto [at, fresh] = frame.places.try_emplace(name, object.size());
        frame.place = at->second;
        if (fresh) static_cast<Members&>(object).emplace_back(std::move(name), nullptr);
        return true;
    }

    bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
        return false;
    }

  private:
    using Members = ordered_json::object_t::Container;

    struct Frame {
        ordered_json* container;  // stable: only the innermost container grows
        std::unordered_map<std::string, size_t> places;
        size_t place = 0;  // member that the next value belongs to
    };

    ordered_json* slot() {
        if (open_.empty()) return &root_;
        Frame& frame = open_.back();
        if (frame.container->is_array())
            return &frame.container->get_ref<ordered_json::array_t&>().emplace_back(nullptr);
        return &static_cast<Members&>(frame.container->get_ref<ordered_json::object_t&>())[frame.place]
                    .second;
    }

    template <typename T>
    bool place(T&& value) {
        *slot() = ordered_json(std::forward<T>(value));
        return true;
    }

    bool open(ordered_json::value_t type) {
        if (open_.size() >= kMaxDepth) return false;
        ordered_json* container = slot();
        *container = ordered_json(type);
        open_.push_back({container, {}, 0});
        return true;
    }

    bool close() {
        open_.pop_back();
        return true;
    }

    ordered_json root_;
    std::vector<Frame> open_;
};

}  // namespace

std::optional<ordered_json> parse_ordered_json(std::string_view text) {
    OrderedBuilder builder;
    if (!ordered_json::sax_parse(text.begin(), text.end(), &builder)) return {};
    return builder.take();
}

}  // namespace quern
