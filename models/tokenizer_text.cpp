#include "models/tokenizer_text.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "ggml-like/json_guard.h"
#include "ggml-like/json_pull.h"

namespace quern {
namespace {

using json = nlohmann::ordered_json;

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
constexpr uint64_t kMaxId = std::numeric_limits<int32_t>::max() - 1;
constexpr int kMaxDepth = JsonOptions{}.max_depth;
constexpr int kListDepth = 3;  // of the values in vocab and merges: inside root, model and the list

/// Reads the text once; whatever is not of the usual form becomes a JSON value of its own.
class Scanner {
  public:
    Scanner(std::string_view text, size_t tokens)
        : text_(text), pull_(text, std::string(kTokenizerFile)), tokens_(tokens) {
        if (text.starts_with(kByteOrderMark)) pull_.rewind(kByteOrderMark.size());
    }

    TokenizerText take() {
        if (pull_.peek() == '{') {
            members([&](std::string_view key) {
                if (key == "model" && pull_.peek() == '{')
                    read_model();
                else
                    pull_.skip_value("as a member");
            });
        }
        rest_.append(text_.substr(copied_));  // with anything behind the document, to be refused
        out_.rest = parse_json_ordered(rest_, std::string(kTokenizerFile));
        return std::move(out_);
    }

  private:
    /// f(key) reads the value of each member of the object that is next.
    template <typename F>
    void members(F&& f) {
        pull_.expect('{', "at the start of an object");
        if (pull_.accept('}')) return;
        do {
            const std::string_view key = pull_.string(scratch_, "as an object's key");
            pull_.expect(':', "after an object's key");
            f(key);
        } while (pull_.accept(','));
        pull_.expect('}', "or ','");
    }

    void read_model() {
        members([&](std::string_view key) {
            const char next = pull_.peek();
            const size_t begin = pull_.offset();
            if (key == "vocab" && next == '{') {
                read_vocab();
                leave_out(begin, "{}");
            } else if (key == "merges" && next == '[') {
                read_merges();
                leave_out(begin, "[]");
            } else {
                pull_.skip_value("as a member");
            }
        });
    }

    /// The rest of the document has `instead` for what lies between `begin` and here.
    void leave_out(size_t begin, std::string_view instead) {
        rest_.append(text_.substr(copied_, begin - copied_)).append(instead);
        copied_ = pull_.offset();
    }

    void read_vocab() {
        out_.vocab.reserve(std::min(tokens_, text_.size() / 8));  // no more than the text can have
        members([&](std::string_view key) {
            const std::string_view text = keep(key);
            int32_t id = -1;
            if (const auto plain = pull_.accept_integer(kMaxId)) {
                id = static_cast<int32_t>(*plain);
            } else {
                json value = read_value();
                id = token_id_from(value);
                if (id < 0 && !out_.bad_id) out_.bad_id = {text, std::move(value)};
            }
            if (!out_.vocab.emplace(text, static_cast<uint32_t>(id)).second) pull_.fail("duplicate key");
        });
    }

    void read_merges() {
        out_.merges.reserve(out_.vocab.size());
        pull_.expect('[', "at the start of a list");
        if (pull_.accept(']')) return;
        do {
            TokenizerText::Merge merge = pull_.peek() == '"' ? read_line() : read_pair();
            out_.merges.push_back(merge);
        } while (pull_.accept(','));
        pull_.expect(']', "or ','");
    }

    /// "a b", or a header.
    TokenizerText::Merge read_line() {
        const std::string_view text = keep(pull_.string(scratch_, "as a merge"));
        if (text.starts_with("#version")) return {};
        const size_t space = text.find(' ');
        if (space != text.npos && text.find(' ', space + 1) == text.npos)
            return {text.substr(0, space), text.substr(space + 1)};
        return bad_merge(json(text));
    }

    /// ["a", "b"]
    TokenizerText::Merge read_pair() {
        const size_t begin = pull_.offset();
        if (pull_.accept('[') && pull_.peek() == '"') {
            const std::string_view left = keep(pull_.string(scratch_, "in a merge"));
            if (pull_.accept(',') && pull_.peek() == '"') {
                const std::string_view right = keep(pull_.string(scratch_, "in a merge"));
                if (pull_.accept(']')) return {left, right};
            }
        }
        pull_.rewind(begin);
        return bad_merge(read_value());
    }

    TokenizerText::Merge bad_merge(json value) {
        if (!out_.bad_merge) out_.bad_merge = {out_.merges.size(), std::move(value)};
        return {};
    }

    /// Any value of a list.
    json read_value() {
        pull_.peek();
        const size_t begin = pull_.offset();
        pull_.skip_value("in a list");
        return parse_json_ordered(text_.substr(begin, pull_.offset() - begin), std::string(kTokenizerFile),
                                  {.max_depth = kMaxDepth - kListDepth});
    }

    /// A string that outlives the next one.
    std::string_view keep(std::string_view s) {
        if (s.data() != scratch_.data()) return s;
        // Unescaped strings are shorter than written, so all together are shorter than the text. Pages that
        // are not used cost nothing.
        if (!out_.unescaped) out_.unescaped = std::make_unique_for_overwrite<char[]>(text_.size());
        char* to = out_.unescaped.get() + unescaped_;
        memcpy(to, s.data(), s.size());
        unescaped_ += s.size();
        return {to, s.size()};
    }

    std::string_view text_;
    JsonPull pull_;
    size_t tokens_;
    TokenizerText out_;
    std::string scratch_;
    std::string rest_;
    size_t copied_ = 0;     // the text before is in rest_, or left out
    size_t unescaped_ = 0;  // bytes used
};

}  // namespace

int32_t token_id_from(const json& value) {
    if (!value.is_number_integer()) return -1;
    const auto id = value.get<int64_t>();
    return id >= 0 && id <= static_cast<int64_t>(kMaxId) ? static_cast<int32_t>(id) : -1;
}

TokenizerText read_tokenizer_text(std::string_view text, size_t tokens) {
    try {
        return Scanner(text, tokens).take();
    } catch (const Error&) {
        parse_json_ordered(text, std::string(kTokenizerFile));  // says the line and column
        throw;
    }
}

}  // namespace quern
