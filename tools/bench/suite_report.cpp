// The suite's table, and its picture.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/bench/suite.h"
#include "tools/common/html.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kColumns[] = {
    "section",           "name",           "people",      "requests",    "failed",        "prompt_tokens",
    "tokens_per_second", "median_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p95_itl_ms",
    "p99_itl_ms",        "follow_up_ms",   "acceptance",  "correct",     "skipped"};

std::string cell(const Json& row, const char* name) {
    const auto found = row.find(name);
    if (found == row.end() || found->is_null()) return "";
    if (found->is_string()) return *found;
    if (found->is_number_integer()) return fmt::format("{}", found->get<int64_t>());
    const double value = *found;
    return fmt::format("{:.{}f}", value, std::abs(value) >= 1000 ? 0 : std::abs(value) >= 10 ? 1 : 2);
}

std::string times(const Json& row, const std::string& name) {
    return fmt::format("{} / {} / {}", cell(row, ("median_" + name).c_str()),
                       cell(row, ("p95_" + name).c_str()), cell(row, ("p99_" + name).c_str()));
}

/// One of the pictures: a frame with a title, in a square of its own.
struct Frame {
    double x, y;
    static constexpr double kWidth = 420, kHeight = 240, kLeft = 56, kTop = 34, kRight = 16, kBottom = 40;

    double inner_width() const { return kWidth - kLeft - kRight; }
    double inner_height() const { return kHeight - kTop - kBottom; }
    double bottom() const { return y + kHeight - kBottom; }
    std::string text(double at_x, double at_y, const char* anchor, const std::string& words) const {
        return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", at_x, at_y,
                           anchor, html_text(words));
    }
    std::string axes(const std::string& title, double top) const {
        std::string out = fmt::format("<text class=\"title\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                                      x + kLeft, y + 20, html_text(title));
        for (int i = 0; i <= 4; ++i) {
            const double level = bottom() - inner_height() * i / 4;
            out += fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n", x + kLeft,
                               level, x + kWidth - kRight, level);
            out += text(x + kLeft - 6, level + 4, "end", fmt::format("{:.4g}", top * i / 4));
        }
        return out;
    }
};

/// A round number that is not below.
double round_up(double value) {
    if (!(value > 0)) return 1;
    const double ten = std::pow(10, std::floor(std::log10(value)));
    for (const double step : {1.0, 2.0, 4.0, 5.0, 8.0})
        if (step * ten >= value) return step * ten;
    return 10 * ten;
}

std::vector<const Json*> rows_of(const Json& rows, const char* section) {
    std::vector<const Json*> out;
    for (const Json& row : rows)
        if (row["section"] == section && !row.contains("skipped")) out.push_back(&row);
    return out;
}

double top_of(const std::vector<const Json*>& rows, const char* value) {
    double top = 0;
    for (const Json* row : rows) top = std::max(top, row->value(value, 0.0));
    return round_up(top);
}

std::string bars(const Frame& f, const std::vector<const Json*>& rows, const char* value,
                 const std::string& title) {
    const double top = top_of(rows, value), each = f.inner_width() / static_cast<double>(rows.size());
    std::string out = f.axes(title, top);
    for (size_t i = 0; i < rows.size(); ++i) {
        const double height = rows[i]->value(value, 0.0) / top * f.inner_height();
        const double left = f.x + Frame::kLeft + each * static_cast<double>(i);
        out += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"/>\n",
                           left + each * 0.15, f.bottom() - height, each * 0.7, height);
        out += f.text(left + each / 2, f.bottom() - height - 4, "middle", cell(*rows[i], value));
        out += f.text(left + each / 2, f.bottom() + 16, "middle", (*rows[i])["name"]);
    }
    return out;
}

std::string curve(const Frame& f, const std::vector<const Json*>& rows, const char* along, const char* value,
                  const std::string& title) {
    const double top = top_of(rows, value);
    std::string out = f.axes(title, top), points;
    for (size_t i = 0; i < rows.size(); ++i) {
        const double at =
            rows.size() > 1 ? static_cast<double>(i) / static_cast<double>(rows.size() - 1) : 0.5;
        const double px = f.x + Frame::kLeft + at * f.inner_width();
        const double py = f.bottom() - rows[i]->value(value, 0.0) / top * f.inner_height();
        points += fmt::format("{:.1f},{:.1f} ", px, py);
        out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>\n", px, py);
        out += f.text(px, f.bottom() + 16, "middle", fmt::format("{:.0f}", (*rows[i])[along].get<double>()));
    }
    return out + fmt::format("<polyline points=\"{}\"/>\n", points);
}

}  // namespace

std::string suite_markdown(const Json& rows) {
    std::string out =
        "| section | what | people | answers | failed | prompt tokens | tokens/s | first token p50 / p95 / "
        "p99 ms | between "
        "tokens p50 / p95 / p99 ms | next turn ms | accepted | correct |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for (const Json& row : rows) {
        if (row.contains("skipped")) {
            out += fmt::format("| {} | {} | skipped: {} |\n", cell(row, "section"), cell(row, "name"),
                               cell(row, "skipped"));
            continue;
        }
        const std::string accepted =
            row.contains("acceptance") ? fmt::format("{:.0f} %", 100 * row["acceptance"].get<double>()) : "";
        out += fmt::format("| {} | {} | {} | {} | {} | {:.0f} | {} | {} | {} | {} | {} | {} |\n",
                           cell(row, "section"), cell(row, "name"), cell(row, "people"),
                           cell(row, "requests"), cell(row, "failed"), row["prompt_tokens"].get<double>(),
                           cell(row, "tokens_per_second"), times(row, "ttft_ms"), times(row, "itl_ms"),
                           cell(row, "follow_up_ms"), accepted, cell(row, "correct"));
    }
    return out;
}

std::string suite_csv(const Json& rows) {
    std::string out = fmt::format("{}\n", fmt::join(kColumns, ","));
    for (const Json& row : rows) {
        std::vector<std::string> cells;
        for (const char* name : kColumns) {
            const auto found = row.find(name);
            if (found == row.end())
                cells.emplace_back();
            else if (found->is_string())
                cells.push_back(fmt::format("\"{}\"", found->get<std::string>()));
            else
                cells.push_back(found->dump());
        }
        out += fmt::format("{}\n", fmt::join(cells, ","));
    }
    return out;
}

std::string suite_plot(const Json& rows, const std::string& title) {
    const auto kinds = rows_of(rows, "kind"), crowd = rows_of(rows, "crowd"), depths = rows_of(rows, "depth");
    std::vector<std::string> pictures;
    const auto place = [&] {
        const size_t n = pictures.size();
        return Frame{static_cast<double>(n % 2) * Frame::kWidth,
                     30 + static_cast<double>(n / 2) * Frame::kHeight};
    };
    if (!kinds.empty())
        pictures.push_back(bars(place(), kinds, "tokens_per_second", "tokens/s by kind of prompt"));
    if (!kinds.empty() && kinds[0]->contains("acceptance"))
        pictures.push_back(bars(place(), kinds, "acceptance", "drafted tokens accepted, by kind"));
    if (!crowd.empty()) {
        pictures.push_back(
            curve(place(), crowd, "people", "tokens_per_second", "tokens/s of all, by people at once"));
        pictures.push_back(
            curve(place(), crowd, "people", "p95_ttft_ms", "first token p95, ms, by people at once"));
    }
    if (!depths.empty()) {
        pictures.push_back(
            curve(place(), depths, "prompt_tokens", "median_ttft_ms", "first token, ms, by prompt tokens"));
        pictures.push_back(
            curve(place(), depths, "prompt_tokens", "tokens_per_second", "tokens/s by tokens before"));
    }
    const double height = 40 + Frame::kHeight * std::ceil(static_cast<double>(pictures.size()) / 2);
    std::string out = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
        "height=\"{1:.0f}\">\n"
        "<style>text{{font:11px sans-serif;fill:#222}}.title,.name{{font-weight:bold}}line{{stroke:#ddd}}"
        "rect,circle{{fill:#2b6cb0}}polyline{{fill:none;stroke:#2b6cb0;stroke-width:2}}</style>\n"
        "<rect width=\"100%\" height=\"100%\" style=\"fill:#fff\"/>\n<text class=\"name\" x=\"16\" "
        "y=\"20\">{2}</text>\n",
        2 * Frame::kWidth, height, html_text(title));
    for (const std::string& picture : pictures) out += picture;
    return out + "</svg>\n";
}

}  // namespace quern
