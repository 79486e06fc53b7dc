#include "tools/engine/speculation_report.h"

#include <fmt/format.h>

namespace quern {

std::string describe(const SpeculationReport& r) {
    std::string text = fmt::format("drafts    {} of {} steps had drafts: {} tokens, {} accepted\n", r.rounds,
                                   r.steps, r.drafted, r.accepted);
    if (r.ahead > 0) text += fmt::format("  {} of these drafts were made ahead\n", r.ahead);
    if (r.plain_rate > 0)
        text += fmt::format(
            "  last step: {} tokens drafted for {} sequence{}; {:.0f} tokens/s expected, {:.0f} without "
            "drafts\n",
            r.last_drafted, r.last_sequences, r.last_sequences == 1 ? "" : "s", r.last_rate, r.plain_rate);
    if (r.timed > 0)
        text += fmt::format("  a round: {:.3f} ms, {:.3f} of them for drafting\n",
                            1e3 * r.round_seconds / static_cast<double>(r.timed),
                            1e3 * r.drafting_seconds / static_cast<double>(r.timed));
    text += "  right up to position:";
    for (size_t i = 0; i < r.acceptance.size(); ++i)
        text += fmt::format(" {}: {:.0f} %", i + 1, 100 * r.acceptance[i]);
    text += "\n  ms of a step, by sequences x rows:";
    for (const SpeculationReport::Cost& c : r.costs)
        text += fmt::format(" {}x{}: {:.2f}{}", c.sequences, c.rows, 1e3 * c.seconds, c.sure ? "" : "?");
    return text + "\n";
}

}  // namespace quern
