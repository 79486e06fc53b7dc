// Host memory for transfers: pinned where the system gives it.
#pragma once

#include <cstdint>

namespace quern::cuda::pack {

/// At least `bytes`, pinned; plain memory, which is only slower, where the system gives no more pinned memory
/// (containers, `ulimit -l`). Throws Error(memory), with `what` in the message, if there is neither.
void* alloc_host(int64_t bytes, const char* what);
/// Gives it back; null is ignored.
void free_host(void* memory);

}  // namespace quern::cuda::pack
