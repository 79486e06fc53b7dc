// A hash of names, and a hash table. The key differs in every process, so that nobody can make a file whose names
// all collide.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

namespace quern {

struct NameHash {
    using is_transparent = void;  // sets of strings can be asked for views

    size_t operator()(std::string_view s) const {
        static const uint64_t key = make_key();
        uint64_t h = key ^ s.size();
        size_t i = 0;
        for (; i + 8 <= s.size(); i += 8) h = mix(h, load(s.data() + i, 8));
        return static_cast<size_t>(mix(h, load(s.data() + i, s.size() - i)) ^ key);
    }

  private:
    static uint64_t load(const char* p, size_t n) {
        uint64_t v = 0;
        if (n > 0) memcpy(&v, p, n);  // p may be null when n is 0
        return v;
    }
    static uint64_t mix(uint64_t a, uint64_t b) {  // the two halves of a 128-bit product, folded
        const auto product =
            static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xd6e8feb86659fd93ull);
        return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ a;
    }
    static uint64_t make_key() {
        std::random_device device;
        return (static_cast<uint64_t>(device()) << 32) ^ device();
    }
};

/// Maps names, which live elsewhere, to numbers. Flat, since a checkpoint has 124,000 names: allocating a node for
/// each would take most of the time of opening it.
class NameMap {
  public:
    size_t size() const { return entries_.size(); }
    /// Makes room for that many names.
    void reserve(size_t names) {
        entries_.reserve(names);
        if (2 * names > slots_.size()) rehash(std::bit_ceil(std::max(2 * names, kFewest)));
    }
    /// The value of `name`, or null.
    const uint32_t* find(std::string_view name) const {
        if (entries_.empty()) return nullptr;
        const Slot& slot = slots_[place(name, tag_of(name))];
        return slot.tag == 0 ? nullptr : &entries_[slot.entry].value;
    }
    /// Calls found(i, value or null) for name(i), i in [begin, end). One search waits for memory three times; here
    /// many searches wait together.
    template <typename Name, typename Found>
    void find_each(size_t begin, size_t end, Name&& name, Found&& found) const {
        for (; begin < end && !entries_.empty(); begin += kTogether) {
            const size_t count = std::min(end - begin, kTogether);
            uint32_t tags[kTogether];
            for (size_t i = 0; i < count; ++i) {
                tags[i] = tag_of(name(begin + i));
                __builtin_prefetch(&slots_[tags[i] & (slots_.size() - 1)]);
            }
            const auto likely = [&](size_t i) -> const Entry& {
                return entries_[slots_[tags[i] & (slots_.size() - 1)].entry];
            };
            for (size_t i = 0; i < count; ++i) __builtin_prefetch(&likely(i));
            for (size_t i = 0; i < count; ++i) __builtin_prefetch(likely(i).name.data());
            for (size_t i = 0; i < count; ++i) {
                const Slot& slot = slots_[place(name(begin + i), tags[i])];
                found(begin + i, slot.tag == 0 ? nullptr : &entries_[slot.entry].value);
            }
        }
        for (; begin < end; ++begin) found(begin, nullptr);
    }
    /// Adds `name` unless it is there: its value, and whether it was added.
    std::pair<uint32_t, bool> emplace(std::string_view name, uint32_t value) {
        if (2 * (size() + 1) > slots_.size()) rehash(std::max(2 * slots_.size(), kFewest));
        const uint32_t tag = tag_of(name);
        Slot& slot = slots_[place(name, tag)];
        if (slot.tag != 0) return {entries_[slot.entry].value, false};
        slot = {tag, static_cast<uint32_t>(size())};
        entries_.push_back({name, value});
        return {value, true};
    }
    /// f(name, value) for all, in the order in which they were added.
    template <typename F>
    void for_each(F&& f) const {
        for (const Entry& e : entries_) f(e.name, e.value);
    }

  private:
    static constexpr size_t kFewest = 16;
    static constexpr size_t kTogether = 32;  // searches of find_each
    struct Entry {
        std::string_view name;
        uint32_t value;
    };
    struct Slot {
        uint32_t tag = 0;  // of the name's hash; 0: free
        uint32_t entry = 0;
    };

    static uint32_t tag_of(std::string_view name) {
        return std::max(static_cast<uint32_t>(NameHash{}(name)), 1u);
    }
    /// The slot of `name`, or the free one where it would be: at least half of the slots are free.
    size_t place(std::string_view name, uint32_t tag) const {
        const size_t mask = slots_.size() - 1;
        size_t i = tag & mask;
        while (slots_[i].tag != 0 && (slots_[i].tag != tag || entries_[slots_[i].entry].name != name))
            i = (i + 1) & mask;
        return i;
    }
    void rehash(size_t count) {
        std::vector<Slot> slots(count);
        for (const Slot& slot : slots_) {
            size_t i = slot.tag & (count - 1);
            while (slots[i].tag != 0) i = (i + 1) & (count - 1);
            if (slot.tag != 0) slots[i] = slot;
        }
        slots_ = std::move(slots);
    }

    std::vector<Entry> entries_;
    std::vector<Slot> slots_;  // a power of two
};

}  // namespace quern
