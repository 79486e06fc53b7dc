// The device that is in use.
#pragma once

#include "cuda_stand_in/stand_in.h"

namespace quern::cuda_stand_in {

int current_device();
/// Whether the current device may read the memory of `peer`.
bool reads_peer(int peer);
inline const Device& device() { return devices()[static_cast<size_t>(current_device())]; }

inline constexpr int64_t kDeviceBytes = 150'000'000'000;  // of each device

}  // namespace quern::cuda_stand_in
