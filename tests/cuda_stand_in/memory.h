// Memory of the stand-in's devices.
#pragma once

#include <cstdint>

namespace quern::cuda_stand_in {

int64_t taken_bytes(int device);

}  // namespace quern::cuda_stand_in
