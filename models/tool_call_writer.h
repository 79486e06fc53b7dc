// A call as it is written, parameter by parameter: its arguments as one JSON object, and the pieces of it for those who
// follow along.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "models/chat_format.h"
#include "models/python_text.h"

namespace quern {

/// The arguments of a call as they come in: of two values for a key the last counts, at the first's place.
class ArgumentList {
  public:
    void set(const std::string& key, std::string json) {
        const auto [it, fresh] = places_.try_emplace(key, items_.size());
        if (fresh)
            items_.emplace_back(key, std::move(json));
        else
            items_[it->second].second = std::move(json);
    }

    const std::vector<std::pair<std::string, std::string>>& items() const { return items_; }
    std::string json() const {
        std::string out = "{";
        for (const auto& [key, value] : items_) {
            if (out.size() > 1) out += ", ";
            append_python_json_string(out, key);
            out += ": ";
            out += value;
        }
        return out + "}";
    }

  private:
    std::unordered_map<std::string, size_t> places_;
    std::vector<std::pair<std::string, std::string>> items_;
};

/// Pieces of calls (ToolCallPiece). A call has its first one when its first value begins.
class CallPieces {
  public:
    /// A call that was begun and not ended is none.
    void reset() { id_.clear(); }
    bool begun() const { return !id_.empty(); }
    const std::string& id() const { return id_; }

    void begin_call(std::string id, const std::string& name) {
        id_ = std::move(id);
        pieces_.push_back({++index_, id_, name, "{", ""});
        first_ = true;
    }
    /// `is_text`: a string, whose text may come little by little.
    void begin_value(std::string_view key, bool is_text) {
        std::string& out = last().arguments;
        if (!std::exchange(first_, false)) out += ", ";
        append_python_json_string(out, key);
        out += is_text ? ": \"" : ": ";
        is_text_ = is_text;
        streamed_ = 0;
    }
    bool takes_text() const { return begun() && is_text_; }
    /// `value`: all of the text so far; it only grows.
    void grow_text(std::string_view value) {
        if (value.size() <= streamed_) return;
        const std::string_view fresh = value.substr(streamed_);
        std::string quoted;
        append_python_json_string(quoted, fresh);
        last().arguments += std::string_view(quoted).substr(1, quoted.size() - 2);
        last().text += fresh;
        streamed_ = value.size();
    }
    void end_value(std::string_view text, const std::string& json) {
        if (is_text_) grow_text(text);
        last().arguments += is_text_ ? "\"" : json;
        is_text_ = false;
    }
    void end_call() { last().arguments += '}'; }

    std::vector<ToolCallPiece> take() { return std::exchange(pieces_, {}); }

  private:
    ToolCallPiece& last() {
        if (pieces_.empty() || pieces_.back().index != index_) pieces_.push_back({.index = index_});
        return pieces_.back();
    }

    std::vector<ToolCallPiece> pieces_;
    std::string id_;
    int index_ = -1;
    bool first_ = false, is_text_ = false;
    size_t streamed_ = 0;
};

}  // namespace quern
