// What a CPU op gets to work with: threads, dot products for this machine, and reusable buffers.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ggml-like/cpu/dot.h"
#include "ggml-like/cpu/thread_pool.h"

namespace quern {
class Communicator;
}

namespace quern::cpu {

struct Context {
    ThreadPool& pool;
    const DotKernels& dot;
    std::array<std::vector<float>, 4> buffers;
    Communicator* communicator = nullptr;  // of the ranks that this one belongs to, if it belongs to several
    int rank = 0;

    /// Scratch for one op call, contents undefined; `which` 0..3 are separate buffers. Not for use inside
    /// workers.
    float* buffer(int which, int64_t floats) {
        auto& b = buffers[static_cast<size_t>(which)];
        if (static_cast<int64_t>(b.size()) < floats) b.resize(static_cast<size_t>(floats));
        return b.data();
    }
};

}  // namespace quern::cpu
