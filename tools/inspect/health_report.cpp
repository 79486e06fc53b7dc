// The report of a health check as text, JSON and a page.
#include <algorithm>
#include <map>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"
#include "tools/common/html.h"
#include "tools/inspect/health.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kWorst = 10;
constexpr Role kAllRoles[kRoles] = {Role::in,          Role::out,    Role::router, Role::expert_gate_up,
                                    Role::expert_down, Role::shared, Role::mlp,    Role::ends};

/// Roles that are a row of a picture: the layers' that this model has.
std::vector<Role> layer_roles(const HealthReport& r) {
    std::vector<Role> roles;
    for (const Role role : kAllRoles)
        if (role != Role::ends && std::any_of(r.matrices.begin(), r.matrices.end(),
                                              [&](const MatrixHealth& m) { return m.role == role; }))
            roles.push_back(role);
    return roles;
}

/// A character a cell: small enough for 64 layers in a terminal.
std::string picture(const HealthReport& r) {
    std::string text = "grades: layers across, parts down ('.': none)\n                    ";
    for (int64_t l = 0; l < r.layers; ++l) text += l % 10 == 0 ? fmt::format("{:<10}", l) : "";
    text.resize(text.find_last_not_of(' ') + 1);
    text += "\n";
    for (const Role role : layer_roles(r)) {
        text += fmt::format("  {:18}", role_name(role));
        for (int64_t l = 0; l < r.layers; ++l) {
            Grade grade;
            text += r.cell(l, role, grade) ? letter(grade) : '.';
        }
        text += "\n";
    }
    text += fmt::format("  {:18}", "layer");
    for (int64_t l = 0; l < r.layers; ++l) text += letter(r.grade(l));
    return text + fmt::format("\n  {:18}{}\n", role_name(Role::ends), letter(r.grade(-1)));
}

struct Sum {
    int64_t matrices = 0, blocks = 0, zero = 0, saturated = 0, subnormal = 0, outliers = 0, unfilled = 0;
    std::array<int64_t, 16> codes{};
    float smallest_amax = 0, largest_amax = 0;
};

Sum sum_of(const HealthReport& r) {
    Sum sum;
    for (const MatrixHealth& m : r.matrices) {
        if (m.segment->scale_kind != ScaleKind::nvfp4) continue;
        sum.blocks += m.stats.blocks;
        sum.zero += m.stats.zero_scales;
        sum.saturated += m.stats.saturated;
        sum.subnormal += m.stats.subnormal;
        sum.outliers += m.stats.outliers;
        sum.unfilled += m.stats.unfilled;
        for (size_t c = 0; c < 16; ++c) sum.codes[c] += m.stats.codes[c];
        if (m.stats.dead()) continue;
        sum.smallest_amax = sum.matrices == 0 ? m.amax() : std::min(sum.smallest_amax, m.amax());
        sum.largest_amax = std::max(sum.largest_amax, m.amax());
        ++sum.matrices;
    }
    return sum;
}

double percent(int64_t part, int64_t all) {
    return all == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(all);
}

std::string code_use(const Sum& sum) {
    static constexpr const char* kNames[8] = {"0", "0.5", "1", "1.5", "2", "3", "4", "6"};
    int64_t all = 0;
    for (const int64_t n : sum.codes) all += n;
    std::string text = "  use of the codes   ";
    for (size_t c = 0; c < 8; ++c) text += fmt::format("{:>7}", kNames[c]);
    for (const size_t sign : {size_t{0}, size_t{8}}) {
        text += fmt::format("\n  {:19}", sign == 0 ? "  positive, %" : "  negative, %");
        for (size_t c = 0; c < 8; ++c) text += fmt::format("{:7.2f}", percent(sum.codes[sign + c], all));
    }
    return text + "\n";
}

std::string nvfp4_totals(const HealthReport& r) {
    const Sum s = sum_of(r);
    if (s.blocks == 0) return "no matrix is NVFP4\n";
    const auto p = [&](int64_t part) { return percent(part, s.blocks); };
    return fmt::format(
        "{} blocks of NVFP4: {:.3f} % zero, {:.3f} % saturated, {:.3f} % subnormal, {:.3f} % outliers, "
        "{:.3f} % not filled\n"
        "largest weights of the matrices: {:.3g} to {:.3g}; {} dead and {} duplicate expert matrices\n{}",
        s.blocks, p(s.zero), p(s.saturated), p(s.subnormal), p(s.outliers), p(s.unfilled), s.smallest_amax,
        s.largest_amax, r.dead, r.duplicates, code_use(s));
}

Json matrix_json(const MatrixHealth& m) {
    const SegmentStats& s = m.stats;
    Json j{{"name", m.segment->name},
           {"layer", m.layer},
           {"role", role_name(m.role)},
           {"format", format_name(*m.segment)},
           {"grade", std::string(1, letter(m.grade()))},
           {"values", s.values},
           {"zeros", s.zeros},
           {"bad_values", s.bad_values},
           {"amax", m.amax()}};
    if (m.segment->scale_kind == ScaleKind::nvfp4) {
        j["global_scale"] = m.global_scale;
        j["blocks"] = s.blocks;
        j["zero_scales"] = s.zero_scales;
        j["erased"] = s.erased;
        j["saturated"] = s.saturated;
        j["subnormal"] = s.subnormal;
        j["bad_scales"] = s.bad_scales;
        j["outliers"] = s.outliers;
        j["unfilled"] = s.unfilled;
        j["codes"] = s.codes;
    }
    j["findings"] = Json::array();
    for (const Finding& f : m.findings)
        j["findings"].push_back({{"grade", std::string(1, letter(f.grade))}, {"text", f.text}});
    return j;
}

/// One heat map: layers across, parts down.
template <typename F>
std::string heat_map(const HealthReport& r, const char* title, F&& cell) {
    std::string html = fmt::format("<h2>{}</h2><table class=map><tr><th></th>", title);
    for (int64_t l = 0; l < r.layers; ++l) html += fmt::format("<th>{}</th>", l);
    html += "</tr>\n";
    for (const Role role : layer_roles(r)) {
        html += fmt::format("<tr><th>{}</th>", role_name(role));
        for (int64_t l = 0; l < r.layers; ++l) html += cell(l, role);
        html += "</tr>\n";
    }
    return html + "</table>\n";
}

std::string grade_cell(const HealthReport& r, int64_t layer, Role role) {
    Grade grade;
    if (!r.cell(layer, role, grade)) return "<td></td>";
    return fmt::format("<td class={0} title=\"layer {1}, {2}: {0}\">{0}</td>", letter(grade), layer,
                       role_name(role));
}

/// Share of the blocks of a cell, `count` of a matrix; dark from `full` percent on.
template <typename F>
std::string share_cell(const HealthReport& r, int64_t layer, Role role, double full, F&& count) {
    int64_t part = 0, all = 0;
    for (const MatrixHealth& m : r.matrices) {
        if (m.layer != layer || m.role != role) continue;
        part += count(m.stats);
        all += m.stats.blocks;
    }
    if (all == 0) return "<td></td>";
    const double p = percent(part, all);
    return fmt::format(
        "<td style=\"background:rgba(200,40,20,{:.3f})\" title=\"layer {}, {}: {:.4f} %\"></td>",
        std::min(1.0, 0.04 + p / full), layer, role_name(role), p);
}

std::string findings_table(const HealthReport& r, size_t count) {
    std::string html = "<table><tr><th>grade</th><th>matrix</th><th>finding</th></tr>\n";
    for (const size_t i : r.worst(count))
        for (const Finding& f : r.matrices[i].findings)
            html += fmt::format("<tr><td class={0}>{0}</td><td>{1}</td><td>{2}</td></tr>\n", letter(f.grade),
                                html_text(printable(r.matrices[i].segment->name, 200)),
                                html_text(printable(f.text, 400)));
    return html + "</table>\n";
}

constexpr const char* kStyle =
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}h2{font-size:1.1em;margin-top:1.6em}"
    "table{border-collapse:collapse}td,th{padding:2px 6px;text-align:left;font-weight:normal}"
    ".map td{width:1.1em;height:1.1em;padding:1px;text-align:center;border:1px solid #eee}"
    ".map th{font-size:11px;padding:1px 4px}pre{background:#f6f6f6;padding:1em}"
    ".A{background:#cdebc5}.B{background:#e9efb0}.C{background:#fbdf9d}.D{background:#f3a877}.F{background:#"
    "e0533d;color:#fff}";

}  // namespace

char letter(Grade grade) { return "ABCDF"[static_cast<int>(grade)]; }

const char* role_name(Role role) {
    switch (role) {
        case Role::in:
            return "in";
        case Role::out:
            return "out";
        case Role::router:
            return "router";
        case Role::expert_gate_up:
            return "experts gate, up";
        case Role::expert_down:
            return "experts down";
        case Role::shared:
            return "shared expert";
        case Role::mlp:
            return "MLP";
        case Role::ends:
            return "embedding, head";
    }
    return "";
}

std::string describe(const HealthReport& r) {
    std::string text = fmt::format("{} matrices, {:.2f} GB in {:.1f} s, {:.2f} GB/s\n", r.matrices.size(),
                                   static_cast<double>(r.bytes) / 1e9, r.seconds,
                                   r.seconds > 0 ? static_cast<double>(r.bytes) / 1e9 / r.seconds : 0);
    text += nvfp4_totals(r) + "\n" + picture(r);
    const std::vector<size_t> worst = r.worst(kWorst);
    if (!worst.empty()) text += "\nworst:\n";
    for (const size_t i : worst) {
        const MatrixHealth& m = r.matrices[i];
        for (const Finding& f : m.findings)
            text += fmt::format("  {} {}: {}\n", letter(f.grade), printable(m.segment->name, 200), f.text);
    }
    std::map<char, int64_t> grades;
    for (const MatrixHealth& m : r.matrices) ++grades[letter(m.grade())];
    text += "\nhealth:";
    for (const auto& [grade, count] : grades) text += fmt::format(" {} {}", count, grade);
    return text + (r.clean() ? "\n" : "; quern will not run matrices of grade F\n");
}

Json to_json(const HealthReport& r) {
    Json j{{"clean", r.clean()},   {"matrices", r.matrices.size()}, {"bytes", r.bytes},
           {"seconds", r.seconds}, {"dead_experts", r.dead},        {"duplicate_experts", r.duplicates}};
    j["layers"] = Json::array();
    for (int64_t l = 0; l < r.layers; ++l) j["layers"].push_back(std::string(1, letter(r.grade(l))));
    j["ends"] = std::string(1, letter(r.grade(-1)));
    j["worst"] = Json::array();
    for (const size_t i : r.worst(kWorst)) j["worst"].push_back(r.matrices[i].segment->name);
    j["tensors"] = Json::array();
    for (const MatrixHealth& m : r.matrices) j["tensors"].push_back(matrix_json(m));
    return j;
}

std::string to_html(const HealthReport& r, const std::string& title) {
    constexpr size_t kRows = 100;
    const std::string name = html_text(printable(title, 400));
    std::string html = fmt::format(
        "<!doctype html><html lang=en><meta charset=utf-8><title>{}: quantization</title>"
        "<style>{}</style><h1>{}</h1>\n<pre>{}</pre>\n",
        name, kStyle, name, html_text(nvfp4_totals(r)));
    html +=
        heat_map(r, "Grades: layers across", [&](int64_t l, Role role) { return grade_cell(r, l, role); });
    const auto map = [&](const char* heading, double full, auto&& count) {
        html +=
            heat_map(r, heading, [&](int64_t l, Role role) { return share_cell(r, l, role, full, count); });
    };
    map("Subnormal block scales, dark from 5 %", 5, [](const SegmentStats& s) { return s.subnormal; });
    map("Zero block scales, dark from 5 %", 5, [](const SegmentStats& s) { return s.zero_scales; });
    map("Saturated block scales, dark from 1 %", 1, [](const SegmentStats& s) { return s.saturated; });
    map("Outlier blocks, dark from 1 %", 1, [](const SegmentStats& s) { return s.outliers; });
    return html + "<h2>Findings, worst first</h2>\n" + findings_table(r, kRows) + "</html>\n";
}

}  // namespace quern
