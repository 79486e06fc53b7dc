// Grammars of plain text: regular expressions, and GBNF as llama.cpp has it.
#include <map>

#include "tools/engine/grammar_node.h"
#include "tools/engine/pattern_reader.h"

namespace quern {

namespace {

constexpr size_t kMaxText = 256 << 10;

class RegexReader : PatternReader {
  public:
    explicit RegexReader(std::string_view text) : PatternReader(text, "regex") {}

    Automaton read() {
        const Part all = alternatives(0);
        if (!at_end()) fail("')' without '('");
        return build_.finish({all}, {"regex"});
    }

    /// Of a string of JSON, which the expression may also match only somewhere.
    RegexReader(std::string_view text, bool whole) : PatternReader(text, "pattern", true), whole_(whole) {}

    Automaton read_string(bool opened) {
        const Part begun = build_.text(opened ? "" : "\"");
        const Part all = build_.sequence(begun, alternatives(0));
        if (!at_end()) fail("')' without '('");
        const Part ended = build_.text("\"");
        return build_.finish({build_.sequence(all, ended)}, {"pattern"});
    }

  private:
    Part anything() { return build_.repeat(build_.character({}, true), 0, AutomatonBuilder::kMany); }

    Part alternatives(int depth) {
        if (depth > kMaxDepth) fail("nested too deep");
        Part out = sequence(depth);
        while (take("|")) out = build_.either(out, sequence(depth));
        return out;
    }

    Part sequence(int depth) {
        bool open = depth == 0 && !whole_ && peek() != '^';
        Part out = open ? anything() : build_.empty();
        if (depth == 0) take("^");
        open = depth == 0 && !whole_;
        while (!at_end() && peek() != '|' && peek() != ')') {
            if (depth == 0 && peek() == '$' && (at_ + 1 == text_.size() || text_[at_ + 1] == '|')) {
                ++at_;
                open = false;
                continue;
            }
            const Part one = repeated(atom(depth));
            take("?");  // lazy or not, the texts are the same
            out = build_.sequence(out, one);
        }
        return open ? build_.sequence(out, anything()) : out;
    }

    Part atom(int depth) {
        if (take("(")) {
            if (take("?P<") ||
                (text_.substr(at_).starts_with("?<") && !text_.substr(at_).starts_with("?<=") &&
                 !text_.substr(at_).starts_with("?<!"))) {
                const size_t end = text_.find('>', at_);
                if (end == text_.npos) fail("'>' is missing");
                at_ = end + 1;
            } else if (!take("?:") && peek() == '?') {
                fail("groups that look around or set flags are not supported");
            }
            const Part inner = alternatives(depth + 1);
            if (!take(")")) fail("')' is missing");
            return inner;
        }
        if (take("[")) return char_class();
        if (take(".")) return build_.character({{'\n', '\n'}}, true);
        if (take("\\")) return escape();
        for (const char c : {'*', '+', '?', '{', '^', '$'})
            if (peek() == c) fail(fmt::format("'{}' stands for nothing here", c));
        const char32_t c = code_point();
        return build_.character({{c, c}}, false);
    }

    Part escape() {
        Ranges ranges;
        bool inverted = false;
        if (named_class(ranges, inverted)) return build_.character(std::move(ranges), inverted);
        const auto c = escaped();
        if (!c) fail("an escape that is not supported");
        return build_.character({{*c, *c}}, false);
    }

    bool whole_ = true;  // the whole text is matched
};

class GbnfReader : PatternReader {
  public:
    explicit GbnfReader(std::string_view text) : PatternReader(text, "grammar") { rule_number("root"); }

    Automaton read() {
        for (space(true); !at_end(); space(true)) rule();
        std::vector<Part> parts;
        for (size_t i = 0; i < rules_.size(); ++i) {
            if (!rules_[i]) FAIL(usage, "grammar: there is no rule '{}'", names_[i]);
            parts.push_back(*rules_[i]);
        }
        return build_.finish(parts, names_);
    }

  private:
    void space(bool feeds) {
        while (!at_end()) {
            if (peek() == '#')
                while (!at_end() && peek() != '\n') ++at_;
            else if (peek() == ' ' || peek() == '\t' || (feeds && (peek() == '\n' || peek() == '\r')))
                ++at_;
            else
                return;
        }
    }

    static bool is_name(char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
               c == '_';
    }

    std::string name() {
        const size_t begun = at_;
        while (is_name(peek())) ++at_;
        if (at_ == begun) fail("a name is missing");
        return std::string(text_.substr(begun, at_ - begun));
    }

    size_t rule_number(const std::string& rule) {
        const auto [found, fresh] = numbers_.try_emplace(rule, names_.size());
        if (fresh) {
            names_.push_back(rule);
            rules_.emplace_back();
        }
        return found->second;
    }

    void rule() {
        const size_t number = rule_number(name());
        space(false);
        if (!take("::=")) fail("'::=' is missing");
        space(true);
        if (rules_[number]) fail("the rule '" + names_[number] + "' is there twice");
        const Part part = alternatives(0);
        rules_[number] = part;
        if (!at_end() && peek() != '\n' && peek() != '\r') fail("expected the end of the line");
    }

    Part alternatives(int depth) {
        if (depth > kMaxDepth) fail("nested too deep");
        Part out = sequence(depth);
        while (another(depth)) {
            space(true);
            out = build_.either(out, sequence(depth));
        }
        return out;
    }

    /// | on this line, or at the start of the next one.
    bool another(int) {
        const size_t begun = at_;
        space(true);
        if (take("|")) return true;
        at_ = begun;
        return false;
    }

    Part sequence(int depth) {
        Part out = build_.empty();
        for (;;) {
            space(depth > 0);
            if (at_end() ||
                (!is_name(peek()) && std::string_view("\"[(.").find(peek()) == std::string_view::npos))
                return out;
            out = build_.sequence(out, repeated(atom(depth)));
        }
    }

    Part atom(int depth) {
        if (take("\"")) return literal();
        if (take("[")) return char_class();
        if (take(".")) return build_.character({}, true);
        if (!take("(")) return build_.call(static_cast<int32_t>(rule_number(name())));
        space(true);
        const Part inner = alternatives(depth + 1);
        space(true);
        if (!take(")")) fail("')' is missing");
        return inner;
    }

    Part literal() {
        Part out = build_.empty();
        while (!take("\"")) {
            std::optional<char32_t> c;
            if (!take("\\"))
                c = code_point();
            else if (!(c = escaped()))
                fail("an escape that is not supported");
            out = build_.sequence(out, build_.character({{*c, *c}}, false));
        }
        return out;
    }

    std::map<std::string, size_t> numbers_;
    std::vector<std::string> names_;
    std::vector<std::optional<Part>> rules_;
};

}  // namespace

Automaton json_string(std::string_view regex, bool whole, bool opened) {
    if (regex.size() > kMaxText) FAIL(usage, "pattern: longer than {} bytes", kMaxText);
    return RegexReader(regex, whole).read_string(opened);
}

std::shared_ptr<const Grammar> Grammar::of_text(Automaton automaton) {
    const std::shared_ptr<Grammar> out(new Grammar);
    Node* root = out->add();
    root->automaton = std::make_shared<const Automaton>(std::move(automaton));
    root->height = 1;
    out->root_ = root;
    return out;
}

std::shared_ptr<const Grammar> Grammar::regex(std::string_view text) {
    if (text.size() > kMaxText) FAIL(usage, "regex: longer than {} bytes", kMaxText);
    return of_text(RegexReader(text).read());
}

std::shared_ptr<const Grammar> Grammar::gbnf(std::string_view text) {
    if (text.size() > kMaxText) FAIL(usage, "grammar: longer than {} bytes", kMaxText);
    return of_text(GbnfReader(text).read());
}

}  // namespace quern
