// Byte-pair merges inside one piece of text.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace quern {

/// `left` and `right`, neighbours, become `result`. The position in the list is the rank: lower merges first.
struct MergeRule {
    int32_t left, right, result;
};

class Bpe {
  public:
    /// Working memory of encode, reused between pieces. One per thread, and for one Bpe.
    class Scratch {
      public:
        /// For about so many bytes of text: more of it remembers more words.
        explicit Scratch(size_t bytes)
            : known(std::bit_floor(std::clamp<size_t>(bytes / 8, 1, kMaxPlaces))) {}

      private:
        friend class Bpe;
        /// A short piece and its tokens: most words of a text come again. Each piece has one place, which the last one
        /// that falls on it keeps, so no text is slower than without.
        struct Known {
            std::array<char, 15> bytes;
            uint8_t length;  // 0: nobody's
            std::array<int32_t, 3> ids;
            uint32_t count;
        };
        static constexpr size_t kMaxPlaces = 1 << 12;
        std::vector<Known> known;  // a power of two
        struct Symbol {
            int32_t id;  // kGone once merged into the symbol before
            int32_t previous, next;
            uint32_t rank;  // of the merge with the next symbol, or kNone
        };
        std::vector<Symbol> symbols;
        std::vector<uint64_t> queue;  // min-heap of rank << 32 | position
    };

    Bpe() = default;
    /// `byte_ids[b]` is the token of the single byte b. If several rules have the same pair, the last one counts,
    /// as in the reference. Ids must be in [0, vocab).
    Bpe(const std::array<int32_t, 256>& byte_ids, std::span<const MergeRule> rules, int32_t vocab);

    /// Appends the tokens of `piece` (any bytes) to `out`. O(n log n). Pieces above 2^31 - 1 bytes are
    /// Error(usage).
    void encode(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const;

  private:
    struct Entry {
        int32_t right, result;
        uint32_t rank;
    };
    const Entry* find(int32_t left, int32_t right) const;
    void refresh(Scratch& scratch, int32_t at) const;
    void merge(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const;

    std::array<int32_t, 256> byte_ids_{};
    // Rules sorted by (left, right): those of `left` are first_[left] .. first_[left + 1] in entries_. Unlike a hash
    // table this has no worst case that a crafted file could provoke.
    std::vector<uint32_t> first_;
    std::vector<Entry> entries_;
};

}  // namespace quern
