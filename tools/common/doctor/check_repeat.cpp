// The same answer twice: alone, again, and beside others, to the last bit of every logit.
#include <fmt/format.h>

#include "ggml-like/backend.h"
#include "ggml-like/content_hash.h"
#include "tools/common/doctor/checks.h"

namespace quern {
namespace {

constexpr int64_t kTokens = 24, kOthers = 15;

/// Hash of the tokens of an answer and of all logits that they were chosen from.
Request hashed(Examination& e, const std::string& question, ContentHash& hash) {
    Request r = Examination::greedy(e.encode_user(question, false), kTokens);
    r.on_logits = [&hash](int32_t id, std::span<const float> logits) {
        hash.add(static_cast<int64_t>(id));
        hash.add(logits.data(), logits.size_bytes());
    };
    return r;
}

constexpr const char* kQuestion = "What is 12 times 7, and why?";

}  // namespace

void check_same_answer(Examination& e, CheckReport& report) {
    ContentHash first, again, among;
    e.run(hashed(e, kQuestion, first));
    e.run(hashed(e, kQuestion, again));
    std::vector<Request> together;
    for (int64_t i = 0; i < kOthers; ++i)
        together.push_back(Examination::greedy(
            e.encode_user(fmt::format("Count from {} to {}.", i, 3 * i + 5), false), kTokens));
    together.insert(together.begin() + kOthers / 2, hashed(e, kQuestion, among));
    e.run(std::move(together));
    const int64_t beside = std::min(kOthers, e.engine().sequences() - 1);
    report.numbers = {{"tokens", kTokens},
                      {"beside", beside},
                      {"same_again", first.value() == again.value()},
                      {"same_beside", first.value() == among.value()}};
    constexpr const char* kAdvice =
        "the same sums have other bits: faulty memory or an overclocked, failing device; test it, then "
        "report "
        "this as a bug of quern";
    const auto add = [&](bool same, const std::string& when) {
        report.add(same ? Verdict::ok : Verdict::wrong,
                   fmt::format("{} tokens with all their logits are {} {}", kTokens,
                               same ? "the same to the last bit" : "not the same", when),
                   same ? "" : kAdvice);
    };
    add(first.value() == again.value(), "the second time");
    add(first.value() == among.value(),
        fmt::format("beside {} others{}", beside, beside < kOthers ? " (as many as run at a time)" : ""));
}

}  // namespace quern
