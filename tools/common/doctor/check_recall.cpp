// A needle in a haystack: one sentence among thousands, asked for at the end.
#include <algorithm>

#include <fmt/format.h>

#include "models/tokenizer.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/measures.h"

namespace quern {
namespace {

constexpr int64_t kAnswer = 48;       // tokens
constexpr double kShareOfTime = 0.8;  // of what is left

std::string hay(int64_t line) {
    static constexpr const char* kWho[] = {"baker",    "miller", "sailor", "teacher",
                                           "gardener", "smith",  "weaver"};
    static constexpr const char* kWhat[] = {"apples", "ropes", "letters", "lamps", "boots"};
    return fmt::format("On day {} the {} counted {} {} in the yard.\n", line, kWho[line % 7],
                       3 + line * 37 % 89, kWhat[line % 5]);
}

std::string name_of(int64_t length, int64_t end) {
    return length == end ? fmt::format("{} (the context's end)", length) : std::to_string(length);
}

}  // namespace

std::string haystack(const Tokenizer& tokenizer, int64_t tokens) {
    const std::string needle = fmt::format("The secret number of the lighthouse is {}.\n", kNeedleNumber);
    std::string before, after;
    int64_t count = static_cast<int64_t>(tokenizer.encode(needle, Tokenizer::Markers::literal).size());
    for (int64_t line = 1;; ++line) {
        const std::string text = hay(line);
        count += static_cast<int64_t>(tokenizer.encode(text, Tokenizer::Markers::literal).size());
        if (count > tokens) break;
        (2 * count < tokens ? before : after) += text;
    }
    return before + needle + after;
}

void check_recall(Examination& e, CheckReport& report) {
    const KnownModel* k = e.known();
    const int64_t end = e.engine().context();
    std::vector<int64_t> lengths = {end};
    for (const int64_t length : {32768, 4096})
        if (length + length / 8 < end) lengths.insert(lengths.begin(), length);
    double rate =
        0;  // tokens a second, of the longest prompt so far: longer ones are read faster than short ones
    for (const int64_t length : lengths) {
        const std::string name = name_of(length, end);
        if (k != nullptr && length > k->recall_tokens) {
            report.add(Verdict::skipped,
                       fmt::format("{} tokens: {} was not trained on so many", name, k->name));
            continue;
        }
        if (rate == 0) {
            e.readings();
            rate = e.prompt_rate();
        }
        const double needed = static_cast<double>(length) / rate;
        if (needed > kShareOfTime * e.seconds_left()) {
            report.add(Verdict::skipped, fmt::format("{} tokens: would take {:.0f} s, and {:.0f} are left",
                                                     name, needed, std::max(0.0, e.seconds_left())));
            continue;
        }
        const std::string question =
            "What is the secret number of the lighthouse? Answer with the number alone.";
        const int64_t room =
            length - kAnswer - static_cast<int64_t>(e.encode_user(question, false).size()) - 8;
        const double begin = e.seconds();
        const ChatAnswer a = e.answer({{.role = "user", .content = haystack(e.tokenizer(), room) + question}},
                                      {}, false, kAnswer);
        rate = static_cast<double>(length) / (e.seconds() - begin);
        const bool found = a.message.content.find(kNeedleNumber) != std::string::npos;
        report.numbers[std::to_string(length)] = found;
        report.add(found          ? Verdict::ok
                   : k != nullptr ? Verdict::wrong
                                  : Verdict::note,
                   fmt::format("{} tokens: {} {}", name, found ? "found" : "asked for it, it answers",
                               found ? kNeedleNumber : printable(a.message.content, 60)),
                   found ? ""
                         : "attention or the recurrent state loses what was read: compare with a shorter "
                           "context and another KV cache type (-ctk)");
    }
}

}  // namespace quern
