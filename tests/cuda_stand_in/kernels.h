// The program's kernels, as its object files register them.
#pragma once

#include <map>

#include "cuda_stand_in/compiled_code.h"
#include "cuda_stand_in/stand_in.h"

namespace quern::cuda_stand_in {

struct KnownKernel : Kernel {
    std::map<int, CompiledKernel> compiled;  // by compute capability
    std::map<int, int> allowed_shared;       // dynamic, by device: what cudaFuncSetAttribute allowed

    /// For the device in use. Where the program has no code for it, that for another is a good guess: memory and
    /// launch bounds are those of the source.
    CompiledKernel code() const;
};

/// By the address of its host function; null: no kernel of this program.
KnownKernel* find_kernel(const void* host);

/// What cudaFuncSetAttribute allowed the kernel on the device in use; 0: it was not asked. Kernels belong to all threads.
int64_t allowed_shared(const KnownKernel& kernel);

/// `compiled`: by compute capability. A host function that is known stays what it is.
void add_kernel(const void* host, const std::string& symbol, std::map<int, CompiledKernel> compiled);
void remove_kernel(const void* host);

/// Shared memory of a block that no kernel asks for.
inline constexpr int kPlainShared = 48 * 1024;

}  // namespace quern::cuda_stand_in
