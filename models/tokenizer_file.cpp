#include "models/tokenizer_file.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/text_prefix.h"
#include "models/utf8.h"

namespace quern {
namespace {

// Ordered, because a tree of 250,000 vocabulary entries is slow to build; all other objects are small.
using json = nlohmann::ordered_json;

constexpr std::string_view kMain = "tokenizer.json";
constexpr std::string_view kConfig = "tokenizer_config.json";

// ---- JSON values with messages ----

/// Text for a message: short, printable ASCII.
std::string show(std::string_view text) {
    std::string out;
    for (char c : text.substr(0, 80)) out += c >= 0x20 && c < 0x7f ? c : '?';
    return text.size() > 80 ? out + "..." : out;
}

std::string show_json(const json& value) {
    return show(std::string_view(value.dump(-1, ' ', true, json::error_handler_t::replace)));
}

/// The member, or null (the JSON value) when it is not there.
const json& member(const json& object, const char* key) {
    static const json null;
    const auto found = object.is_object() ? object.find(key) : object.end();
    return found != object.end() ? *found : null;
}

/// `where` is a path such as "model.vocab".
const json& object_at(const json& parent, const char* key, std::string_view where) {
    const json& value = member(parent, key);
    if (!value.is_object()) FAIL(model, "{}: \"{}\" is missing or not an object", kMain, where);
    return value;
}

const std::string& string_at(const json& parent, const char* key, std::string_view where) {
    const json& value = member(parent, key);
    if (!value.is_string()) FAIL(model, "{}: \"{}.{}\" is missing or not a string", kMain, where, key);
    return value.get_ref<const std::string&>();
}

/// Missing and null mean false, as in the reference.
bool flag_at(const json& parent, const char* key, std::string_view where) {
    const json& value = member(parent, key);
    if (value.is_null()) return false;
    if (!value.is_boolean())
        FAIL(model, "\"{}\" of {} is {}, expected true or false", key, where, show_json(value));
    return value.get<bool>();
}

void expect_type(const json& object, const char* type, std::string_view where) {
    const std::string& found = string_at(object, "type", where);
    if (found != type) {
        FAIL(model,
             "{}: \"{}\" is of type \"{}\"; only \"{}\" is supported (byte-level BPE of the Qwen family)",
             kMain, where, show(found), type);
    }
}

/// Features of the format that Qwen does not use and encode() does not have.
void expect_off(const json& object, const char* key, std::string_view where) {
    const json& value = member(object, key);
    const bool off = value.is_null() || value == false ||
                     (value.is_string() && value.get_ref<const std::string&>().empty()) ||
                     (value.is_number() && value == 0);
    if (!off)
        FAIL(model, "{}: \"{}.{}\" is {}; this is not supported, expected null or false", kMain, where, key,
             show_json(value));
}

/// A token id, or -1.
int32_t id_from(const json& value) {
    if (!value.is_number_integer()) return -1;
    const auto id = value.get<int64_t>();
    return id >= 0 && id < std::numeric_limits<int32_t>::max() ? static_cast<int32_t>(id) : -1;
}

// ---- the byte alphabet ----

/// Byte-level BPE writes each byte as one printable character: printable Latin-1 as itself, the 68 others in
/// order from U+0100 on (GPT-2).
class ByteAlphabet {
  public:
    ByteAlphabet() {
        bytes_.fill(-1);
        uint32_t next = 0x100;
        for (int byte = 0; byte < 256; ++byte) {
            const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
            const uint32_t code_point = printable ? static_cast<uint32_t>(byte) : next++;
            bytes_[code_point] = static_cast<int16_t>(byte);
            append_utf8(letters_[byte], code_point);
        }
    }
    /// How the vocabulary writes this byte.
    const std::string& letter(int byte) const { return letters_[byte]; }
    /// The bytes meant, or nothing when some character is not of the alphabet. `text` is valid UTF-8.
    std::optional<std::string> bytes(std::string_view text) const {
        std::string out;
        for (size_t at = 0; at < text.size();) {
            const Utf8Unit unit = utf8_unit(text, at);
            if (unit.code_point >= bytes_.size() || bytes_[unit.code_point] < 0) return std::nullopt;
            out.push_back(static_cast<char>(bytes_[unit.code_point]));
            at += unit.length;
        }
        return out;
    }

  private:
    std::array<int16_t, 0x100 + 68> bytes_{};
    std::array<std::string, 256> letters_{};
};

// ---- the parts of the file ----

/// The declared steps around BPE are exactly those that encode() and decode() take. Returns the expression.
std::string read_pipeline(const json& root) {
    expect_type(object_at(root, "normalizer", "normalizer"), "NFC", "normalizer");
    expect_type(object_at(root, "decoder", "decoder"), "ByteLevel", "decoder");
    if (!member(root, "post_processor").is_null())
        expect_type(member(root, "post_processor"), "ByteLevel", "post_processor");

    const json& sequence = object_at(root, "pre_tokenizer", "pre_tokenizer");
    expect_type(sequence, "Sequence", "pre_tokenizer");
    const json& steps = member(sequence, "pretokenizers");
    if (!steps.is_array() || steps.size() != 2) {
        FAIL(model, "{}: \"pre_tokenizer.pretokenizers\" must be the two steps Split and ByteLevel", kMain);
    }
    expect_type(steps[0], "Split", "pre_tokenizer.pretokenizers[0]");
    const std::string& behavior = string_at(steps[0], "behavior", "pre_tokenizer.pretokenizers[0]");
    if (behavior != "Isolated")
        FAIL(model, "{}: the Split behavior is \"{}\", expected \"Isolated\"", kMain, show(behavior));
    expect_off(steps[0], "invert", "pre_tokenizer.pretokenizers[0]");
    expect_type(steps[1], "ByteLevel", "pre_tokenizer.pretokenizers[1]");
    expect_off(steps[1], "add_prefix_space", "pre_tokenizer.pretokenizers[1]");
    const json& use_regex = member(steps[1], "use_regex");
    if (use_regex != false) {  // left out means true
        FAIL(model, "{}: \"pre_tokenizer.pretokenizers[1].use_regex\" is {}, expected false", kMain,
             show_json(use_regex));
    }
    return string_at(object_at(steps[0], "pattern", "pre_tokenizer.pretokenizers[0].pattern"), "Regex",
                     "pre_tokenizer.pretokenizers[0].pattern");
}

const json& read_model_options(const json& root) {
    const json& model = object_at(root, "model", "model");
    if (!member(model, "type").is_null()) expect_type(model, "BPE", "model");
    for (const char* key :
         {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
        expect_off(model, key, "model");
    }
    return model;
}

AddedToken read_added(const json& value, const json& id, std::string_view file) {
    if (!value.is_object())
        FAIL(model, "{}: an added token is {}, expected an object", file, show_json(value));
    const json& content = member(value, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty()) {
        FAIL(model, "{}: the added token {} has no text (\"content\")", file, show_json(value));
    }
    AddedToken token{id_from(id), content.get<std::string>(), false};
    if (token.id < 0) FAIL(model, "{}: the added token {} has no valid id", file, show_json(value));
    const std::string where = fmt::format("added token \"{}\" in {}", show(token.text), file);
    token.special = flag_at(value, "special", where);
    for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
        if (flag_at(value, key, where))
            FAIL(model, "{}: \"{}\": true is not supported, expected false", where, key);
    }
    return token;
}

/// Added tokens of both files. Where both have one, they must agree on its text; the config, which
/// transformers applies last, decides whether it is special.
std::vector<AddedToken> read_all_added(const json& root, const json& config) {
    std::map<int32_t, AddedToken> by_id;
    const json& list = member(root, "added_tokens");
    if (!list.is_null() && !list.is_array()) FAIL(model, "{}: \"added_tokens\" is not a list", kMain);
    for (const json& value : list) {
        AddedToken token = read_added(value, member(value, "id"), kMain);
        const int32_t id = token.id;
        const auto [slot, inserted] = by_id.emplace(id, std::move(token));
        if (!inserted) FAIL(model, "{}: two added tokens have the id {}", kMain, id);
    }
    const json& decoder = member(config, "added_tokens_decoder");
    if (!decoder.is_null() && !decoder.is_object())
        FAIL(model, "{}: \"added_tokens_decoder\" is not an object", kConfig);
    for (const auto& [key, value] : decoder.items()) {
        int32_t number = -1;
        const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
        if (error != std::errc() || end != key.data() + key.size() || std::to_string(number) != key) {
            FAIL(model, "{}: \"{}\" in added_tokens_decoder is not a token id", kConfig, show(key));
        }
        AddedToken token = read_added(value, json(number), kConfig);
        const auto [slot, inserted] = by_id.emplace(number, token);
        if (!inserted && slot->second.text != token.text) {
            FAIL(model, "id {} is \"{}\" in {} and \"{}\" in {}", number, show(slot->second.text), kMain,
                 show(token.text), kConfig);
        }
        slot->second.special = token.special;
    }
    std::vector<AddedToken> out;
    std::map<std::string_view, int32_t> by_text;
    for (const auto& [id, token] : by_id) {
        const auto [slot, inserted] = by_text.emplace(token.text, id);
        if (!inserted)
            FAIL(model, "the added token \"{}\" has two ids, {} and {}", show(token.text), slot->second, id);
        out.push_back(token);
    }
    return out;
}

/// Texts to ids by binary search: no hash that a crafted file could aim at. The first eight bytes of each
/// text lie apart as numbers, so a search rarely leaves that array (a real vocabulary is searched 750,000
/// times).
class Names {
  public:
    struct Name {
        std::string_view text;
        int32_t id;
    };
    Names() = default;
    explicit Names(const std::vector<Name>& names) {
        std::vector<std::pair<uint64_t, const Name*>> order;
        order.reserve(names.size());
        for (const Name& name : names) order.emplace_back(text_prefix(name.text), &name);
        std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
            return a.first != b.first ? a.first < b.first : a.second->text < b.second->text;
        });
        for (const auto& [prefix, name] : order) {
            prefixes_.push_back(prefix);
            names_.push_back(*name);
        }
    }
    std::optional<int32_t> find(std::string_view text) const {
        const uint64_t prefix = text_prefix(text);
        auto low = std::lower_bound(prefixes_.begin(), prefixes_.end(), prefix);
        if (low == prefixes_.end()) return std::nullopt;
        auto high = low + 1;  // mostly alone
        if (high != prefixes_.end() && *high == prefix)
            high = std::upper_bound(high, prefixes_.end(), prefix);
        const auto end = names_.begin() + (high - prefixes_.begin());
        const auto found =
            std::lower_bound(names_.begin() + (low - prefixes_.begin()), end, text,
                             [](const Name& name, std::string_view t) { return name.text < t; });
        return found != end && found->text == text ? std::optional(found->id) : std::nullopt;
    }
    const std::vector<Name>& all() const { return names_; }

  private:
    std::vector<uint64_t> prefixes_;
    std::vector<Name> names_;  // sorted by text
};

// ---- vocabulary and merges ----

class Builder {
  public:
    Builder(const json& model, std::vector<AddedToken> added, int64_t vocab_rows)
        : vocab_(vocab_of(model)), vocab_rows_(vocab_rows) {
        file_.added = std::move(added);
        place_tokens();
        for (int byte = 0; byte < 256; ++byte) {
            const auto id = names_.find(alphabet_.letter(byte));
            if (!id) {
                FAIL(model,
                     "{}: the vocabulary has no token for the byte 0x{:02x}, so some text could not be "
                     "encoded",
                     kMain, byte);
            }
            refuse_added(*id, "a single byte");
            file_.byte_ids[byte] = *id;
        }
        read_merges(member(model, "merges"));
        if (flag_at(model, "ignore_merges", "model")) list_words();
    }
    TokenizerFile take() { return std::move(file_); }

  private:
    static const json::object_t& vocab_of(const json& model) {
        const json& vocab = object_at(model, "vocab", "model.vocab");
        if (vocab.size() > 1u << 24)
            FAIL(model, "{}: \"model.vocab\" has {} entries, too many", kMain, vocab.size());
        return vocab.get_ref<const json::object_t&>();
    }

    /// Puts every token at its id: in range, no id twice, no gap.
    void place_tokens() {
        std::vector<Names::Name> names;
        names.reserve(vocab_.size());
        for (const auto& [text, value] : vocab_) {
            const int32_t id = id_from(value);
            if (id < 0) {
                FAIL(model, "{}: the id of \"{}\" in \"model.vocab\" is {}", kMain, show(text),
                     show_json(value));
            }
            names.push_back({text, id});
        }
        names_ = Names(names);
        const auto is_new = [&](const AddedToken& token) { return !names_.find(token.text); };
        const size_t total = vocab_.size() + std::count_if(file_.added.begin(), file_.added.end(), is_new);
        file_.pieces.resize(total);
        is_added_.resize(total);
        std::vector<bool> taken(total);
        texts_.resize(total);
        for (const auto& [text, id] : names_.all()) {
            place(taken, id, text);
            texts_[id] = text;
        }
        for (const AddedToken& token : file_.added) {
            const auto known = names_.find(token.text);
            if (known && *known != token.id) {
                FAIL(model, "the added token \"{}\" has the id {}, but the id {} in \"model.vocab\"",
                     show(token.text), token.id, *known);
            }
            if (!known) place(taken, token.id, token.text);
            is_added_[token.id] = true;
        }
        // As many tokens as slots, each in a slot of its own: there is no gap left.
    }

    void place(std::vector<bool>& taken, int32_t id, std::string_view text) {
        if (vocab_rows_ > 0 && id >= vocab_rows_) {
            FAIL(model, "token \"{}\" has the id {}, but the embedding of the model has only {} rows",
                 show(text), id, vocab_rows_);
        }
        if (static_cast<size_t>(id) >= taken.size()) {
            FAIL(model,
                 "token \"{}\" has the id {}, but there are only {} tokens: ids have gaps. Is {} missing or "
                 "of "
                 "another model?",
                 show(text), id, taken.size(), kConfig);
        }
        if (taken[id]) FAIL(model, "\"{}\" and another token have the same id {}", show(text), id);
        taken[id] = true;
        // What is not written in the byte alphabet stands for itself when decoding, as in the reference.
        auto bytes = alphabet_.bytes(text);
        file_.pieces[id] = bytes ? std::move(*bytes) : std::string(text);
    }

    /// Otherwise plain text could turn into a control token, which Markers::literal promises it never does.
    void refuse_added(int32_t id, std::string_view what) const {
        if (is_added_[id]) FAIL(model, "{}: token {} is both an added token and {}", kMain, id, what);
    }

    void read_merges(const json& merges) {
        if (!merges.is_array()) FAIL(model, "{}: \"model.merges\" is missing or not a list", kMain);
        file_.merges.reserve(merges.size());
        std::string joined;
        for (size_t i = 0; i < merges.size(); ++i) {
            const auto [left, right] = merge_parts(merges[i], i);
            if (right.data() == nullptr) continue;
            joined.assign(left).append(right);
            // Trainers number the products in the order of the merges, so the next id is mostly the one.
            const int32_t guess = file_.merges.empty() ? 256 : file_.merges.back().result + 1;
            const bool guessed = static_cast<size_t>(guess) < texts_.size() && texts_[guess] == joined;
            const MergeRule rule{part(left, i), part(right, i), guessed ? guess : part(joined, i)};
            refuse_added(rule.result, "the result of a merge");
            file_.merges.push_back(rule);
        }
    }

    /// "a b" (older files) or ["a", "b"]. No right part: a header line, to be skipped.
    std::pair<std::string_view, std::string_view> merge_parts(const json& merge, size_t index) const {
        if (merge.is_string()) {
            const std::string_view text = merge.get_ref<const std::string&>();
            if (text.starts_with("#version")) return {};
            const size_t space = text.find(' ');
            if (space != text.npos && text.find(' ', space + 1) == text.npos)
                return {text.substr(0, space), text.substr(space + 1)};
        } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
            return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
        }
        FAIL(model, "{}: merge {} is {}, expected \"a b\" or [\"a\", \"b\"]", kMain, index, show_json(merge));
    }

    int32_t part(std::string_view text, size_t index) const {
        const auto id = names_.find(text);
        if (!id)
            FAIL(model, "{}: merge {} uses \"{}\", which is not in \"model.vocab\"", kMain, index,
                 show(text));
        return *id;
    }

    void list_words() {
        for (const auto& [text, id] : names_.all()) {
            if (!is_added_[id] && alphabet_.bytes(text)) file_.words.push_back(id);
        }
    }

    const json::object_t& vocab_;
    int64_t vocab_rows_;
    ByteAlphabet alphabet_;
    TokenizerFile file_;
    Names names_;
    std::vector<bool> is_added_;
    std::vector<std::string_view> texts_;  // of the vocabulary, by id
};

}  // namespace

TokenizerFile read_tokenizer_file(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                  int64_t vocab_rows) {
    const json root = parse_json_ordered(tokenizer_json, std::string(kMain));
    if (!root.is_object()) FAIL(model, "{}: expected an object, found {}", kMain, show_json(root));
    json config;
    if (!tokenizer_config_json.empty()) {
        config = parse_json_ordered(tokenizer_config_json, std::string(kConfig));
        if (!config.is_object()) FAIL(model, "{}: expected an object, found {}", kConfig, show_json(config));
    }
    std::string regex = read_pipeline(root);
    TokenizerFile file = Builder(read_model_options(root), read_all_added(root, config), vocab_rows).take();
    file.pretokenizer_regex = std::move(regex);
    return file;
}

}  // namespace quern
