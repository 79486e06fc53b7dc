// Streams, which run what they get in order and at once, or collect it for a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace quern::cuda_stand_in {

/// Does the work, or makes it a node of the graph that the stream captures.
cudaError_t in_order(cudaStream_t stream, cudaGraphNodeType type, const std::function<cudaError_t()>& work);

/// Whether a stream captures what this thread does: some of its calls are refused then.
bool capturing();
cudaError_t refuse_in_capture(const char* call);

/// Marks the place in the record (Record::marks).
void record_mark();

}  // namespace quern::cuda_stand_in
