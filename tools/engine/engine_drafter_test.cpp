// The test of drafters at start: whether they guess what the model says at all. A drafter for another model, or with wrong
// taps, guesses hardly anything, and nothing else would show it.
#include "ggml-like/check.h"
#include "models/chat_format.h"
#include "models/tokenizer.h"
#include "tools/engine/engine_state.h"

namespace quern {
namespace {

/// With answers that are easy to foresee.
constexpr const char* kQuestions[] = {"What is 12 plus 30?", "What is the capital of France?",
                                      "Count from one to ten."};
constexpr int64_t kAnswer = 16;     // tokens of each answer
constexpr int64_t kFewRounds = 6;   // that say nothing
constexpr double kCollapsed = 0.3;  // right tokens a round; right ones at the beginning of a round only

struct Outcome {
    int64_t rounds = 0, drafted = 0, accepted = 0;

    bool collapsed() const {
        return rounds >= kFewRounds &&
               static_cast<double>(accepted) < kCollapsed * static_cast<double>(rounds);
    }
};

Outcome questioned(const Model& model, DrafterKind kind, const std::function<Result(Request)>& answer) {
    Outcome out;
    for (const char* question : kQuestions) {
        Request r;
        const std::vector<Message> messages = {{.role = "user", .content = question}};
        r.prompt = encode_prompt(model.chat().render(messages, {}, {.thinking = false}), *model.tokenizer());
        r.sampling.temperature = 0;
        r.max_tokens = kAnswer;
        r.stop_ids = model.generation().eos_ids;
        r.use_cache = false;
        r.drafts = {.kind = kind, .full = true};
        r.on_round = [&](int64_t, std::span<const int32_t> drafted, int64_t accepted) {
            ++out.rounds;
            out.drafted += static_cast<int64_t>(drafted.size());
            out.accepted += accepted;
        };
        answer(std::move(r));
    }
    return out;
}

std::string taps_of(const DraftModelInfo& info) {
    std::string text;
    for (const int64_t tap : info.taps) text += fmt::format("{}{}", text.empty() ? "" : ", ", tap);
    return text;
}

}  // namespace

void Engine::State::test_drafters(const std::function<Result(Request)>& answer) {
    const bool mtp = memory.mtp && pass == Pass::hidden;
    if (!speculation || model.tokenizer() == nullptr || options.drafter != nullptr ||
        (!mtp && dflash == nullptr))
        return;
    const DrafterKind kind = mtp ? DrafterKind::mtp : DrafterKind::dflash;
    Outcome found = questioned(model, kind, answer);
    if (dflash != nullptr && model.info().dflash->causality_open) {
        dflash->causal_windows(false);
        const Outcome symmetric = questioned(model, kind, answer);
        const bool better = symmetric.accepted * found.drafted > found.accepted * symmetric.drafted;
        dflash->causal_windows(!better);
        notes.push_back(
            fmt::format("the DFlash drafter's config does not say whether its layers with windows are causal "
                        "inside a block: {} of {} "
                        "drafted tokens were right if they are, {} of {} if not; taken as {}",
                        found.accepted, found.drafted, symmetric.accepted, symmetric.drafted,
                        better ? "not causal" : "causal"));
        if (better) found = symmetric;
    }
    if (found.collapsed()) {
        notes.push_back(
            fmt::format("no drafts by {}: of {} tokens that it drafted in answers to built-in questions, the "
                        "model said {}; {}",
                        drafter_name(kind), found.drafted, found.accepted,
                        mtp ? "its layer does not fit these weights"
                            : fmt::format("the drafter {} was made for other weights, or its config is wrong "
                                          "(layers that it taps: "
                                          "{}; mask token {})",
                                          model.info().dflash->name, taps_of(*model.info().dflash),
                                          model.info().dflash->mask)));
        drafters.pop_back();  // those with weights come last
        dflash = nullptr;
        pass = Pass::text;
        capture_answers();
    }
    use_drafters();
}

}  // namespace quern
