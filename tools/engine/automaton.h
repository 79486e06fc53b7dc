// Automaton: texts as states over bytes, with rules that call each other; and how one is built. Internal to grammar*.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quern {

struct Automaton {
    enum class Kind : uint8_t { bytes, split, call, final };
    struct State {
        Kind kind = Kind::split;
        uint8_t low = 0, high = 0;      // bytes: one of these leads to next
        int32_t next = -1, other = -1;  // split: to both, if there are two; call: the rule `other`, then next

        bool is_jump() const { return kind == Kind::split && other < 0 && next >= 0; }
    };

    std::vector<State> states;
    int32_t start = 0;
};

/// Whether some text is one of both. True also if that is too much work to tell, or rules are called.
bool may_share_a_text(const Automaton& a, const Automaton& b);

/// From the smallest parts to larger ones. Each part is used once. Throws Error(usage) for more than kMaxStates.
class AutomatonBuilder {
  public:
    /// States [first, last), entered at `start`, left by `end`, which leads nowhere yet.
    struct Part {
        int32_t first, last, start, end;
    };
    using Ranges = std::vector<std::pair<char32_t, char32_t>>;
    static constexpr size_t kMaxStates = 50000;
    static constexpr int kMany = -1;

    /// `json`: characters are written as in a string of JSON, in the shortest way.
    explicit AutomatonBuilder(bool json = false) : json_(json) {}

    Part empty();
    Part text(const std::string& bytes);
    /// One character in one of these ranges, or in none of them, as UTF-8.
    Part character(Ranges ranges, bool inverted);
    Part call(int32_t rule);  // a number of the caller's, see finish
    Part sequence(Part a, Part b);
    Part either(Part a, Part b);
    /// `most` may be kMany.
    Part repeat(Part part, int least, int most);

    /// `starts`: the part of each rule; the first is where the text begins. Throws Error(usage) for a rule that begins with
    /// itself; `names` are for that message.
    Automaton finish(const std::vector<Part>& rules, const std::vector<std::string>& names);

  private:
    int32_t add(Automaton::State state);
    Part bytes(uint8_t low, uint8_t high);
    Part copy(Part part);
    Part escaped(unsigned char c);
    Part utf8(char32_t low, char32_t high);
    void refuse_left_recursion(const std::vector<Part>& rules, const std::vector<std::string>& names) const;

    bool json_;
    Automaton out_;
};

/// Strings of JSON with their quotes in which the expression matches, somewhere or `whole`. `opened`: without the first quote.
/// Throws Error(usage) as Grammar::regex.
Automaton json_string(std::string_view regex, bool whole, bool opened = false);

}  // namespace quern
