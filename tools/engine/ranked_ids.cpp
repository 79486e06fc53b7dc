#include "tools/engine/ranked_ids.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace quern {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr uint32_t kKeys = 1 << 16, kFirst = 4096, kGrowth = 4;

/// The upper half of a number that grows with the logit; both zeros have the same. Without a branch, which half of all logits
/// would take.
uint32_t key_of(float logit) {
    const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f), negative = bits >> 31;
    return (bits ^ ((0u - negative) | 0x80000000u)) >> 16;
}

}  // namespace

RankedIds::RankedIds(std::span<const float> logits) : logits_(logits), portion_(kFirst) {
    const auto none = static_cast<size_t>(std::count(logits.begin(), logits.end(), kNone));
    if (logits.size() - none <= kFirst) {
        find_all();
        return;
    }
    with_key_.resize(kKeys);
    bound_ = kKeys;
    for (const float x : logits) ++with_key_[key_of(x)];
    with_key_[key_of(kNone)] -= static_cast<uint32_t>(none);
}

bool RankedIds::comes_later(int32_t a, int32_t b) const {
    const float u = logits_[static_cast<size_t>(a)], v = logits_[static_cast<size_t>(b)];
    return u != v ? u < v : a > b;
}

void RankedIds::find_all() {
    for (size_t i = 0; i < logits_.size(); ++i)
        if (logits_[i] != kNone) found_.push_back(static_cast<int32_t>(i));
    std::make_heap(found_.begin(), found_.end(), [this](int32_t a, int32_t b) { return comes_later(a, b); });
}

/// The ids of the next lower keys, a portion at least. False: there are none.
bool RankedIds::find_more() {
    const uint32_t end = bound_;
    uint32_t count = 0;
    while (bound_ > 0 && count < portion_) count += with_key_[--bound_];
    portion_ *= kGrowth;
    found_.reserve(count);
    for (size_t i = 0; i < logits_.size() && found_.size() < count; ++i)
        if (const uint32_t key = key_of(logits_[i]); key >= bound_ && key < end && logits_[i] != kNone)
            found_.push_back(static_cast<int32_t>(i));
    std::make_heap(found_.begin(), found_.end(), [this](int32_t a, int32_t b) { return comes_later(a, b); });
    return count > 0;
}

std::optional<int32_t> RankedIds::next() {
    if (found_.empty() && !find_more()) return {};
    std::pop_heap(found_.begin(), found_.end(), [this](int32_t a, int32_t b) { return comes_later(a, b); });
    const int32_t id = found_.back();
    found_.pop_back();
    return id;
}

}  // namespace quern
