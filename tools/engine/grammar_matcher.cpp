// GrammarMatcher: a thread for each way to read the text, with a stack of what is open.
#include <algorithm>
#include <functional>

#include "tools/engine/grammar_node.h"

namespace quern {

namespace {

constexpr size_t kMaxThreads = 1024, kMaxSettled = 8192;
constexpr size_t kMaxCalls = 200;  // rules of a grammar within each other
constexpr int kAskedOften = 4;     // from so many questions at one place on, first bytes are kept

}  // namespace

GrammarMatcher::GrammarMatcher(std::shared_ptr<const Grammar> grammar) : grammar_(std::move(grammar)) {
    if (grammar_)
        threads_.push_back({.stack = {{.node = &grammar_->root(),
                                       .kind = grammar_->of_calls() ? FrameKind::block : FrameKind::root}}});
}

GrammarMatcher::GrammarMatcher(const GrammarMatcher&) = default;
GrammarMatcher::GrammarMatcher(GrammarMatcher&&) noexcept = default;
GrammarMatcher& GrammarMatcher::operator=(GrammarMatcher&&) noexcept = default;
GrammarMatcher::~GrammarMatcher() = default;

bool GrammarMatcher::accepts(std::string_view bytes) const {
    if (bytes.empty()) return false;
    if (const auto stays = stays_in_string(bytes)) return *stays;
    if (++asked_ >= kAskedOften && !may_begin(bytes.front())) return false;
    return !run(threads_, bytes).empty();
}

bool GrammarMatcher::may_begin(char byte) const {
    const auto at = static_cast<unsigned char>(byte);
    if (known_[at]) return first_[at];
    known_.set(at);
    const auto stays = stays_in_string({&byte, 1});
    first_[at] = stays ? *stays : !run(threads_, {&byte, 1}).empty();
    return first_[at];
}

const std::bitset<256>& GrammarMatcher::first_bytes() const {
    for (int byte = 0; byte < 256; ++byte) may_begin(static_cast<char>(byte));
    return first_;
}

void GrammarMatcher::push(std::string_view bytes) {
    asked_ = 0;
    known_.reset();
    threads_ = run(std::move(threads_), bytes);
}

std::vector<GrammarMatcher::Thread> GrammarMatcher::run(std::vector<Thread> threads, std::string_view bytes) {
    std::vector<Thread> next;
    for (const char c : bytes) {
        next.clear();
        Step step{static_cast<unsigned char>(c), next};
        for (Thread& t : threads) step.step(std::move(t));
        if (next.size() > kMaxThreads) next.resize(kMaxThreads);
        std::swap(threads, next);
    }
    return threads;
}

bool GrammarMatcher::complete() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const Thread& t) {
        return t.stack.empty() || (t.stack.size() == 1 && t.stack[0].number_complete());
    });
}

bool GrammarMatcher::dead() const { return threads_.empty(); }

bool GrammarMatcher::finished() const {
    return !threads_.empty() &&
           std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.stack.empty(); });
}

/// The same way twice is one way.
void GrammarMatcher::Step::go(Thread thread) {
    if (std::find(out.begin(), out.end(), thread) == out.end()) out.push_back(std::move(thread));
}

void GrammarMatcher::Step::end(Thread thread) {
    thread.stack.pop_back();
    go(std::move(thread));
}

void GrammarMatcher::Step::step(Thread thread) {
    if (thread.stack.empty()) return;
    const Frame& top = thread.stack.back();
    if ((top.between_tokens() || top.between_tags()) && is_blank(byte)) {
        if (std::exchange(thread.blank, true)) return;
        return go(std::move(thread));
    }
    thread.blank = false;
    if (thread.watch.on && top.kind != FrameKind::text)
        if (const ChatTag tag = thread.watch.push(byte); tag != ChatTag::none && thread.watch.ends(tag))
            return;
    switch (top.kind) {
        case FrameKind::root: {
            const Grammar::Node& node = *top.node;
            thread.stack.pop_back();
            return begin(thread, node);
        }
        case FrameKind::block:
            return block(std::move(thread));
        case FrameKind::call:
            return call(std::move(thread));
        case FrameKind::text:
            return text(std::move(thread));
        case FrameKind::automaton:
            return automaton(std::move(thread));
        case FrameKind::literal:
            return literal(std::move(thread));
        case FrameKind::word:
            return word(std::move(thread));
        case FrameKind::string:
            return string(std::move(thread));
        case FrameKind::number:
            return number(std::move(thread));
        case FrameKind::object:
            return object(std::move(thread));
        case FrameKind::array:
            return array(std::move(thread));
    }
}

/// The first byte of a value.
void GrammarMatcher::Step::begin(const Thread& around, const Grammar::Node& node) {
    for (const Grammar::Node* other : node.any_of) begin(around, *other);
    if (node.automaton != nullptr) {
        Thread t = around;
        t.stack.push_back({.node = &node, .kind = FrameKind::automaton, .count = node.automaton->start});
        std::vector<Thread> starts;
        Step{byte, starts}.settle(std::move(t));
        for (Thread& start : starts) step(std::move(start));
        return;
    }
    const auto open = [&](FrameKind kind) {
        Thread t = around;
        t.stack.push_back({.node = &node, .kind = kind});
        return t;
    };
    const auto count = static_cast<uint16_t>(node.literals.size());
    if (count > 0) {
        Thread t = open(FrameKind::literal);
        t.stack.back().keys = {0, count, 0};
        literal(std::move(t));
    }
    const auto word = [&](std::string_view text) {
        if (static_cast<unsigned char>(text.front()) != byte) return;
        Thread t = open(FrameKind::word);
        t.stack.back().word = text.substr(1);
        go(std::move(t));
    };
    if (node.types & kBoolean) {
        word("true");
        word("false");
    }
    if (node.types & kNull) word("null");
    if ((node.types & kString) && byte == '"' && node.min_length <= node.max_length)
        go(open(FrameKind::string));
    if (node.types & (kNumber | kInteger)) number(open(FrameKind::number));
    if (byte == '{' && room(around, node.object_height)) go(open(FrameKind::object));
    if (byte == '[' && room(around, node.array_height)) go(open(FrameKind::array));
}

void GrammarMatcher::Step::automaton(Thread thread) {
    Frame& f = thread.stack.back();
    const Automaton::State& state = f.node->automaton->states[static_cast<size_t>(f.count)];
    if (byte < state.low || byte > state.high) return;
    f.count = state.next;
    settle(std::move(thread));
}

uint64_t GrammarMatcher::Thread::hash() const {
    uint64_t h = stack.size();
    const auto add = [&](uint64_t number) { h = (h ^ number) * 0x9E3779B97F4A7C15u + (h >> 29); };
    for (const Frame& f : stack) {
        add(static_cast<uint64_t>(f.count));
        if (f.kind == FrameKind::automaton) continue;
        add(std::hash<const void*>{}(f.node));
        add(static_cast<uint64_t>(f.kind) << 32 | uint64_t{f.state} << 16 | f.value);
        add(std::hash<std::bitset<kMaxProperties>>{}(f.seen));
    }
    return h;
}

/// To all states that read a byte, and out of what has come to its end.
void GrammarMatcher::Step::settle(Thread thread) {
    if (settled.size() >= kMaxSettled || thread.stack.size() > kMaxCalls ||
        !settled.insert(thread.hash()).second)
        return;
    Frame& f = thread.stack.back();
    const auto& states = f.node->automaton->states;
    const Automaton::State& state = states[static_cast<size_t>(f.count)];
    switch (state.kind) {
        case Automaton::Kind::bytes:
            out.push_back(std::move(thread));
            return;
        case Automaton::Kind::split:
            for (const int32_t to : {state.next, state.other}) {
                if (to < 0) continue;
                thread.stack.back().count = to;
                settle(thread);
            }
            return;
        case Automaton::Kind::call: {
            Frame callee = f;
            callee.count = state.other;
            f.count = state.next;
            while (states[static_cast<size_t>(f.count)].is_jump())
                f.count = states[static_cast<size_t>(f.count)].next;
            // A call that is the last thing of its rule takes its place, so that lists may be long.
            if (states[static_cast<size_t>(f.count)].kind == Automaton::Kind::final) thread.stack.pop_back();
            thread.stack.push_back(callee);
            return settle(std::move(thread));
        }
        case Automaton::Kind::final:
            thread.stack.pop_back();
            if (thread.stack.empty() || thread.stack.back().kind != FrameKind::automaton)
                return go(std::move(thread));
            return settle(std::move(thread));
    }
}

/// One of a sorted list of texts; the shortest that fits is the first.
void GrammarMatcher::Step::literal(Thread thread) {
    Frame& f = thread.stack.back();
    const auto& texts = f.node->literals;
    f.keys.push(texts, byte, [](const std::string& text) -> const std::string& { return text; });
    if (f.keys.low == f.keys.high) return;
    if (texts[f.keys.low].size() == f.keys.length) {
        if (f.keys.high - f.keys.low > 1) {
            Thread longer = thread;
            ++longer.stack.back().keys.low;
            go(std::move(longer));
        }
        return end(std::move(thread));
    }
    go(std::move(thread));
}

void GrammarMatcher::Step::word(Thread thread) {
    std::string_view& left = thread.stack.back().word;
    if (static_cast<unsigned char>(left.front()) != byte) return;
    left.remove_prefix(1);
    if (left.empty()) return end(std::move(thread));
    go(std::move(thread));
}

}  // namespace quern
