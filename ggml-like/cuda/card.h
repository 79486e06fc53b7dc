// What a choice among kernels may know of the GPU. Plain C++: choices are tested where no CUDA is.
#pragma once

namespace quern::cuda {

struct Card {
    int sms = 0;
    int capability = 0;       // 90, 120 ...
    int shared_bytes = 0;     // max dynamic shared memory of one block
    bool warpgroups = false;  // capability 90, and the binary has code for sm_90a: products of warpgroups
};

}  // namespace quern::cuda
