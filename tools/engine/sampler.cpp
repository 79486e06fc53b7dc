#include "tools/engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "ggml-like/check.h"
#include "tools/engine/ranked_ids.h"

namespace quern {
namespace {

/// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011): 53 random bits for a (seed, position) pair, no state to
/// keep.
double uniform(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
        std::copy_n(next, 4, c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const uint64_t bits = (uint64_t{c[0]} << 32 | c[1]) >> 11;
    return static_cast<double>(bits) * 0x1p-53;
}

bool penalizes(const Sampling& s) {
    return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
}

void penalize(std::vector<float>& logits, const Sampling& s, std::span<const int32_t> history) {
    if (!penalizes(s)) return;
    if (s.penalty_window >= 0 && history.size() > static_cast<size_t>(s.penalty_window))
        history = history.last(static_cast<size_t>(s.penalty_window));
    std::unordered_map<int32_t, int> seen;
    for (int32_t id : history) ++seen[id];
    for (const auto& [id, count] : seen) {
        if (id < 0 || static_cast<size_t>(id) >= logits.size()) continue;
        float& x = logits[static_cast<size_t>(id)];
        x = x > 0 ? x / s.repetition_penalty : x * s.repetition_penalty;
        x -= s.presence_penalty + s.frequency_penalty * static_cast<float>(count);
    }
}

/// Logits of the ids that may be sampled, with bias and penalties.
std::vector<float> adjusted(std::span<const float> logits, int64_t vocab, const Sampling& s,
                            std::span<const int32_t> history) {
    const auto rows = std::min<size_t>(static_cast<size_t>(vocab), logits.size());
    std::vector<float> x(logits.begin(), logits.begin() + static_cast<ptrdiff_t>(rows));
    bool any_finite = false;
    for (size_t id = 0; id < rows; ++id) {
        if (std::isnan(x[id]) || x[id] == INFINITY)
            FAIL(runtime,
                 "the model produced {} as the logit of token {}: the answer stops here. The checkpoint may "
                 "be "
                 "damaged (try `quern quantize-inspect`), or this is a bug in quern",
                 std::isnan(x[id]) ? "NaN" : "infinity", id);
        any_finite |= std::isfinite(x[id]);
    }
    CHECK(any_finite, "the model produced no finite logit among {}", rows);
    for (const auto& [id, bias] : s.logit_bias)
        if (id >= 0 && static_cast<size_t>(id) < rows) x[static_cast<size_t>(id)] += bias;
    penalize(x, s, history);
    return x;
}

bool likelier(const Candidate& a, const Candidate& b) {
    return a.probability != b.probability ? a.probability > b.probability : a.id < b.id;
}

void normalize(std::vector<Candidate>& list) {
    double sum = 0;
    for (const Candidate& c : list) sum += c.probability;
    for (Candidate& c : list) c.probability /= sum;
}

std::vector<Candidate> softmax(const std::vector<float>& x, float temperature) {
    const double highest = *std::max_element(x.begin(), x.end());
    std::vector<Candidate> list;
    list.reserve(x.size());
    for (size_t id = 0; id < x.size(); ++id) {
        const double p = std::exp((x[id] - highest) / temperature);
        if (p > 0) list.push_back({static_cast<int32_t>(id), p});
    }
    return list;
}

void keep_top_k(std::vector<Candidate>& list, int k) {
    if (k <= 0 || static_cast<size_t>(k) >= list.size()) return;
    std::nth_element(list.begin(), list.begin() + (k - 1), list.end(), likelier);
    list.resize(static_cast<size_t>(k));
}

/// The smallest set of likeliest candidates that holds `p` of the probability.
void keep_top_p(std::vector<Candidate>& list, double p) {
    if (p < 1.0) {
        // All candidates below (1-p)/n together have less than 1-p, so the set never needs them: not sorted.
        const double floor = (1.0 - p) / static_cast<double>(list.size());
        std::erase_if(list, [&](const Candidate& c) { return c.probability < floor; });
    }
    std::sort(list.begin(), list.end(), likelier);
    double sum = 0;
    for (size_t i = 0; i < list.size(); ++i) {
        sum += list[i].probability;
        if (sum >= p) return list.resize(i + 1);
    }
}

int32_t draw(const std::vector<Candidate>& list, uint64_t seed, int64_t position) {
    double left = uniform(seed, static_cast<uint64_t>(position));
    for (const Candidate& c : list) {
        left -= c.probability;
        if (left < 0) return c.id;
    }
    return list.back().id;
}

void keep_min_p(std::vector<Candidate>& list, float min_p) {
    if (min_p <= 0) return;
    const double floor = min_p * list.front().probability;
    std::erase_if(list, [&](const Candidate& c) { return c.probability < floor; });
}

}  // namespace

bool takes_highest(const Sampling& s) {
    return (s.temperature == 0.0f || s.top_k == 1) && !penalizes(s) && s.logit_bias.empty();
}

const char* finish_reason_name(FinishReason reason) {
    constexpr const char* kNames[] = {"none", "stop", "length", "cancelled", "error"};
    return kNames[static_cast<size_t>(reason)];
}

std::vector<Candidate> candidates(std::span<const float> logits, int64_t vocab, const Sampling& s,
                                  std::span<const int32_t> history) {
    const std::vector<float> x = adjusted(logits, vocab, s, history);
    if (s.temperature == 0.0f || s.top_k == 1)
        return {{static_cast<int32_t>(std::max_element(x.begin(), x.end()) - x.begin()), 1.0}};
    std::vector<Candidate> list = softmax(x, s.temperature);
    keep_top_k(list, s.top_k);
    normalize(list);
    keep_top_p(list, s.top_p);
    keep_min_p(list, s.min_p);
    normalize(list);
    return list;
}

int32_t sample(std::span<const float> logits, int64_t vocab, const Sampling& s,
               std::span<const int32_t> history, int64_t position) {
    return draw(candidates(logits, vocab, s, history), s.seed, position);
}

namespace {

/// The allowed ids that count, the likeliest first, with their weights. `next`: the next likeliest id and its logit; when it has
/// no more, `ran_out` is set.
template <typename Next>
std::vector<Candidate> allowed_candidates(const Next& next, size_t ids, const Sampling& s,
                                          const std::function<bool(int32_t)>& allow, bool& ran_out) {
    constexpr double kNegligible = -40;
    const bool greedy = s.temperature == 0.0f;
    const size_t most = greedy ? 1 : s.top_k > 0 ? static_cast<size_t>(s.top_k) : ids;
    std::vector<Candidate> out;
    double highest = 0;
    while (out.size() < most) {
        const std::optional<std::pair<int32_t, double>> one = next();
        if (!one) {
            ran_out = true;
            break;
        }
        const auto [id, logit] = *one;
        if (logit == -INFINITY || (!out.empty() && (logit - highest) / s.temperature < kNegligible)) break;
        if (!allow(id)) continue;
        if (out.empty()) highest = logit;
        out.push_back({id, greedy ? 1.0 : std::exp((logit - highest) / s.temperature)});
    }
    return out;
}

std::vector<Candidate> allowed_candidates(const std::vector<float>& x, const Sampling& s,
                                          const std::function<bool(int32_t)>& allow) {
    RankedIds ids(x);
    bool ran_out = false;
    const auto next = [&]() -> std::optional<std::pair<int32_t, double>> {
        const auto id = ids.next();
        if (!id) return {};
        return std::pair(*id, static_cast<double>(x[static_cast<size_t>(*id)]));
    };
    return allowed_candidates(next, x.size(), s, allow, ran_out);
}

int32_t draw_allowed(std::vector<Candidate> list, const Sampling& s, int64_t position) {
    normalize(list);
    keep_top_p(list, s.top_p);
    keep_min_p(list, s.min_p);
    normalize(list);
    return draw(list, s.seed, position);
}

}  // namespace

int32_t sample_allowed(std::span<const float> logits, int64_t vocab, const Sampling& s,
                       std::span<const int32_t> history, int64_t position,
                       const std::function<bool(int32_t)>& allow,
                       const std::function<void(std::span<float>)>& narrow) {
    std::vector<float> x = adjusted(logits, vocab, s, history);
    if (narrow) narrow(x);
    const std::vector<Candidate> list = allowed_candidates(x, s, allow);
    if (list.empty())
        FAIL(runtime,
             "the form that the answer must have (a schema, a choice, the tools) lets no token follow here");
    return draw_allowed(list, s, position);
}

std::optional<int32_t> sample_allowed_top(const TopLogits& top, int64_t vocab, const Sampling& s,
                                          int64_t position, const std::function<bool(int32_t)>& allow) {
    if (penalizes(s) || !s.logit_bias.empty()) return {};
    size_t at = 0;
    const auto next = [&]() -> std::optional<std::pair<int32_t, double>> {
        if (at == top.ids.size()) return {};
        const size_t i = at++;
        return std::pair(top.ids[i], static_cast<double>(top.logits[i]));
    };
    bool ran_out = false;
    const std::vector<Candidate> list =
        allowed_candidates(next, static_cast<size_t>(vocab), s, allow, ran_out);
    if (list.empty() || (ran_out && static_cast<int64_t>(top.ids.size()) < vocab)) return {};
    return draw_allowed(list, s, position);
}

/// The relative error that a device's FP32 sum may have.
constexpr double kSumError = 2e-5;

/// keep_top_p for the head of a longer list. False if the missing rest, or the error of the sum, could change the set;
/// a list that ends below min_p has all that matters.
bool keep_top_p_of_head(std::vector<Candidate>& head, double p, float min_p) {
    double sum = 0;
    for (size_t i = 0; i < head.size(); ++i) {
        sum += head[i].probability;
        if (p < 1 && std::abs(sum - p) <= kSumError) return false;
        if (p < 1 && sum > p) return head.resize(i + 1), true;
    }
    return head.back().probability < min_p * head.front().probability;
}

std::optional<int32_t> sample_top(const TopLogits& top, int64_t vocab, const Sampling& s, int64_t position) {
    if (penalizes(s) || !s.logit_bias.empty() || top.ids.empty()) return {};
    if (s.temperature == 0.0f || s.top_k == 1) return top.ids[0];
    if (!(top.sum >= 1)) return {};  // the highest alone is 1
    const bool by_count = s.top_k > 0 && static_cast<size_t>(s.top_k) <= top.ids.size();
    const size_t count = by_count ? static_cast<size_t>(s.top_k) : top.ids.size();
    std::vector<Candidate> list;
    list.reserve(count);
    double kept = 0;
    for (size_t i = 0; i < count; ++i) {
        const double p = std::exp((static_cast<double>(top.logits[i]) - top.logits[0]) / s.temperature);
        if (p > 0) list.push_back({top.ids[i], p});
        kept += p;
    }
    // Nothing is missing if there are no others, or if not even all of these count.
    const bool whole = by_count || static_cast<int64_t>(count) >= vocab || list.size() < count;
    for (Candidate& c : list) c.probability /= whole ? kept : top.sum;
    if (whole)
        keep_top_p(list, s.top_p);
    else if (s.top_k > 0 || !keep_top_p_of_head(list, s.top_p, s.min_p))
        return {};
    keep_min_p(list, s.min_p);
    normalize(list);
    return draw(list, s.seed, position);
}

}  // namespace quern
