// What an Engine is made of. For engine.cpp, which starts and ends requests, and engine_step.cpp, which runs the rows of a step
// and chooses tokens.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/error.h"
#include "tools/engine/dflash_drafter.h"
#include "tools/engine/engine.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/prefix_cache.h"
#include "tools/engine/prefix_file.h"
#include "tools/engine/result_rooms.h"
#include "tools/engine/scheduler.h"
#include "tools/engine/sequence.h"
#include "tools/engine/speculation.h"
#include "tools/engine/state_pool.h"
#include "tools/engine/tower.h"

namespace quern {

/// Memory that the device has lost since the last call; 0 where free memory is not exact.
class Gauge {
  public:
    explicit Gauge(const Backend& backend) : backend_(backend), free_(backend.memory_info().free_bytes) {}
    int64_t taken() {
        const MemoryInfo now = backend_.memory_info();
        return now.exact ? std::exchange(free_, now.free_bytes) - now.free_bytes : 0;
    }

  private:
    const Backend& backend_;
    int64_t free_;
};

inline double seconds(Sequence::Clock::time_point from, Sequence::Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

/// In a handler: rethrows an error of the device, which is not the request's.
inline void rethrow_if_device(const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known != nullptr && known->kind() == ErrorKind::device) throw;
}

/// A step that was launched, and whose results nobody has read.
struct LaunchedStep {
    Step step;  // sequences that have ended since are null
    StepPlan* plan;
    int room;  // of its results; -1: they are where the plan leaves them
    bool ahead =
        false;  // a draft after it is queued behind it; its highest logits come to the host: kVerifiedMark
    Sequence::Clock::time_point begun;
    double drafting;  // seconds until its drafts were there

    /// Whether any of its sequences goes on.
    bool awaited() const {
        return std::any_of(step.slices.begin(), step.slices.end(),
                           [](const Slice& slice) { return slice.sequence != nullptr; });
    }
    bool has(const Sequence& s) const {
        return std::any_of(step.slices.begin(), step.slices.end(),
                           [&](const Slice& slice) { return slice.sequence == &s; });
    }
};

/// A token of an answer that the request's callbacks do not know of yet.
struct UntoldToken {
    Sequence* sequence;
    int32_t id;
};

struct Engine::State {
    State(Model& model, Backend& backend, const EngineOptions& options);
    ~State();
    State(const State&) = delete;
    State& operator=(const State&) = delete;

    int64_t top_rows() const {
        return std::max(memory.steps.prompt_logits + memory.sequences, memory.steps.answer_rows);
    }
    StepPlan& decode_plan(int64_t answers) {
        BatchShape shape = decode_shape(answers, memory.pages(), model.info().vocab);
        shape.pass = pass;
        return plans.get(shape, PlanUse::repeatedly);
    }
    void start_speculation();
    void use_drafters();
    /// `answer`: runs a request, as Engine::run.
    void test_drafters(const std::function<Result(Request)>& answer);
    std::vector<std::shared_ptr<Drafter>> make_drafters();
    std::shared_ptr<Drafter> make_mtp_drafter();
    std::shared_ptr<Drafter> make_dflash_drafter();
    void capture_answers();
    void capture_rounds();
    StepPlan& plan_for(const Step& step);

    uint64_t binding() const;
    /// Whether the step after this one is launched before callbacks learn of this one's tokens: not where its sequences may have
    /// drafts. (Others that it may have wait for theirs until the step after that.)
    bool may_run_ahead(const Step& step) const {
        return backend.asynchronous() && (!speculation || speculation->stays_plain(step));
    }
    bool step(const std::function<void()>& before_next);
    bool launch_next(const std::function<void()>& before_next);
    void fill_stages(const std::function<void()>& before_next);
    /// True: another step may be launched before callbacks learn of its tokens.
    bool read_launched();
    bool may_launch() const;
    bool ready(const Sequence& s) const;
    Step next_step();
    void end_cancelled();
    void forget_ended();
    /// `work` is about this step: its error ends the sequences in it.
    void guarded(Step& step, const std::function<void()>& work);
    void lose(const std::string& error);
    void admit();
    void start(Sequence& s);
    bool caches(const Sequence& s) const { return options.cache_bytes > 0 && s.request.use_cache; }
    void keep_state(const Sequence& s, const SequenceState& state);
    void reserve(Sequence& s, int64_t tokens);
    std::vector<PromptImages::Item*> missing_images(const Step& step);
    void take_turn(Step step);
    void encode_images();
    void launch(Step& step);
    Plan* ready_ahead(const Step& step);
    StepResults results_of(const LaunchedStep& done);
    bool read(const LaunchedStep& done);  // likewise
    int32_t choose(const Sequence& s, const StepResults& found, int64_t row) const;
    void report_prompt(Sequence& s, const StepResults& found, const Slice& slice, int64_t row) const;
    bool append(Sequence& s, int32_t id, bool now);
    void tell(Sequence& s, int32_t id);
    void tell_all();
    void add_forced(Sequence& s);
    void advance(Sequence& s, const StepResults& found, int64_t row, bool now);
    void verify(const Slice& slice, const StepResults& found, int64_t row);
    void finish(Sequence& s, FinishReason reason, std::string error = {});

    Model& model;
    Backend& backend;
    EngineOptions options;
    MemoryPlan memory;
    int64_t context;
    Gauge gauge;
    StatePool pool;
    int64_t pool_bytes;
    PrefixCache cache;
    std::optional<PrefixFile> file;
    Workspace workspace;                  // rank 0's
    std::unique_ptr<Workspace> drafting;  // of passes that draft for one sequence, if there are any
    Tower tower;                          // used if the model has one
    ResultRooms results;
    int64_t workspace_bytes;
    std::shared_ptr<void> host_top, host_logits;
    PlanCache plans;
    Scheduler scheduler;
    std::vector<std::shared_ptr<Drafter>> drafters;
    std::shared_ptr<DflashDrafter> dflash;  // of these, or null
    std::optional<Speculation> speculation;
    Pass pass = Pass::text;  // of steps: Pass::hidden or Pass::taps if a drafter reads hidden states
    std::vector<std::string> notes;
    MemoryMeasured measured;
    RequestId next_id = 1;
    std::map<RequestId, std::unique_ptr<Sequence>> sequences;
    std::deque<Sequence*> queue;
    std::vector<Sequence*> running;  // in order of arrival
    std::deque<LaunchedStep>
        launched;  // the oldest first; more than one only if there are rooms for their results
    /// In whose place images are encoded next; without those who have ended.
    std::optional<Step> before_images;
    std::vector<UntoldToken> untold;
};

}  // namespace quern
