// RankedIds: the ids of a row of logits, the likeliest first, as they are asked for.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace quern {

/// Of equal logits the lower id comes first. Ids are found and sorted in portions, each four times as large as the one before.
/// `logits` have no NaN and must outlive it.
class RankedIds {
  public:
    explicit RankedIds(std::span<const float> logits);
    std::optional<int32_t> next();

  private:
    bool find_more();

    std::span<const float> logits_;
    std::vector<uint32_t> with_key_;  // logits of each key (ranked_ids.cpp)
    uint32_t bound_;                  // keys from it on have been found
    uint32_t portion_;
    std::vector<int32_t> found_;  // sorted, the next one at the end
};

}  // namespace quern
