// Engine: runs requests on a model. submit, then step until it has nothing to do.
//
// Many sequences share each step, which has rows of prompts or rows of answers (scheduler.h). The bits of an
// answer depend on its request alone: not on what runs beside it, how its prompt is cut into steps, or
// whether it goes on from a kept state. Not thread-safe: one thread owns the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tools/engine/prefix_cache_stats.h"
#include "tools/engine/request.h"

namespace quern {

class Backend;
class Model;
struct MemoryPlan;
struct MemoryMeasured;

struct EngineOptions {
    int64_t context = 0;    // tokens a sequence may hold; 0: the largest that fits, at most the model's
    int64_t sequences = 1;  // that run at the same time
    /// Rows of prompts in one step at most; 0: what suits the backend, 512 or 2048. Fewer than 64 count as
    /// 64: prompts are cut at multiples of 64 tokens only. While answers run a step has 128 at most, on a
    /// device 1024.
    int64_t step_tokens = 0;
    int64_t prompt_logits = 64;    // as many of them for requests with on_prompt_logits; 64 at least
    std::string kv_type = "auto";  // auto, f32, bf16, f16; auto: what the backend computes in
    /// For states of earlier requests (PrefixCache), in the memory that sequences' states are in; 0: none are
    /// kept.
    int64_t cache_bytes = 0;
};

using RequestId = int64_t;

class Engine {
  public:
    /// Takes all memory that it will ever need. Throws Error(memory) that says what to lower.
    Engine(Model& model, Backend& backend, const EngineOptions& options);
    ~Engine();

    /// Queues a request. Throws Error(usage) for settings that make no sense and Error(too_long) if the
    /// prompt leaves no room for a single token.
    RequestId submit(Request request);
    /// Ends a request at the next step with FinishReason::cancelled; unknown or finished ids are ignored.
    void cancel(RequestId id);
    /// Runs one step. False: nothing was left to do. Errors of one request end that request only. Throws
    /// Error(device) if the device failed, which does not go away: all requests have then ended with that
    /// error, and so would all later ones.
    bool step();
    /// Whether the request has finished; its Result stays until taken.
    bool finished(RequestId id) const;
    Result take(RequestId id);
    /// submit + step until finished + take.
    Result run(Request request);

    int64_t context() const;
    int64_t sequences() const;
    const Model& model() const;
    Backend& backend();
    const Backend& backend() const;
    /// Bytes that the engine holds beside the weights, by plan: KV pages, recurrent state, scratch
    /// (memory_plan.h).
    const MemoryPlan& memory_plan() const;
    /// The same by the device's own count; weights left at 0.
    const MemoryMeasured& memory_measured() const;
    /// Kernels that a step of one token for each of `sequences` launches; 0: not known (no captured plan).
    int64_t kernels(int64_t sequences) const;
    /// From now on states of the prefix cache may be kept in `directory` (prefix_file.h): takes those that an
    /// earlier process with the same model and layout has saved there. Returns a remark if its file was no
    /// good. Throws Error(runtime).
    std::string load_states(const std::string& directory);
    /// Saves them. False: `go_on`, asked again and again, said no. Throws Error(runtime).
    bool save_states(const std::function<bool()>& go_on);
    /// What the prefix cache did so far.
    PrefixCacheStats cache_stats() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quern
