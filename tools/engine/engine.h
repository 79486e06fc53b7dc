// Engine: runs requests on a model. submit, then step until it has nothing to do.
//
// Many sequences share each step, which has rows of prompts or rows of answers (scheduler.h). The bits of an
// answer depend on its request alone: not on what runs beside it, how its prompt is cut into steps, or
// whether it goes on from a kept state. Not thread-safe: one thread owns the engine.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/engine/prefix_cache_stats.h"
#include "tools/engine/request.h"
#include "tools/engine/speculation_report.h"

namespace quern {

class Backend;
class Drafter;
class Model;
class KeptStates;
struct MemoryPlan;
struct MemoryMeasured;

struct EngineOptions {
    int64_t context = 0;    // tokens a sequence may hold; 0: the largest that fits, at most the model's
    int64_t sequences = 1;  // that run at the same time
    /// Prompt rows in one step at most; 0: what suits the backend, 512 or, on a device, 8192. Fewer than 64 count as
    /// 64, since prompts are cut only at multiples of 64 tokens. While answers run: 128 at most, on a device 1024, or
    /// of a mixture 1408, fewer of them far into a long prompt.
    int64_t step_tokens = 0;
    int64_t prompt_logits = 64;  // of these, rows for requests with on_prompt_logits; at least 64
    /// Formats of keys and of values, as kv_types.h names them; no second one: as the first.
    std::string kv_type = "auto", kv_type_v;
    /// Of host memory, for states of earlier requests (PrefixCache); 0: none are kept.
    int64_t cache_bytes = 0;
    /// With these engines, of the same model on devices of one kind, this one shares the states: each goes on from what the others
    /// have left. Then cache_bytes is theirs; `sharing`: how many there will be. Null: it keeps its own.
    std::shared_ptr<KeptStates> kept;
    int64_t sharing = 1;
    SpeculationOptions speculation;
    /// Tokens that an image takes, at least and at most, if the model reads images; 0: as its preprocessor says, and 1024 at most
    /// on the CPU.
    int64_t image_min_tokens = 0, image_max_tokens = 0;
    /// In place of those that `speculation` names, where it names any. With DrafterKind::mtp or dflash these weights draft as
    /// well, for the sake of their cost (paid_drafter.h).
    std::shared_ptr<Drafter> drafter;
};

using RequestId = int64_t;

class Engine {
  public:
    /// Allocates all memory that it will ever need. Throws Error(memory) that says what to lower, Error(usage) for drafts by an
    /// MTP layer or drafter that the model was opened without, and Error(device) for those by one that the backend cannot run.
    /// With a tokenizer, drafters with weights answer a few built-in questions first: one that is wrong about nearly all of
    /// the model's tokens is switched off, which a note says.
    Engine(Model& model, Backend& backend, const EngineOptions& options);
    ~Engine();

    /// Queues a request. Throws Error(usage) for settings that make no sense or drafts that the engine does not make, and Error(too_long) if the
    /// prompt leaves no room for a single token.
    RequestId submit(Request request);
    /// Ends a request at the next step with FinishReason::cancelled; unknown or finished ids are ignored.
    void cancel(RequestId id);
    /// Runs one step: chooses the tokens that it gives, and calls the requests' callbacks. On a device that computes by
    /// itself the next step is launched between the two, so that it never waits for callbacks or for what the caller does
    /// between two calls; not if it may have drafts, which depend on them. `before_next`: called just before the rows
    /// of a step are chosen; the place to submit and to cancel for that step. False: nothing was left to do. An error of a
    /// request ends that request only, an error of a step the requests in it. Throws Error(device) if the device failed,
    /// which is final: all requests have ended with that error, and later ones would, too.
    bool step(const std::function<void()>& before_next = {});
    /// Whether the request has finished; its Result stays until taken.
    bool finished(RequestId id) const;
    Result take(RequestId id);
    /// submit + step until finished + take.
    Result run(Request request);

    /// Between how many pixels images are read; with ModelInfo::vision.
    const ImageSizes& image_sizes() const;
    int64_t context() const;
    int64_t sequences() const;
    /// One-line remarks for the user: drafters that do not work here.
    const std::vector<std::string>& notes() const;
    const Model& model() const;
    Backend& backend();
    const Backend& backend() const;
    /// Bytes that the engine should hold beside the weights: KV pages, recurrent state, scratch (memory_plan.h).
    const MemoryPlan& memory_plan() const;
    /// The same as the device counts it; weights are 0.
    const MemoryMeasured& memory_measured() const;
    /// Kernels that an answer step of one row for each of `sequences` launches; 0: unknown (no captured plan).
    int64_t kernels(int64_t sequences) const;
    /// Names the directory for save_states (prefix_file.h), and loads the states that an earlier process with the same
    /// model and layout saved there. Returns a remark if the file was bad. Throws Error(runtime).
    std::string load_states(const std::string& directory);
    /// Names the directory alone: another engine that shares the states has loaded them.
    void name_directory(const std::string& directory);
    /// Saves the states of the prefix cache. Returns false if `go_on` cancels; it is polled. Throws Error(runtime).
    bool save_states(const std::function<bool()>& go_on);
    /// For EngineOptions::kept of others, and for routing. Its states are in memory that engines have taken: none may be touched
    /// when the last one is gone.
    std::shared_ptr<KeptStates> kept_states() const;
    /// Begins to take host memory for kept states of so many tokens, by another thread: on a GPU it is pinned, 0.3 s a GB, which the
    /// first request whose state is kept would wait for.
    void expect_states(int64_t tokens);
    /// Waits until the others can go on from all that it has kept. Call before it has nothing to do for long.
    void settle_states();
    /// The device has failed: what it has kept and others cannot go on from is given up.
    void abandon_states();
    /// What the prefix cache has done so far.
    PrefixCacheStats cache_stats() const;
    /// What drafts have done so far, and why; nothing without speculation.
    std::optional<SpeculationReport> speculation() const;
    /// What it holds, and what it has dropped.
    KeptReport kept_report() const;

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quern
