// JsonPull: a strict JSON reader that returns one token at a time and builds nothing.
//
// For the large files of a checkpoint (safetensors headers, index.json, tokenizer.json: over 100,000 entries)
// whose shape is known in advance. Every other JSON file goes through a DOM. Rules of RFC 8259: no comments,
// no trailing commas, no byte order mark, UTF-8 checked, lone surrogates refused. Never recurses. Errors:
// Error(model), with `what` (the file) and the byte offset.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace quern {

class JsonPull {
  public:
    /// `text` must outlive the reader and every string it returned.
    JsonPull(std::string_view text, std::string what) : text_(text), what_(std::move(what)) {}

    /// The next character that is not white space, 0 at the end.
    char peek();
    /// Takes `c` if it is next.
    bool accept(char c);
    /// Takes `c` or fails; `where` says what was being read ("after the tensor name").
    void expect(char c, const char* where);
    /// A string. The view points into the text, or into `scratch` when the string has escapes.
    std::string_view string(std::string& scratch, const char* where);
    /// An integer 0 .. `limit` without sign, fraction, exponent or leading zeros.
    uint64_t integer(uint64_t limit, const char* where);
    /// Takes an integer as above if one is next, else nothing.
    std::optional<uint64_t> accept_integer(uint64_t limit);
    /// Skips one value of any kind, at most 64 levels deep.
    void skip_value(const char* where);
    /// Only white space may remain.
    void end();

    size_t offset() const { return at_; }
    /// Continues at `offset`, usually an earlier offset().
    void rewind(size_t offset) { at_ = offset; }
    [[noreturn]] void fail(const std::string& message) const;

  private:
    void skip_space();
    void unescape(std::string& out);
    uint32_t hex4();
    void skip_scalar(const char* where);

    std::string_view text_;
    std::string what_;
    size_t at_ = 0;
};

/// True when `s` is well-formed UTF-8 (no surrogates, no overlong forms).
bool valid_utf8(std::string_view s);

/// `s` for an error message: anything but printable ASCII as \xNN, cut after `limit` bytes.
std::string escaped(std::string_view s, size_t limit = 120);

}  // namespace quern
