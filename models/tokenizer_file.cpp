#include "models/tokenizer_file.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/parallel.h"
#include "models/byte_alphabet.h"
#include "models/tokenizer_text.h"

namespace quern {
namespace {

using json = nlohmann::ordered_json;

constexpr std::string_view kMain = kTokenizerFile;
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

/// What is in the place of something that must be there.
std::string show_found(const json& value) {
    if (!value.is_null()) return show_json(value);
    return "none; is the file whole? Compare its size with the original's, or download it again";
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
    if (!value.is_object())
        FAIL(model, "{}: expected an object \"{}\", found {}", kMain, where, show_found(value));
    return value;
}

const std::string& string_at(const json& parent, const char* key, std::string_view where) {
    const json& value = member(parent, key);
    if (!value.is_string())
        FAIL(model, "{}: expected a string \"{}.{}\", found {}", kMain, where, key, show_found(value));
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

void check_model_options(const json& root) {
    const json& model = object_at(root, "model", "model");
    if (!member(model, "type").is_null()) expect_type(model, "BPE", "model");
    for (const char* key :
         {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"}) {
        expect_off(model, key, "model");
    }
}

AddedToken read_added(const json& value, const json& id, std::string_view file) {
    if (!value.is_object())
        FAIL(model, "{}: an added token is {}, expected an object", file, show_json(value));
    const json& content = member(value, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty()) {
        FAIL(model, "{}: the added token {} has no text (\"content\")", file, show_json(value));
    }
    AddedToken token{token_id_from(id), content.get<std::string>(), false};
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

// ---- vocabulary and merges ----

class Builder {
  public:
    Builder(const TokenizerText& text, std::vector<AddedToken> added, int64_t vocab_rows, int threads)
        : text_(text), vocab_rows_(vocab_rows), threads_(threads) {
        file_.added = std::move(added);
        check_vocab();
        place_tokens();
        for (int byte = 0; byte < 256; ++byte) {
            const uint32_t* id = text_.vocab.find(alphabet_.letter(byte));
            if (!id) {
                FAIL(model,
                     "{}: the vocabulary has no token for the byte 0x{:02x}, so some text could not be "
                     "encoded",
                     kMain, byte);
            }
            file_.byte_ids[byte] = static_cast<int32_t>(*id);
            refuse_added(file_.byte_ids[byte], "a single byte");
        }
        const json& model = member(text_.rest, "model");
        read_merges(member(model, "merges"));
        if (flag_at(model, "ignore_merges", "model")) list_words();
    }
    TokenizerFile take() { return std::move(file_); }

  private:
    void check_vocab() const {
        object_at(member(text_.rest, "model"), "vocab", "model.vocab");
        if (text_.vocab.size() > 1u << 24)
            FAIL(model, "{}: \"model.vocab\" has {} entries, too many", kMain, text_.vocab.size());
        if (text_.bad_id) {
            FAIL(model, "{}: the id of \"{}\" in \"model.vocab\" is {}", kMain, show(text_.bad_id->text),
                 show_json(text_.bad_id->value));
        }
    }

    /// Puts every token at its id: in range, no id twice, no gap.
    void place_tokens() {
        const NameMap& vocab = text_.vocab;
        const auto is_new = [&](const AddedToken& token) { return !vocab.find(token.text); };
        const size_t total = vocab.size() + std::count_if(file_.added.begin(), file_.added.end(), is_new);
        is_added_.resize(total);
        texts_.resize(total);
        vocab.for_each([&](std::string_view text, uint32_t id) { place(static_cast<int32_t>(id), text); });
        for (const AddedToken& token : file_.added) {
            const uint32_t* known = vocab.find(token.text);
            if (known && static_cast<int32_t>(*known) != token.id) {
                FAIL(model, "the added token \"{}\" has the id {}, but the id {} in \"model.vocab\"",
                     show(token.text), token.id, *known);
            }
            if (!known) place(token.id, token.text);
            is_added_[token.id] = true;
        }
        // As many tokens as slots, each in a slot of its own: there is no gap left.
        write_pieces();
    }

    void write_pieces() {
        size_t letters = 0;
        for (const std::string_view text : texts_) letters += text.size();
        file_.pieces.reserve(texts_.size(), letters);
        std::string bytes;
        // What is not written in the byte alphabet stands for itself when decoding, as in the reference.
        for (const std::string_view text : texts_)
            file_.pieces.add(alphabet_.read(text, bytes) ? bytes : text);
    }

    void place(int32_t id, std::string_view text) {
        if (vocab_rows_ > 0 && id >= vocab_rows_) {
            FAIL(model, "token \"{}\" has the id {}, but the embedding of the model has only {} rows",
                 show(text), id, vocab_rows_);
        }
        if (static_cast<size_t>(id) >= texts_.size()) {
            FAIL(model,
                 "token \"{}\" has the id {}, but there are only {} tokens: ids have gaps. Is {} missing or "
                 "of "
                 "another model?",
                 show(text), id, texts_.size(), kConfig);
        }
        if (texts_[id].data()) FAIL(model, "\"{}\" and another token have the same id {}", show(text), id);
        texts_[id] = text;
    }

    /// Otherwise plain text could turn into a control token, which Markers::literal promises it never does.
    void refuse_added(int32_t id, std::string_view what) const {
        if (is_added_[id]) FAIL(model, "{}: token {} is both an added token and {}", kMain, id, what);
    }

    void read_merges(const json& list) {
        if (!list.is_array())
            FAIL(model, "{}: expected a list \"model.merges\", found {}", kMain, show_found(list));
        std::vector<MergeRule> found = find_parts();
        // Trainers number the products in the order of the merges, so the next id is mostly the one.
        int32_t guess = 256;
        size_t rules = 0;
        for (size_t i = 0; i < found.size(); ++i) {
            const auto& [left, right] = text_.merges[i];
            if (!left.data()) {
                refuse_bad(i);
                continue;
            }
            MergeRule& rule = found[rules++] = found[i];
            if (rule.left < 0) refuse_unknown(left, i);
            if (rule.right < 0) refuse_unknown(right, i);
            rule.result = product(left, right, guess, i);
            refuse_added(rule.result, "the result of a merge");
            guess = rule.result + 1;
        }
        found.resize(rules);
        file_.merges = std::move(found);
    }

    /// The two parts of each merge of the file; -1 where the vocabulary does not have one.
    std::vector<MergeRule> find_parts() const {
        std::vector<MergeRule> found(text_.merges.size());
        const auto name = [&](size_t i) {
            const TokenizerText::Merge& merge = text_.merges[i / 2];
            return i % 2 == 0 ? merge.left : merge.right;
        };
        for_each_parallel(threads_, (found.size() + kBlock - 1) / kBlock, [&](size_t block) {
            const size_t end = std::min((block + 1) * kBlock, found.size());
            text_.vocab.find_each(2 * block * kBlock, 2 * end, name, [&](size_t i, const uint32_t* id) {
                MergeRule& rule = found[i / 2];
                (i % 2 == 0 ? rule.left : rule.right) = id ? static_cast<int32_t>(*id) : -1;
            });
        });
        return found;
    }

    void refuse_bad(size_t index) const {
        if (!text_.bad_merge || text_.bad_merge->index != index) return;
        FAIL(model, "{}: merge {} is {}, expected \"a b\" or [\"a\", \"b\"]", kMain, index,
             show_json(text_.bad_merge->value));
    }

    [[noreturn]] void refuse_unknown(std::string_view text, size_t index) const {
        FAIL(model, "{}: merge {} uses \"{}\", which is not in \"model.vocab\"", kMain, index, show(text));
    }

    int32_t product(std::string_view left, std::string_view right, int32_t guess, size_t index) const {
        if (static_cast<size_t>(guess) < texts_.size() && !is_added_[guess]) {
            const std::string_view text = texts_[guess];
            if (text.size() == left.size() + right.size() && text.starts_with(left) && text.ends_with(right))
                return guess;
        }
        const std::string text = std::string(left).append(right);
        const uint32_t* id = text_.vocab.find(text);
        if (!id) refuse_unknown(text, index);
        return static_cast<int32_t>(*id);
    }

    void list_words() {
        std::string bytes;
        text_.vocab.for_each([&](std::string_view text, uint32_t id) {
            if (!is_added_[id] && alphabet_.read(text, bytes))
                file_.words.push_back(static_cast<int32_t>(id));
        });
    }

    static constexpr size_t kBlock = 8192;  // merges that one thread searches at a time

    const TokenizerText& text_;
    int64_t vocab_rows_;
    int threads_;
    ByteAlphabet alphabet_;
    TokenizerFile file_;
    std::vector<bool> is_added_;
    std::vector<std::string_view> texts_;  // by id
};

}  // namespace

TokenizerFile read_tokenizer_file(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                                  int64_t vocab_rows, int threads) {
    const TokenizerText text =
        read_tokenizer_text(tokenizer_json, static_cast<size_t>(std::max(vocab_rows, int64_t{0})));
    const json& root = text.rest;
    if (!root.is_object()) FAIL(model, "{}: expected an object, found {}", kMain, show_json(root));
    json config;
    if (!tokenizer_config_json.empty()) {
        config = parse_json_ordered(tokenizer_config_json, std::string(kConfig));
        if (!config.is_object()) FAIL(model, "{}: expected an object, found {}", kConfig, show_json(config));
    }
    std::string regex = read_pipeline(root);
    check_model_options(root);
    TokenizerFile file = Builder(text, read_all_added(root, config), vocab_rows, threads).take();
    file.pretokenizer_regex = std::move(regex);
    return file;
}

}  // namespace quern
