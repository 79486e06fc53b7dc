// Plan: a graph with memory, ready to run again and again.
#pragma once

#include <memory>

#include "ggml-like/graph.h"
#include "ggml-like/planner.h"

namespace quern {

class Backend;

class Plan {
  public:
    /// Plans the memory, allocates it from the backend and lets the backend prepare (capture) the graph.
    Plan(Graph graph, Backend& backend);
    ~Plan();
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    /// Host side of an input tensor; uploaded as one block by run().
    template <typename T>
    T* input(const Tensor* t) {
        return reinterpret_cast<T*>(host_input(t));
    }
    /// Uploads the inputs and runs. Results are readable after Backend::synchronize().
    void run();

    const Graph& graph() const { return graph_; }
    int64_t arena_bytes() const { return memory_.arena_bytes; }
    int64_t input_bytes() const { return memory_.input_bytes; }

    /// The backend's own handle for this plan (a captured CUDA graph); null on the CPU.
    std::shared_ptr<void> captured;

  private:
    std::byte* host_input(const Tensor* t);

    Graph graph_;
    Backend& backend_;
    MemoryPlan memory_;
    std::vector<std::byte> input_host_;
    void* arena_ = nullptr;
    void* input_device_ = nullptr;
};

}  // namespace quern
