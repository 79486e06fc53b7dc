// The report of the doctor as text, JSON and a page.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tools/common/cli_values.h"
#include "tools/common/doctor/diagnosis.h"
#include "tools/common/html.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kNameWidth = 16, kLine = 108;

/// `text` broken at blanks; lines after the first begin with `indent` blanks.
std::string wrapped(const std::string& text, size_t indent) {
    std::string out;
    size_t column = indent;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find(' ', at), text.size());
        const size_t length = end - at;
        if (column > indent && column + 1 + length > kLine) {
            out += "\n" + std::string(indent, ' ');
            column = indent;
        } else if (column > indent) {
            out += ' ';
            ++column;
        }
        out.append(text, at, length);
        column += length;
        at = end + 1;
    }
    return out;
}

std::string verdict_line(const Diagnosis& d) {
    const int64_t wrong = d.count(Verdict::wrong), notes = d.count(Verdict::note);
    const std::string rest = fmt::format("{} ok, {} note{}, {} skipped; {:.1f} s", d.count(Verdict::ok),
                                         notes, notes == 1 ? "" : "s", d.count(Verdict::skipped), d.seconds);
    return wrong == 0 ? fmt::format("sound: {}", rest) : fmt::format("NOT SOUND: {} wrong, {}", wrong, rest);
}

std::string kind_of(const Diagnosis& d) {
    return d.kind.empty() ? "of no published kind that is known" : "of the kind " + d.kind;
}

/// Times as often as if all experts were equally busy, on the layer's own average.
double relative_load(const std::vector<int64_t>& layer, int64_t tokens) {
    double all = 0;
    for (const int64_t n : layer) all += static_cast<double>(n);
    return all == 0 ? 0 : static_cast<double>(tokens) * static_cast<double>(layer.size()) / all;
}

/// Layers down, experts across: white never chosen, green as often as the others, red much more.
std::string expert_picture(const Diagnosis& d) {
    const size_t layers = d.expert_tokens.size(), experts = d.expert_tokens[0].size();
    const size_t side = experts > 64 ? 5 : 14;
    std::string svg = fmt::format("<svg width={} height={} role=img aria-label=\"load of the experts\">\n",
                                  40 + experts * side, (layers + 1) * side);
    for (size_t l = 0; l < layers; ++l) {
        if (side > 5 || l % 5 == 0)
            svg += fmt::format("<text x=0 y={} font-size={}>{}</text>", (l + 1) * side - 1,
                               std::max<size_t>(side, 9) - 2, l);
        for (size_t x = 0; x < experts; ++x) {
            const int64_t tokens = d.expert_tokens[l][x];
            const double load = relative_load(d.expert_tokens[l], tokens);
            const double hot = std::clamp(load / 4, 0.0, 1.0);
            const std::string color = tokens == 0 ? "#fff"
                                                  : fmt::format("hsl({:.0f},70%,{:.0f}%)", 130 - 130 * hot,
                                                                88 - 43 * std::sqrt(hot));
            svg += fmt::format(
                "<rect x={} y={} width={} height={} fill=\"{}\" stroke=\"#ddd\" "
                "stroke-width=0.5><title>layer {}, "
                "expert {}: {} tokens, {:.2f} times the average</title></rect>",
                30 + x * side, l * side, side, side, color, l, x, tokens, load);
        }
        svg += "\n";
    }
    return svg + "</svg>\n";
}

/// A bar for each layer, logarithmic up to 3.4e38.
std::string activation_bars(const Json& largest, const Json& rms) {
    constexpr double kWidth = 380, kDecades = 38.5;
    std::string html =
        "<h2>Activations by layer</h2><p>The largest of each layer on a logarithmic scale; a full bar is "
        "3.4e38, where "
        "BF16 and FP32 end.</p>\n<table><tr><th>layer</th><th>largest</th><th></th><th>residual stream, root "
        "mean "
        "square</th></tr>\n";
    for (size_t l = 0; l < largest.size(); ++l) {
        const auto value = largest[l].get<double>();
        const double bar = kWidth * std::clamp(std::log10(std::max(value, 1.0)) / kDecades, 0.0, 1.0);
        html += fmt::format(
            "<tr><td>{}</td><td>{:.3g}</td><td><svg width={} height=12><rect width={:.1f} height=12 "
            "fill=#69c />"
            "</svg></td><td>{:.4g}</td></tr>\n",
            l, value, kWidth, bar, rms[l].get<double>());
    }
    return html + "</table>\n";
}

constexpr const char* kStyle =
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222;max-width:80em}table{border-collapse:collapse}"
    "td,th{padding:3px 8px;text-align:left;vertical-align:top;border-top:1px solid #eee}"
    ".ok{background:#cdebc5}.note{background:#fbdf9d}.skip{background:#eee}.wrong{background:#e0533d;color:#"
    "fff}";

}  // namespace

std::string describe(const Diagnosis& d) {
    std::string text = fmt::format("{}\n  {}; {}\n\n", printable(d.model, 200), kind_of(d), d.backend);
    for (const CheckReport& c : d.checks) {
        std::string name = c.name;
        for (const CheckFinding& f : c.findings) {
            const std::string head = fmt::format("{:5} {:{}}", verdict_name(f.verdict), name, kNameWidth);
            text += head + wrapped(f.text, head.size()) + "\n";
            if (!f.advice.empty()) {
                const std::string arrow = std::string(kNameWidth + 6, ' ') + "-> ";
                text += arrow + wrapped(f.advice, arrow.size()) + "\n";
            }
            name.clear();
        }
    }
    return text + "\n" + verdict_line(d) + "\n";
}

Json to_json(const Diagnosis& d) {
    Json j{{"verdict", verdict_name(d.verdict())},
           {"model", d.model},
           {"kind", d.kind.empty() ? Json() : Json(d.kind)},
           {"backend", d.backend},
           {"ok", d.count(Verdict::ok)},
           {"notes", d.count(Verdict::note)},
           {"wrong", d.count(Verdict::wrong)},
           {"skipped", d.count(Verdict::skipped)},
           {"seconds", d.seconds},
           {"checks", Json::array()}};
    for (const CheckReport& c : d.checks) {
        Json findings = Json::array();
        for (const CheckFinding& f : c.findings) {
            findings.push_back({{"verdict", verdict_name(f.verdict)}, {"text", f.text}});
            if (!f.advice.empty()) findings.back()["advice"] = f.advice;
        }
        j["checks"].push_back({{"name", c.name},
                               {"verdict", verdict_name(c.verdict())},
                               {"seconds", c.seconds},
                               {"findings", std::move(findings)},
                               {"numbers", c.numbers}});
    }
    return j;
}

std::string to_html(const Diagnosis& d) {
    const std::string name = html_text(printable(d.model, 400));
    std::string html = fmt::format(
        "<!doctype html><html lang=en><meta charset=utf-8><title>{}: doctor</title><style>{}</style>"
        "<h1>{}</h1>\n<p>{}; {}</p><p class={}>{}</p>\n<table>\n",
        name, kStyle, name, html_text(kind_of(d)), html_text(d.backend), verdict_name(d.verdict()),
        verdict_line(d));
    for (const CheckReport& c : d.checks)
        for (const CheckFinding& f : c.findings)
            html += fmt::format("<tr><td class={0}>{0}</td><td>{1}</td><td>{2}<br><i>{3}</i></td></tr>\n",
                                verdict_name(f.verdict), html_text(c.name),
                                html_text(printable(f.text, 1000)), html_text(f.advice));
    html += "</table>\n";
    for (const CheckReport& c : d.checks)
        if (c.numbers.contains("largest") && c.numbers.contains("residual_rms"))
            html += activation_bars(c.numbers["largest"], c.numbers["residual_rms"]);
    if (!d.expert_tokens.empty())
        html +=
            "<h2>Load of the experts</h2><p>Layers down, experts across. White: no token chose it; green: as "
            "busy as "
            "the others of its layer; red: four times as busy and more.</p>\n" +
            expert_picture(d);
    return html + "</html>\n";
}

}  // namespace quern
