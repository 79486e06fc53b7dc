// RankedIds: the ids of a row of logits, the likeliest first, as they are asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace quern {

/// Of equal logits the lower id comes first; ids whose logit is -infinity do not come. Few ids are found at once, many in portions,
/// each four times as large as the one before. `logits` have no NaN and must outlive it.
class RankedIds {
  public:
    explicit RankedIds(std::span<const float> logits);
    std::optional<int32_t> next();

  private:
    void find_all();
    bool find_more();
    bool comes_later(int32_t a, int32_t b) const;

    std::span<const float> logits_;
    std::vector<uint32_t> with_key_;  // of many: logits of each key (ranked_ids.cpp)
    uint32_t bound_ = 0;              // keys from it on have been found
    uint32_t portion_;
    std::vector<int32_t> found_;  // a heap, the next one first
};

}  // namespace quern
