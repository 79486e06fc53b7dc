#include "tools/engine/ranked_ids.h"

#include <algorithm>
#include <bit>

namespace quern {
namespace {

constexpr uint32_t kKeys = 1 << 16, kFirst = 4096, kGrowth = 4;

/// The upper half of a number that grows with the logit; both zeros have the same. Without a branch, which half of all logits
/// would take.
uint32_t key_of(float logit) {
    const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f), negative = bits >> 31;
    return (bits ^ ((0u - negative) | 0x80000000u)) >> 16;
}

}  // namespace

RankedIds::RankedIds(std::span<const float> logits)
    : logits_(logits), with_key_(kKeys), bound_(kKeys), portion_(kFirst) {
    for (const float x : logits) ++with_key_[key_of(x)];
}

/// The ids of the next lower keys, a portion at least. False: there are none.
bool RankedIds::find_more() {
    const uint32_t end = bound_;
    uint32_t count = 0;
    while (bound_ > 0 && count < portion_) count += with_key_[--bound_];
    portion_ *= kGrowth;
    found_.reserve(count);
    for (size_t i = 0; i < logits_.size() && found_.size() < count; ++i)
        if (const uint32_t key = key_of(logits_[i]); key >= bound_ && key < end)
            found_.push_back(static_cast<int32_t>(i));
    std::sort(found_.begin(), found_.end(), [this](int32_t a, int32_t b) {
        const float u = logits_[static_cast<size_t>(a)], v = logits_[static_cast<size_t>(b)];
        return u != v ? u < v : a > b;
    });
    return count > 0;
}

std::optional<int32_t> RankedIds::next() {
    if (found_.empty() && !find_more()) return {};
    const int32_t id = found_.back();
    found_.pop_back();
    return id;
}

}  // namespace quern
