// Host memory for transfers: pinned where the system gives it.
#pragma once

#include <cstdint>

namespace quern::cuda::pack {

/// At least `bytes`, pinned; plain memory, which is only slower, where the system gives no more pinned memory
/// (containers, `ulimit -l`). Throws Error(memory), with `what` in the message, if there is neither. Other threads' calls of
/// CUDA hardly wait for it.
void* alloc_host(int64_t bytes, const char* what);
/// Gives it back; null is ignored.
void free_host(void* memory);
/// Whether all memory of alloc_host that is in use is pinned, so that devices reach it.
bool all_pinned();

}  // namespace quern::cuda::pack
