#include "cuda_stand_in/streams.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cuda_stand_in/device.h"
#include "cuda_stand_in/errors.h"
#include "cuda_stand_in/pace.h"

struct CUgraphNode_st {
    cudaGraphNodeType type;
    std::function<cudaError_t()> work;
};

struct CUgraph_st {
    std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
};

struct CUgraphExec_st {
    std::vector<CUgraphNode_st> nodes;
};

struct CUstream_st {
    int device;
    std::unique_ptr<CUgraph_st> graph;  // null: it does not capture
};

struct CUevent_st {
    std::chrono::steady_clock::time_point time;
};

namespace quern::cuda_stand_in {
namespace {

thread_local int captures = 0;

}  // namespace

bool capturing() { return captures > 0; }

cudaError_t refuse_in_capture(const char* call) {
    return fail(cudaErrorStreamCaptureUnsupported, std::string(call) + " while a stream captures");
}

cudaError_t in_order(cudaStream_t stream, cudaGraphNodeType type, const std::function<cudaError_t()>& work) {
    if (stream == nullptr && capturing()) return refuse_in_capture("work on the default stream");
    if (stream != nullptr && stream->device != current_device())
        return fail(cudaErrorInvalidResourceHandle, "work on a stream of another device");
    if (stream == nullptr || stream->graph == nullptr) return work();
    stream->graph->nodes.push_back(std::make_unique<CUgraphNode_st>(CUgraphNode_st{type, work}));
    return cudaSuccess;
}

}  // namespace quern::cuda_stand_in

using namespace quern::cuda_stand_in;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new CUstream_st{current_device(), nullptr};
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    if (capturing()) return refuse_in_capture("cudaStreamSynchronize");
    wait_for_graphs();
    return cudaSuccess;
}
/// Copies are made at once, so nothing is ever left of them.
cudaError_t cudaStreamQuery(cudaStream_t) {
    if (capturing()) return refuse_in_capture("cudaStreamQuery");
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new CUevent_st{};
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    if (capturing()) return refuse_in_capture("cudaEventRecord");
    event->time = std::chrono::steady_clock::now();
    record_mark();
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream == nullptr || stream->graph != nullptr)
        return fail(cudaErrorIllegalState, "cudaStreamBeginCapture: this stream cannot begin now");
    stream->graph = std::make_unique<CUgraph_st>();
    ++captures;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (stream == nullptr || stream->graph == nullptr)
        return fail(cudaErrorIllegalState, "cudaStreamEndCapture: this stream does not capture");
    *graph = stream->graph.release();
    --captures;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    for (size_t i = 0; nodes != nullptr && i < graph->nodes.size() && i < *count; ++i)
        nodes[i] = graph->nodes[i].get();
    *count = graph->nodes.size();
    return cudaSuccess;
}
cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
    *type = node->type;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    auto made = std::make_unique<CUgraphExec_st>();
    for (const auto& node : graph->nodes) made->nodes.push_back(*node);
    *exec = made.release();
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    begin_graph();
    for (const CUgraphNode_st& node : exec->nodes)
        if (const cudaError_t code = in_order(stream, node.type, node.work); code != cudaSuccess) return code;
    return cudaSuccess;
}
