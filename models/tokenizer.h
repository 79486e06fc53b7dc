// Text to token ids and back: byte-level BPE as declared by tokenizer.json of the Qwen2, Qwen3, Qwen3.5 and Qwen3.6
// families, with the same result as Hugging Face tokenizers for every string.
//
// Order of encoding: invalid UTF-8 is replaced by U+FFFD (one per maximal subpart, what Python's
// errors="replace" gives the reference); added tokens are cut out of the raw text (leftmost, then longest);
// the rest is normalised to NFC, cut by the pre-tokenizer expression and merged by rank. No BOS or EOS is
// added.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/added_tokens.h"
#include "models/bpe.h"
#include "models/pretokenizer.h"
#include "models/token_pieces.h"

namespace quern {

class Tokenizer {
  public:
    /// Reads tokenizer.json and, if there, tokenizer_config.json from a directory (only its added_tokens_decoder has
    /// the audio and TTS tokens of Qwen3.6). `vocab_rows`: rows of the embedding, 0 = unknown; ids from there on are
    /// an error. Throws Error(model) for anything missing, contradictory or not supported. Merges are looked up on
    /// `threads` threads.
    static Tokenizer load(const std::string& directory, int64_t vocab_rows, int threads = 1);
    /// The same from the text of the files; an empty config means there is none.
    static Tokenizer from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                               int64_t vocab_rows, int threads = 1);

    enum class Markers {
        literal,  // text stays text and never becomes an added token
        control,  // the text of an added token becomes that token
    };
    /// Any bytes. Thread-safe. O(n log n) in the length of the text. Error(usage) for a word above 2^31
    /// bytes.
    std::vector<int32_t> encode(std::string_view utf8, Markers markers) const;

    /// The bytes of all tokens, joined, as UTF-8; what is not UTF-8 becomes U+FFFD, one per maximal subpart. Skips ids
    /// outside [0, size()) and, with `skip_special`, special tokens (but not all added ones).
    std::string decode(std::span<const int32_t> ids, bool skip_special) const;

    /// The bytes of one token, not always whole characters (of an added token: its text); empty for ids outside
    /// [0, size()). Valid as long as the tokenizer.
    std::string_view piece(int32_t id) const;
    bool is_special(int32_t id) const { return added_.is_special(id); }
    /// Added tokens: all special ones, and the others such as <think> and <tool_call>.
    bool is_added(int32_t id) const { return added_.contains(id); }
    /// The added token with this text: "<|im_end|>" -> id.
    std::optional<int32_t> find_added(std::string_view text) const { return added_.find(text); }
    /// Ids are below this. Rows of the embedding from here on are padding and must never be sampled.
    int64_t size() const { return static_cast<int64_t>(pieces_.size()); }

  private:
    explicit Tokenizer(struct TokenizerFile&& file);
    void encode_text(std::string_view text, Bpe::Scratch& scratch, std::vector<int32_t>& out) const;
    std::optional<int32_t> find_word(std::string_view bytes) const;

    TokenPieces pieces_;  // by id
    AddedTokens added_;
    PreTokenizer pretokenizer_;
    Bpe bpe_;
    std::vector<int32_t> words_;  // ids by bytes, only for tokenizers that look up whole words first
};

/// Decodes a stream of ids into text that never ends inside a character. The results of all push() calls and of
/// flush(), joined, are decode() of all ids. Holds back at most three bytes.
class StreamDecoder {
  public:
    /// `tokenizer` must outlive the decoder.
    StreamDecoder(const Tokenizer& tokenizer, bool skip_special)
        : tokenizer_(&tokenizer), skip_special_(skip_special) {}
    /// The text that `id` completes; may be empty.
    std::string push(int32_t id);
    /// At the end: U+FFFD for an unfinished character, else empty. Resets the decoder.
    std::string flush();

  private:
    const Tokenizer* tokenizer_;
    bool skip_special_;
    std::string pending_;
};

}  // namespace quern
