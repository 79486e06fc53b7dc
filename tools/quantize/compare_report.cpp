// What `--against` prints.
#include <array>

#include <fmt/format.h>

#include "tools/common/cli_values.h"
#include "tools/quantize/compare.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxProblems = 20;

struct RoleTotal {
    MatrixError error;
    int64_t modules = 0, equal = 0;
};

std::array<RoleTotal, kModuleRoles> totals(const Comparison& c) {
    std::array<RoleTotal, kModuleRoles> out;
    for (const ModuleComparison& m : c.modules) {
        RoleTotal& t = out[static_cast<size_t>(m.role)];
        t.error.add(m.error);
        ++t.modules;
        t.equal += m.error.different == 0;
    }
    return out;
}

std::string numbers(const MatrixError& e) {
    return e.different == 0 ? "equal"
                            : fmt::format("{:>9.5f} {:>7.2f} {:>9.6f} {:>9.3g}", e.relative_rms(), e.snr_db(),
                                          e.cosine(), e.largest);
}

std::string line(const ModuleComparison& m) {
    std::string blocks;
    for (const BlockError& b : m.worst)
        blocks += fmt::format(" [{}, {}] {:.2f}", b.row, 16 * b.block, b.error);
    return fmt::format("  {:64} {:15} {}{}\n", printable(m.name, 200), m.format + "/" + m.other_format,
                       numbers(m.error), blocks);
}

/// JSON has no infinity.
Json number(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

Json to_json(const MatrixError& e) {
    return {{"relative_rms", number(e.relative_rms())},
            {"snr_db", e.different == 0 ? Json(nullptr) : number(e.snr_db())},
            {"cosine", number(e.cosine())},
            {"max_abs", number(e.largest)},
            {"values", e.values},
            {"different", e.different}};
}

}  // namespace

std::string describe(const Comparison& c, size_t most) {
    std::string text = fmt::format("  {:20} {:>8} {:>8} {:>9} {:>7} {:>9} {:>9}\n", "role", "matrices",
                                   "equal", "rel. RMS", "SNR dB", "cosine", "max abs");
    const auto all = totals(c);
    for (size_t r = 0; r < all.size(); ++r)
        if (all[r].modules > 0)
            text += fmt::format("  {:20} {:>8} {:>8} {}\n", role_name(static_cast<ModuleRole>(r)),
                                all[r].modules, all[r].equal, numbers(all[r].error));
    text += fmt::format("  {} other tensors are equal\n\n", c.same_small);
    if (!c.modules.empty() && c.modules[0].error.different > 0)
        text +=
            "worst matrices: relative RMS, SNR dB, cosine, largest error; worst blocks [row, column], in "
            "units of the "
            "matrix's RMS\n";
    for (size_t i = 0; i < std::min(most, c.modules.size()) && c.modules[i].error.different > 0; ++i)
        text += line(c.modules[i]);
    size_t shown = 0, count = c.problems.size();
    const auto problem = [&](const std::string& what) {
        if (++shown <= kMaxProblems) text += "problem: " + printable(what, 500) + "\n";
    };
    for (const std::string& p : c.problems) problem(p);
    for (const ModuleComparison& m : c.modules) {
        if (m.problem.empty()) continue;
        problem(m.name + ": " + m.problem);
        ++count;
    }
    if (count > kMaxProblems) text += fmt::format("problem: and {} more\n", count - kMaxProblems);
    return text + fmt::format("\nagainst: {}, {:.1f} s\n",
                              c.clean() ? "the same model" : "NOT THE SAME MODEL", c.seconds);
}

Json to_json(const Comparison& c) {
    Json j = {{"clean", c.clean()},
              {"problems", c.problems},
              {"equal_small_tensors", c.same_small},
              {"roles", Json::object()},
              {"matrices", Json::array()}};
    const auto all = totals(c);
    for (size_t r = 0; r < all.size(); ++r) {
        if (all[r].modules == 0) continue;
        Json& role = j["roles"][role_name(static_cast<ModuleRole>(r))] = to_json(all[r].error);
        role["matrices"] = all[r].modules;
        role["equal"] = all[r].equal;
    }
    for (const ModuleComparison& m : c.modules) {
        Json entry = to_json(m.error);
        entry["name"] = m.name;
        entry["role"] = role_name(m.role);
        entry["format"] = m.format;
        entry["other_format"] = m.other_format;
        entry["worst_blocks"] = Json::array();
        for (const BlockError& b : m.worst)
            entry["worst_blocks"].push_back(
                {{"row", b.row}, {"column", 16 * b.block}, {"error", number(b.error)}});
        if (!m.problem.empty()) entry["problem"] = m.problem;
        j["matrices"].push_back(std::move(entry));
    }
    return j;
}

}  // namespace quern
