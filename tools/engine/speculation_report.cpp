#include "tools/engine/speculation_report.h"

#include <fmt/format.h>

#include "tools/engine/draft_rows.h"

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
    text += "\n  ms of a step, by sequences x rows (and rows of the head where not the fewest):";
    for (const SpeculationReport::Cost& c : r.costs) {
        const std::string read = c.draft_rows == DraftRows::frequent
                                     ? std::string()
                                     : fmt::format(" {}", draft_rows_name(c.draft_rows));
        text +=
            fmt::format(" {}x{}{}: {:.2f}{}", c.sequences, c.rows, read, 1e3 * c.seconds, c.sure ? "" : "?");
    }
    if (r.head_passes() == 0) return text + "\n";
    text += "\n  passes that drafted, by rows of the head:";
    for (size_t i = 0; i < r.passes.size(); ++i)
        text += fmt::format(" {}: {}", draft_rows_name(static_cast<DraftRows>(i)), r.passes[i]);
    return text + "\n";
}

}  // namespace quern
