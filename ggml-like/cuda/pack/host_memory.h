// Host memory for transfers: pinned if the system gives it.
#pragma once

#include <cstdint>

namespace quern::cuda::pack {

/// Pinned, or plain memory where pinned memory has run out (containers, `ulimit -l`): slower, never wrong.
/// Throws Error(memory) if there is neither.
void* alloc_host(int64_t bytes, const char* what);
/// Null is ignored.
void free_host(void* memory);

}  // namespace quern::cuda::pack
