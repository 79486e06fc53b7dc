#include "models/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cstdint>
#include <string>

#include "ggml-like/check.h"
#include "models/utf8.h"

namespace quern {
namespace {

// Class bodies. The escapes after \p{..} are what Unicode 15 to 16 added; PCRE2 older than that (10.42 has
// Unicode 14) does not know them, and for newer ones they change nothing.
constexpr std::string_view kLetters =
    R"(\p{L}\x{1C89}-\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D4A}-\x{10D65})"
    R"(\x{10D6F}-\x{10D85}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389}\x{1138B}\x{1138E})"
    R"(\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10})"
    R"(\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D})"
    R"(\x{16D40}-\x{16D6C}\x{18CFF}\x{1B132}\x{1B155}\x{1DF25}-\x{1DF2A}\x{1E030}-\x{1E06D})"
    R"(\x{1E4D0}-\x{1E4EB}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})";
constexpr std::string_view kMarks =
    R"(\p{M}\x{897}\x{CF3}\x{ECE}\x{10D69}-\x{10D6D}\x{10EFC}-\x{10EFF}\x{11241}\x{113B8}-\x{113C0}\x{113C2})"
    R"(\x{113C5}\x{113C7}-\x{113CA}\x{113CC}-\x{113D0}\x{113D2}\x{113E1}-\x{113E2}\x{11F00}-\x{11F01})"
    R"(\x{11F03}\x{11F34}-\x{11F3A}\x{11F3E}-\x{11F42}\x{11F5A}\x{13440}\x{13447}-\x{13455})"
    R"(\x{1611E}-\x{1612F}\x{1E08F}\x{1E4EC}-\x{1E4EF}\x{1E5EE}-\x{1E5EF})";
constexpr std::string_view kNumbers =
    R"(\p{N}\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59}\x{16130}-\x{16139})"
    R"(\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3}\x{1E4F0}-\x{1E4F9}\x{1E5F1}-\x{1E5FA})";
// Unicode White_Space. PCRE2's own \s also takes U+180E, which left that property in Unicode 6.3.
constexpr std::string_view kSpaces =
    R"(\x09-\x0d\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

struct KnownRegex {
    std::string_view text;     // as in tokenizer.json
    std::string_view pattern;  // the same for PCRE2, with {L} {M} {N} {S} for the class bodies above
};

constexpr KnownRegex kKnown[] = {
    // Qwen3.5, Qwen3.6: marks belong to words.
    {R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re",
     R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{L}{N}]?[{L}{M}]+|[{N}]| ?[^{S}{L}{M}{N}]+[\r\n]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+)re"},
    // Qwen2, Qwen2.5, Qwen3.
    {R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re",
     R"re((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{L}{N}]?[{L}]+|[{N}]| ?[^{S}{L}{N}]+[\r\n]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+)re"},
};

std::string expand(std::string_view pattern) {
    std::string out;
    for (size_t i = 0; i < pattern.size(); ++i) {
        const std::string_view name = pattern.substr(i, 3);
        const std::string_view body = name == "{L}"   ? kLetters
                                      : name == "{M}" ? kMarks
                                      : name == "{N}" ? kNumbers
                                      : name == "{S}" ? kSpaces
                                                      : std::string_view();
        if (body.empty()) {
            out += pattern[i];
        } else {
            out += body;
            i += 2;
        }
    }
    return out;
}

std::string pcre2_message(int code) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(code, text.data(), text.size());
    return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct PreTokenizer::Code {
    pcre2_code* code = nullptr;
    pcre2_match_context* context = nullptr;

    explicit Code(const std::string& pattern) {
        int error = 0;
        PCRE2_SIZE offset = 0;
        // Anchored here: as an option of a match it would keep PCRE2 from its JIT code.
        code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &offset, nullptr);
        if (!code) {
            FAIL(runtime, "[tokenizer] PCRE2 does not compile the pre-tokenizer expression: {} (at {})",
                 pcre2_message(error), offset);
        }
        pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // without JIT, pcre2_match interprets
        context = pcre2_match_context_create(nullptr);
        // The interpreter counts one step per character it gives back; long runs of spaces need many.
        if (context) pcre2_set_match_limit(context, UINT32_MAX);
    }
    Code(const Code&) = delete;
    Code& operator=(const Code&) = delete;
    ~Code() {
        pcre2_match_context_free(context);
        pcre2_code_free(code);
    }
};

struct PreTokenizer::Pieces::Match {
    pcre2_match_data* data = pcre2_match_data_create(1, nullptr);

    Match() {
        if (!data) FAIL(memory, "[tokenizer] no memory for a PCRE2 match");
    }
    Match(const Match&) = delete;
    Match& operator=(const Match&) = delete;
    ~Match() { pcre2_match_data_free(data); }
};

PreTokenizer::PreTokenizer(std::string_view regex) {
    for (const KnownRegex& known : kKnown) {
        if (regex == known.text) {
            code_ = std::make_shared<const Code>(expand(known.pattern));
            return;
        }
    }
    FAIL(model,
         "tokenizer.json: the pre-tokenizer expression is none of the Qwen family, so text would be cut "
         "differently "
         "from what the model learned. Expected {}\nfound {}",
         kKnown[0].text, regex.substr(0, 1000));
}

PreTokenizer::Pieces::Pieces(const PreTokenizer& owner, std::string_view text)
    : owner_(&owner), text_(text), match_(std::make_shared<Match>()) {}

bool PreTokenizer::Pieces::next(std::string_view& piece) {
    if (at_ == text_.size()) return false;
    const Code& code = *owner_->code_;
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
    // Every character is in some branch, so a match starts where the last one ended. Checking UTF-8 here
    // would make the walk quadratic: PCRE2 checks to the end of the text on each call.
    constexpr uint32_t kOptions = PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY;
    int found = pcre2_match(code.code, subject, text_.size(), at_, kOptions, match_->data, code.context);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {
        found = pcre2_match(code.code, subject, text_.size(), at_, kOptions | PCRE2_NO_JIT, match_->data,
                            code.context);
    }
    if (found < 0)
        FAIL(runtime, "[tokenizer] the pre-tokenizer failed at byte {}: {}", at_, pcre2_message(found));
    const size_t end = pcre2_get_ovector_pointer(match_->data)[1];
    piece = text_.substr(at_, end - at_);
    at_ = end;
    return true;
}

}  // namespace quern
