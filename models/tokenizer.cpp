#include "models/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

#include "ggml-like/check.h"
#include "models/nfc.h"
#include "models/tokenizer_file.h"
#include "models/utf8.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

/// The largest real tokenizer.json is 20 MB; a file far beyond is not one.
constexpr uintmax_t kMaxFileBytes = 512u << 20;

std::string read_text_file(const fs::path& path) {
    std::error_code error;
    const uintmax_t bytes = fs::file_size(path, error);
    if (error) FAIL(model, "{}: cannot be read: {}", path.string(), error.message());
    if (bytes > kMaxFileBytes) FAIL(model, "{}: {} bytes are too many for this file", path.string(), bytes);
    std::ifstream stream(path, std::ios::binary);
    std::string text(bytes, '\0');
    if (!stream.read(text.data(), static_cast<std::streamsize>(bytes))) {
        FAIL(model, "{}: cannot be read, or shorter than its {} bytes", path.string(), bytes);
    }
    return text;
}

}  // namespace

Tokenizer::Tokenizer(TokenizerFile&& file)
    : pieces_(std::move(file.pieces)),
      added_(std::move(file.added)),
      pretokenizer_(file.pretokenizer_regex),
      bpe_(file.byte_ids, file.merges, static_cast<int32_t>(pieces_.size())),
      words_(std::move(file.words)) {
    std::sort(words_.begin(), words_.end(), [&](int32_t a, int32_t b) { return pieces_[a] < pieces_[b]; });
}

Tokenizer Tokenizer::from_json(std::string_view tokenizer_json, std::string_view tokenizer_config_json,
                               int64_t vocab_rows, int threads) {
    return Tokenizer(read_tokenizer_file(tokenizer_json, tokenizer_config_json, vocab_rows, threads));
}

Tokenizer Tokenizer::load(const std::string& directory, int64_t vocab_rows, int threads) {
    const fs::path folder(directory);
    const fs::path main_file = folder / "tokenizer.json";
    std::error_code error;
    if (!fs::is_regular_file(main_file, error)) {
        FAIL(model,
             "{}: no such file. The tokenizer is read from tokenizer.json; copy it from the original model",
             main_file.string());
    }
    const fs::path config_file = folder / "tokenizer_config.json";
    const bool has_config = fs::exists(config_file, error);
    try {
        return from_json(read_text_file(main_file), has_config ? read_text_file(config_file) : "", vocab_rows,
                         threads);
    } catch (const Error& e) {
        const std::string_view message = e.what();
        if (message.find(directory) != std::string_view::npos) throw;
        throw Error(e.kind(), fmt::format("{}: {}", directory, message), e.file(), e.line());
    }
}

std::optional<int32_t> Tokenizer::find_word(std::string_view bytes) const {
    const auto found = std::lower_bound(words_.begin(), words_.end(), bytes,
                                        [&](int32_t id, std::string_view b) { return pieces_[id] < b; });
    if (found == words_.end() || pieces_[*found] != bytes) return std::nullopt;
    return *found;
}

void Tokenizer::encode_text(std::string_view text, Bpe::Scratch& scratch, std::vector<int32_t>& out) const {
    if (text.empty()) return;
    std::string normalised;
    if (!is_trivially_nfc(text)) {
        normalised = to_nfc(text);
        text = normalised;
    }
    auto pieces = pretokenizer_.split(text);
    for (std::string_view piece; pieces.next(piece);) {
        if (const auto whole = find_word(piece)) {
            out.push_back(*whole);
        } else {
            bpe_.encode(piece, scratch, out);
        }
    }
}

std::vector<int32_t> Tokenizer::encode(std::string_view utf8, Markers markers) const {
    std::string repaired;
    if (!is_valid_utf8(utf8)) {
        append_utf8_lossy(repaired, utf8);
        utf8 = repaired;
    }
    Bpe::Scratch scratch(utf8.size());
    std::vector<int32_t> out;
    size_t at = 0;
    if (markers == Markers::control) {
        while (const auto match = added_.next_match(utf8, at)) {
            encode_text(utf8.substr(at, match->begin - at), scratch, out);
            out.push_back(match->id);
            at = match->end;
        }
    }
    encode_text(utf8.substr(at), scratch, out);
    return out;
}

std::string_view Tokenizer::piece(int32_t id) const {
    return id >= 0 && id < size() ? pieces_[static_cast<size_t>(id)] : std::string_view();
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
    std::string bytes;
    for (int32_t id : ids) {
        if (!skip_special || !is_special(id)) bytes += piece(id);
    }
    if (is_valid_utf8(bytes)) return bytes;
    std::string text;
    append_utf8_lossy(text, bytes);
    return text;
}

std::string StreamDecoder::push(int32_t id) {
    if (!skip_special_ || !tokenizer_->is_special(id)) pending_ += tokenizer_->piece(id);
    const size_t whole = pending_.size() - utf8_cut_tail(pending_);
    std::string text;
    append_utf8_lossy(text, std::string_view(pending_).substr(0, whole));
    pending_.erase(0, whole);
    return text;
}

std::string StreamDecoder::flush() {
    std::string text;
    append_utf8_lossy(text, pending_);
    pending_.clear();
    return text;
}

}  // namespace quern
