// Cuts text into the pieces inside which BPE may merge: the regular expression of tokenizer.json, by PCRE2.
//
// Only expressions of the Qwen family are known. Each is compiled in a form that matches what the reference
// (Oniguruma with Unicode 16 in Hugging Face tokenizers 0.23) matches for every code point, whatever Unicode
// version the installed PCRE2 has. An unknown expression is an error: two engines may disagree on it, and that would
// silently change the model's input.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace quern {

class PreTokenizer {
  public:
    /// Thread-safe after construction. Throws Error(model) naming the expression when it is not a known one.
    explicit PreTokenizer(std::string_view regex);

    /// Walks over the pieces of one text; together they are exactly the text, in order, none empty.
    class Pieces {
      public:
        /// `text` must be valid UTF-8 and outlive the walk, as must the PreTokenizer.
        Pieces(const PreTokenizer& owner, std::string_view text);
        /// False at the end. Linear over the whole text.
        bool next(std::string_view& piece);

      private:
        struct Match;
        const PreTokenizer* owner_;
        std::string_view text_;
        size_t at_ = 0;
        std::shared_ptr<Match> match_;
    };

    Pieces split(std::string_view text) const { return Pieces(*this, text); }

  private:
    struct Code;
    std::shared_ptr<const Code> code_;
};

}  // namespace quern
