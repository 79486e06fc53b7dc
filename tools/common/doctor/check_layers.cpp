// What happens between the layers: the load of the experts, the size of activations.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/judgements.h"

namespace quern {
namespace {

/// Activations from here on leave no room: BF16 and FP32 both end at 3.4e38, and products are squared by norms.
constexpr float kNearEnd = 1e18f;
constexpr float kMaxF16 = 65504;
/// A layer routes if its tokens spread, in effect, over the experts that each uses and at least this share more.
constexpr double kSpread = 0.2;
constexpr double kManyDead = 0.25;         // of all experts
constexpr int64_t kEnoughChoices = 8;      // for each expert, to call one dead
constexpr double kOverloaded = 0.5;        // of the tokens, and
constexpr double kOverloadedTimes = 10.0;  // as many as an expert has on average

}  // namespace

ExpertLoad expert_load(const ModelTrace& trace, int64_t experts) {
    ExpertLoad load;
    for (const LayerTrace& layer : trace.layers) {
        if (layer.experts.empty()) continue;
        auto& counts = load.tokens.emplace_back(static_cast<size_t>(experts));
        for (const int32_t id : layer.experts) ++counts[static_cast<size_t>(id)];
    }
    return load;
}

double ExpertLoad::spread(size_t layer) const {
    double all = 0, h = 0;
    for (const int64_t n : tokens[layer]) all += static_cast<double>(n);
    for (const int64_t n : tokens[layer])
        if (n > 0) h -= static_cast<double>(n) / all * std::log(static_cast<double>(n) / all);
    return std::exp(h);
}

int64_t ExpertLoad::dead(size_t layer) const {
    return std::count(tokens[layer].begin(), tokens[layer].end(), 0);
}

void judge_experts(const ExpertLoad& load, int64_t tokens, int64_t used, CheckReport& report) {
    const auto experts = static_cast<int64_t>(load.tokens.at(0).size());
    const double room = kSpread * static_cast<double>(std::min(used, experts - used));
    int64_t dead = 0;
    double largest = 0, fewest = static_cast<double>(experts);
    size_t busiest = 0;
    for (size_t l = 0; l < load.tokens.size(); ++l) {
        const double spread = load.spread(l);
        dead += load.dead(l);
        fewest = std::min(fewest, spread);
        const auto& counts = load.tokens[l];
        const double share = static_cast<double>(*std::max_element(counts.begin(), counts.end())) /
                             static_cast<double>(tokens);
        if (share > largest) {
            largest = share;
            busiest = l;
        }
        if (spread < static_cast<double>(used) + room)
            report.add(Verdict::wrong,
                       fmt::format("layer {} sends its tokens to {:.1f} experts in effect, though each token "
                                   "chooses {} of {}",
                                   l, spread, used, experts),
                       "its router or the norm before it is damaged, or of another revision");
    }
    const auto all = static_cast<int64_t>(load.tokens.size()) * experts;
    report.numbers = {{"tokens", tokens},
                      {"experts", all},
                      {"not_chosen", dead},
                      {"largest_share", largest},
                      {"fewest_in_effect", fewest}};
    const bool enough = tokens * used >= kEnoughChoices * experts;
    const bool many = enough && static_cast<double>(dead) > kManyDead * static_cast<double>(all);
    const bool overloaded = largest > kOverloaded && largest * static_cast<double>(experts) >
                                                         kOverloadedTimes * static_cast<double>(used);
    report.add(
        many || overloaded ? Verdict::note : Verdict::ok,
        fmt::format("{} tokens of all kinds: {} of {} experts never chosen; the busiest takes {:.0f} % of "
                    "the tokens (layer {}); at least {:.1f} of {} in effect in every layer",
                    tokens, dead, all, 100 * largest, busiest, fewest, experts),
        many ? "usual where a model was pruned or trained on one kind of text; see --html for the picture"
        : overloaded ? "usual of an expert that the model treats as shared; else its router's row is damaged"
                     : "");
}

void judge_activations(const ModelTrace& trace, CheckReport& report) {
    size_t largest = 0;
    for (size_t l = 0; l < trace.layers.size(); ++l) {
        const LayerTrace& layer = trace.layers[l];
        report.numbers["largest"].push_back(layer.largest);
        report.numbers["residual_rms"].push_back(trace.rms(l));
        if (layer.largest > trace.layers[largest].largest) largest = l;
        if (report.verdict() == Verdict::wrong) continue;  // what follows is its consequence
        if (layer.not_finite == 0 && layer.largest < kNearEnd) continue;
        report.add(Verdict::wrong,
                   layer.not_finite > 0
                       ? fmt::format("layer {}: {} activations are NaN or infinite", l, layer.not_finite)
                       : fmt::format("layer {}: {} reaches {:.2g}; {} ends at 3.4e38", l, layer.largest_in,
                                     layer.largest, dtype_name(trace.activation)),
                   "this is the first layer that overflows: check its scales (quantize-inspect --health)");
    }
    if (report.verdict() == Verdict::wrong) return;
    const LayerTrace& l = trace.layers[largest];
    const bool beyond_f16 = l.largest > kMaxF16;
    report.add(beyond_f16 ? Verdict::note : Verdict::ok,
               fmt::format("the largest is {:.3g}, in {}; {} ends at 3.4e38", l.largest, l.largest_in,
                           dtype_name(trace.activation)),
               beyond_f16 ? "do not convert this model to F16, whose largest number is 65504" : "");
}

void check_experts(Examination& e, CheckReport& report) {
    const ModelInfo& info = e.model().info();
    if (info.experts == 0) return report.add(Verdict::skipped, "a dense model: it has no experts");
    judge_experts(expert_load(e.trace(), info.experts), e.trace().tokens, info.experts_used, report);
}

void check_activations(Examination& e, CheckReport& report) { judge_activations(e.trace(), report); }

}  // namespace quern
