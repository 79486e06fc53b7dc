#include "models/added_tokens.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace quern {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), id_order_(tokens_.size()) {
    std::sort(tokens_.begin(), tokens_.end(),
              [](const AddedToken& a, const AddedToken& b) { return a.text < b.text; });
    std::iota(id_order_.begin(), id_order_.end(), size_t{0});
    std::sort(id_order_.begin(), id_order_.end(),
              [&](size_t a, size_t b) { return tokens_[a].id < tokens_[b].id; });
    for (const AddedToken& token : tokens_) starts_[static_cast<unsigned char>(token.text[0])] = true;
}

const AddedToken* AddedTokens::by_id(int32_t id) const {
    const auto found =
        std::lower_bound(id_order_.begin(), id_order_.end(), id,
                         [&](size_t index, int32_t value) { return tokens_[index].id < value; });
    return found != id_order_.end() && tokens_[*found].id == id ? &tokens_[*found] : nullptr;
}

bool AddedTokens::is_special(int32_t id) const {
    const AddedToken* token = by_id(id);
    return token && token->special;
}

std::optional<int32_t> AddedTokens::find(std::string_view text) const {
    const auto found =
        std::lower_bound(tokens_.begin(), tokens_.end(), text,
                         [](const AddedToken& token, std::string_view t) { return token.text < t; });
    if (found == tokens_.end() || found->text != text) return std::nullopt;
    return found->id;
}

/// Narrows the sorted list to the tokens that share the first `depth` bytes with `text`, byte by byte.
const AddedToken* AddedTokens::longest_at(std::string_view text) const {
    const AddedToken* best = nullptr;
    auto begin = tokens_.begin();
    auto end = tokens_.end();
    for (size_t depth = 0; begin != end; ++depth) {
        if (begin->text.size() == depth) {  // a token that ends here sorts before its continuations
            best = &*begin++;
        }
        if (depth == text.size()) break;
        const auto byte = static_cast<unsigned char>(text[depth]);
        const auto at = [depth](const AddedToken& t) { return static_cast<unsigned char>(t.text[depth]); };
        begin = std::partition_point(begin, end, [&](const AddedToken& t) { return at(t) < byte; });
        end = std::partition_point(begin, end, [&](const AddedToken& t) { return at(t) == byte; });
    }
    return best;
}

std::optional<AddedTokens::Match> AddedTokens::next_match(std::string_view text, size_t from) const {
    for (size_t at = from; at < text.size(); ++at) {
        if (!starts_[static_cast<unsigned char>(text[at])]) continue;
        if (const AddedToken* token = longest_at(text.substr(at))) {
            return Match{at, at + token->text.size(), token->id};
        }
    }
    return std::nullopt;
}

}  // namespace quern
