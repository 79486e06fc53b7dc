#include "tools/engine/automaton.h"

#include <algorithm>
#include <functional>
#include <unordered_set>

#include "ggml-like/check.h"

namespace quern {

using Part = AutomatonBuilder::Part;
using Kind = Automaton::Kind;

int32_t AutomatonBuilder::add(Automaton::State state) {
    if (out_.states.size() >= kMaxStates)
        FAIL(usage, "the grammar is too large: repetitions make more than {} states of it", kMaxStates);
    out_.states.push_back(state);
    return static_cast<int32_t>(out_.states.size()) - 1;
}

Part AutomatonBuilder::empty() {
    const int32_t one = add({});
    return {one, one + 1, one, one};
}

Part AutomatonBuilder::bytes(uint8_t low, uint8_t high) {
    const int32_t one = add({.kind = Kind::bytes, .low = low, .high = high}), end = add({});
    out_.states[static_cast<size_t>(one)].next = end;
    return {one, end + 1, one, end};
}

Part AutomatonBuilder::call(int32_t rule) {
    const int32_t one = add({.kind = Kind::call, .other = rule}), end = add({});
    out_.states[static_cast<size_t>(one)].next = end;
    return {one, end + 1, one, end};
}

Part AutomatonBuilder::text(const std::string& text) {
    Part out = empty();
    for (const char c : text) out = sequence(out, bytes(static_cast<uint8_t>(c), static_cast<uint8_t>(c)));
    return out;
}

Part AutomatonBuilder::sequence(Part a, Part b) {
    out_.states[static_cast<size_t>(a.end)].next = b.start;
    return {std::min(a.first, b.first), std::max(a.last, b.last), a.start, b.end};
}

Part AutomatonBuilder::either(Part a, Part b) {
    const int32_t fork = add({.next = a.start, .other = b.start}), end = add({});
    for (const Part& part : {a, b}) out_.states[static_cast<size_t>(part.end)].next = end;
    return {std::min(a.first, b.first), end + 1, fork, end};
}

Part AutomatonBuilder::copy(Part part) {
    const auto shift = static_cast<int32_t>(out_.states.size()) - part.first;
    for (int32_t i = part.first; i < part.last; ++i) {
        Automaton::State state = out_.states[static_cast<size_t>(i)];
        if (state.next >= 0) state.next += shift;
        if (state.other >= 0 && state.kind != Kind::call) state.other += shift;
        add(state);
    }
    return {part.first + shift, part.last + shift, part.start + shift, part.end + shift};
}

Part AutomatonBuilder::repeat(Part part, int least, int most) {
    if (most == 0) return empty();
    // `part` stays as it is until the last copy has been made.
    const int copies = most == kMany ? std::max(least, 1) : most;
    std::vector<Part> parts = {part};
    for (int i = 1; i < copies; ++i) parts.push_back(copy(part));
    const int32_t end = add({});
    Part out = empty();
    const int32_t first = part.first;
    for (int i = 0; i < copies; ++i) {
        const Part one = parts[static_cast<size_t>(i)];
        if (i >= least) {
            const int32_t fork = add({.next = one.start, .other = end});
            out = sequence(out, {fork, fork + 1, fork, one.end});
        } else {
            out = sequence(out, one);
        }
        if (most == kMany && i + 1 == copies) {  // once more, or not
            const int32_t again = add({.next = one.start, .other = end});
            out_.states[static_cast<size_t>(out.end)].next = again;
            return {first, again + 1, out.start, end};
        }
    }
    out_.states[static_cast<size_t>(out.end)].next = end;
    return {first, static_cast<int32_t>(out_.states.size()), out.start, end};
}

/// Code points that are written with the same number of bytes, and whose first byte alone says that they fit.
Part AutomatonBuilder::utf8(char32_t low, char32_t high) {
    const auto encode = [](char32_t c) {
        std::vector<uint8_t> out;
        const int tail = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        constexpr uint8_t kLead[] = {0, 0xC0, 0xE0, 0xF0};
        out.push_back(static_cast<uint8_t>(kLead[tail] | (c >> (6 * tail))));
        for (int i = tail - 1; i >= 0; --i)
            out.push_back(static_cast<uint8_t>(0x80 | ((c >> (6 * i)) & 0x3F)));
        return out;
    };
    for (const char32_t border : {0x7Fu, 0x7FFu, 0xFFFFu})
        if (low <= border && high > border) {
            const Part a = utf8(low, border);
            return either(a, utf8(border + 1, high));
        }
    const size_t length = encode(low).size();
    for (size_t i = 1; i < length; ++i) {  // until all but some first bytes are free or fixed
        const char32_t mask = (char32_t{1} << (6 * i)) - 1;
        if ((low & ~mask) == (high & ~mask)) continue;
        if ((low & mask) != 0) {
            const Part a = utf8(low, low | mask);
            return either(a, utf8((low | mask) + 1, high));
        }
        if ((high & mask) != mask) {
            const Part a = utf8(low, (high & ~mask) - 1);
            return either(a, utf8(high & ~mask, high));
        }
    }
    const std::vector<uint8_t> from = encode(low), to = encode(high);
    Part out = bytes(from[0], to[0]);
    for (size_t i = 1; i < length; ++i) out = sequence(out, bytes(from[i], to[i]));
    return out;
}

/// A character that a string of JSON cannot have as it is.
Part AutomatonBuilder::escaped(unsigned char c) {
    const size_t known = std::string_view("\b\t\n\f\r\"\\").find(static_cast<char>(c));
    if (known != std::string_view::npos) return text({'\\', "btnfr\"\\"[known]});
    return text(fmt::format("\\u{:04x}", c));
}

Part AutomatonBuilder::character(Ranges ranges, bool inverted) {
    constexpr char32_t kLast = 0x10FFFF;
    std::sort(ranges.begin(), ranges.end());
    Ranges wanted;
    if (inverted) {
        char32_t next = 0;
        for (const auto& [low, high] : ranges) {
            if (low > next) wanted.emplace_back(next, low - 1);
            next = std::max<char32_t>(next, high + 1);
        }
        if (next <= kLast) wanted.emplace_back(next, kLast);
    } else {
        wanted = ranges;
    }
    Ranges scalars = {{0, 0xD7FF}, {0xE000, kLast}};  // no surrogates
    std::vector<Part> parts;
    if (json_) {
        scalars = {{' ', '!'}, {'#', '['}, {']', 0xD7FF}, {0xE000, kLast}};
        for (const auto& [low, high] : wanted)
            for (char32_t c = low; c <= std::min<char32_t>(high, '\\'); ++c)
                if (c < ' ' || c == '"' || c == '\\') parts.push_back(escaped(static_cast<unsigned char>(c)));
    }
    for (const auto& [low, high] : wanted)
        for (const auto& [first, last] : scalars)
            if (low <= last && high >= first)
                parts.push_back(utf8(std::max(low, first), std::min(high, last)));
    if (parts.empty()) FAIL(usage, "a class of characters is empty");
    Part out = parts[0];
    for (size_t i = 1; i < parts.size(); ++i) out = either(out, parts[i]);
    return out;
}

Automaton AutomatonBuilder::finish(const std::vector<Part>& rules, const std::vector<std::string>& names) {
    for (const Part& rule : rules) out_.states[static_cast<size_t>(rule.end)].kind = Kind::final;
    for (Automaton::State& state : out_.states)
        if (state.kind == Kind::call) state.other = rules[static_cast<size_t>(state.other)].start;
    constexpr size_t kMaxRules = 1000;
    if (rules.size() > kMaxRules) FAIL(usage, "the grammar has more than {} rules", kMaxRules);
    refuse_left_recursion(rules, names);
    out_.start = rules[0].start;
    return std::move(out_);
}

/// What is reached without a byte: a rule that is reached so from within itself would begin again for ever.
void AutomatonBuilder::refuse_left_recursion(const std::vector<Part>& rules,
                                             const std::vector<std::string>& names) const {
    const size_t n = out_.states.size();
    std::vector<char> nullable(n, 0);  // a rule's end can be reached from here without a byte
    const auto at = [&](int32_t i) { return i >= 0 && nullable[static_cast<size_t>(i)]; };
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = n; i-- > 0;) {
            const Automaton::State& s = out_.states[i];
            const bool now = s.kind == Kind::final ||
                             (s.kind == Kind::split && (at(s.next) || at(s.other))) ||
                             (s.kind == Kind::call && at(s.other) && at(s.next));
            if (now && !nullable[i]) nullable[i] = changed = true;
        }
    }
    for (size_t r = 0; r < rules.size(); ++r) {
        std::vector<char> seen(n, 0);
        std::vector<int32_t> open = {rules[r].start};
        while (!open.empty()) {
            const int32_t i = open.back();
            open.pop_back();
            if (i < 0 || seen[static_cast<size_t>(i)]++) continue;
            const Automaton::State& s = out_.states[static_cast<size_t>(i)];
            if (s.kind == Kind::call && s.other == rules[r].start)
                FAIL(usage, "the rule '{}' begins with itself; write it with a repetition", names[r]);
            if (s.kind == Kind::call) open.push_back(s.other);
            if (s.kind == Kind::split || (s.kind == Kind::call && at(s.other))) open.push_back(s.next);
            if (s.kind == Kind::split) open.push_back(s.other);
        }
    }
}

bool may_share_a_text(const Automaton& a, const Automaton& b) {
    constexpr size_t kMaxPairs = 1u << 16;
    std::unordered_set<uint64_t> seen;
    std::vector<std::pair<int32_t, int32_t>> open;
    const auto visit = [&](int32_t i, int32_t j) {
        const uint64_t both =
            static_cast<uint64_t>(static_cast<uint32_t>(i)) << 32 | static_cast<uint32_t>(j);
        if (i >= 0 && j >= 0 && seen.insert(both).second) open.emplace_back(i, j);
    };
    visit(a.start, b.start);
    while (!open.empty()) {
        const auto [i, j] = open.back();
        open.pop_back();
        const Automaton::State &one = a.states[static_cast<size_t>(i)],
                               &two = b.states[static_cast<size_t>(j)];
        if (seen.size() > kMaxPairs || one.kind == Kind::call || two.kind == Kind::call) return true;
        if (one.kind == Kind::split) {
            visit(one.next, j);
            visit(one.other, j);
        } else if (two.kind == Kind::split) {
            visit(i, two.next);
            visit(i, two.other);
        } else if (one.kind == Kind::final && two.kind == Kind::final) {
            return true;
        } else if (one.kind == Kind::bytes && two.kind == Kind::bytes && one.low <= two.high &&
                   two.low <= one.high) {
            visit(one.next, two.next);
        }
    }
    return false;
}

}  // namespace quern
