// Tokens outside the BPE vocabulary: control markers such as <|im_end|>, and tags such as <think>.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

struct AddedToken {
    int32_t id = 0;
    std::string text;
    bool special = false;  // dropped by decode(skip_special)
};

class AddedTokens {
  public:
    AddedTokens() = default;
    /// Texts must be different and not empty, ids different.
    explicit AddedTokens(std::vector<AddedToken> tokens);

    bool contains(int32_t id) const { return by_id(id) != nullptr; }
    bool is_special(int32_t id) const;
    std::optional<int32_t> find(std::string_view text) const;

    struct Match {
        size_t begin, end;
        int32_t id;
    };
    /// The first place at or after `from` where a token begins; if several do, the longest. Costs at most the
    /// length of the longest token per byte of text.
    std::optional<Match> next_match(std::string_view text, size_t from) const;

  private:
    const AddedToken* by_id(int32_t id) const;
    const AddedToken* longest_at(std::string_view text) const;

    std::vector<AddedToken> tokens_;  // by text
    std::vector<size_t> id_order_;    // indices into tokens_, by id
    std::array<bool, 256> starts_{};  // bytes with which some token starts
};

}  // namespace quern
