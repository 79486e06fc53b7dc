// Engine: runs requests on a model. submit, then step until it has nothing to do.
//
// Many sequences share each step: rows of prompts (in chunks) and one row of every sequence that is
// answering. Tokens of a sequence do not depend on what runs beside it. Not thread-safe: one thread owns the
// engine.
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

struct EngineOptions {
    int64_t context = 0;        // tokens a sequence may hold; 0: the largest that fits, at most the model's
    int64_t sequences = 1;      // that run at the same time
    int64_t step_tokens = 512;  // rows in one step at most
    std::string kv_type = "auto";  // auto, f32, bf16, f16; auto: what the backend computes in
    int64_t cache_bytes = 0;       // for states of earlier requests (PrefixCache); 0: none are kept
};

using RequestId = int64_t;

class Engine {
  public:
    Engine(Model& model, Backend& backend, const EngineOptions& options);
    ~Engine();

    /// Queues a request. Throws Error(usage) for settings that make no sense and Error(too_long) if the
    /// prompt leaves no room for a single token.
    RequestId submit(Request request);
    /// Ends a request at the next step with FinishReason::cancelled; unknown or finished ids are ignored.
    void cancel(RequestId id);
    /// Runs one batch. False: nothing was left to do. Errors of one request end that request only.
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
    /// What the prefix cache did so far.
    PrefixCacheStats cache_stats() const;
    /// Bytes that the engine holds beside the weights: KV pages, recurrent state, plans.
    int64_t memory_bytes() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quern
