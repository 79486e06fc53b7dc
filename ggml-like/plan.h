// Plan: a graph with memory, ready to run again and again.
#pragma once

#include <memory>

#include "ggml-like/graph.h"
#include "ggml-like/planner.h"

namespace quern {

class Backend;
struct InputCopy;

/// Memory that plans share because they run one at a time; allocated once. A plan's results stay in it until
/// another plan's inputs are filled.
class Workspace {
  public:
    /// `arena_bytes`: the most scratch and outputs of a plan; `input_bytes`: the most inputs. `mark`: of Backend::set_mark, for
    /// Plan::run_marked and what run_before is given: no other such workspace has it. Throws Error(memory).
    Workspace(Backend& backend, int64_t arena_bytes, int64_t input_bytes, int mark = 0);
    ~Workspace();
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    int64_t arena_bytes() const { return arena_bytes_; }
    int64_t input_bytes() const { return input_bytes_; }
    std::byte* arena() const { return device_; }
    std::byte* inputs() const { return device_ + arena_bytes_; }
    std::byte* host_inputs() const { return host_; }

  private:
    friend class Plan;

    Backend& backend_;
    int64_t arena_bytes_, input_bytes_;
    const int mark_;       // stands for an upload of the inputs ...
    bool marked_ = false;  // ... that nobody has waited for
    std::byte* device_ = nullptr;
    std::byte* host_ = nullptr;
};

/// How often a plan runs: a backend may capture one that runs repeatedly.
enum class PlanUse { sometimes, repeatedly };

class Plan {
  public:
    /// Plans the memory inside `workspace`, which outlives the plan, and lets the backend prepare (capture)
    /// the graph. Throws Error if the workspace is too small.
    Plan(Graph graph, Backend& backend, Workspace& workspace, PlanUse use);
    /// With a workspace of its own.
    Plan(Graph graph, Backend& backend);
    ~Plan();
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    /// Host side of an input tensor, undefined until filled; uploaded as one block by run().
    template <typename T>
    T* input(const Tensor* t) {
        return reinterpret_cast<T*>(host_input(t));
    }
    /// Takes over the inputs of a plan whose first ones are the same as all of this one's.
    void copy_inputs(const Plan& from);
    /// Uploads the inputs and runs. Results are readable after Backend::synchronize(); only then may inputs be filled again.
    void run();
    /// The same where a plan of this workspace may be filled before anybody waits for the results: it calls await_inputs() first,
    /// which returns when these inputs were uploaded.
    void run_marked();
    void await_inputs();
    /// Uploads the inputs and those of `next`, which has another workspace, and runs: next.run_uploaded() then runs that one, and it
    /// is filled again after next.await_inputs().
    void run_before(Plan& next);
    void run_uploaded();

    const Graph& graph() const { return graph_; }
    PlanUse use() const { return use_; }
    int64_t arena_bytes() const { return memory_.arena_bytes; }
    /// The backend sets `zero_bytes` bytes at `zeros` to zeros when a run begins.
    int64_t zero_bytes() const { return memory_.zero_bytes; }
    std::byte* zeros() const { return workspace_.arena(); }
    int64_t input_bytes() const { return memory_.input_bytes; }

    /// The backend's own handle for this plan (a captured CUDA graph); null on the CPU.
    std::shared_ptr<void> captured;
    /// Kernels that one run launches, if the backend captured it; else 0.
    int64_t kernels = 0;

  private:
    Plan(Graph graph, Backend& backend, Workspace* workspace, PlanUse use);
    std::byte* host_input(const Tensor* t);
    InputCopy inputs_copy() const;
    void upload();
    void mark_upload();

    Graph graph_;
    Backend& backend_;
    PlanUse use_;
    ArenaPlan memory_;
    std::unique_ptr<Workspace> own_;
    Workspace& workspace_;
};

}  // namespace quern
