// What the compiler wrote down of each kernel beside its machine code, as far as a launch depends on it.
#pragma once

#include <array>
#include <map>
#include <string>

namespace quern::cuda_stand_in {

struct CompiledKernel {
    int static_shared = 0;                   // bytes
    int most_threads = 1024;                 // of a block: __launch_bounds__
    std::array<int, 3> cluster = {1, 1, 1};  // blocks: __cluster_dims__
};

/// Of one object file's code: kernels by symbol, for each compute capability (90, 120 ...) that it was compiled for.
using CompiledCode = std::map<int, std::map<std::string, CompiledKernel>>;

/// `wrapper`: what the compiler hands to __cudaRegisterFatBinary. Code that was stored compressed, and what is not
/// understood, is left out.
CompiledCode read_compiled_code(const void* wrapper);

}  // namespace quern::cuda_stand_in
