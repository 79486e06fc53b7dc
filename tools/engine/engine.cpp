#include "tools/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/ops/logits_top.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/prefix_cache.h"
#include "tools/engine/prefix_file.h"
#include "tools/engine/prompt_cuts.h"
#include "tools/engine/sampler.h"
#include "tools/engine/sampling_ranges.h"
#include "tools/engine/scheduler.h"
#include "tools/engine/sequence.h"
#include "tools/engine/speculation.h"
#include "tools/engine/state_pool.h"
#include "tools/engine/step_inputs.h"

namespace quern {
namespace {

constexpr size_t kPlans = 8;
/// On a device an extra step takes as long as some 400 more prompt rows: too much for the first state of a short
/// conversation.
constexpr int64_t kFewestKept = 256;
constexpr int64_t kSecondDraw = int64_t{1} << 40;  // beyond every position

double seconds(Sequence::Clock::time_point from, Sequence::Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

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

MemoryPlan fitting_plan(const Model& model, const Backend& backend, const EngineOptions& options) {
    MemoryPlan plan = make_memory_plan(model, backend, options, true);
    require_fit(plan);
    return plan;
}

/// In a handler: rethrows an error of the device, which is not the request's.
void rethrow_if_device(const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known != nullptr && known->kind() == ErrorKind::device) throw;
}

/// Host memory that lives as long as the backend's transfers need it.
std::shared_ptr<void> host_memory(Backend& backend, int64_t bytes, const char* what) {
    return {backend.alloc_host(bytes, what), [&backend](void* memory) { backend.free_host(memory); }};
}

}  // namespace

struct Engine::State {
    State(Model& m, Backend& b, const EngineOptions& o)
        : model(m),
          backend(b),
          options(o),
          memory(fitting_plan(m, b, o)),
          context(memory.context),
          gauge(b),
          pool(b, memory.specs, o.sequences, o.sequences * memory.pages(), memory.kept_states),
          pool_bytes(gauge.taken()),
          cache(pool, o.cache_bytes, page_bytes(memory.specs), recurrent_bytes(memory.specs)),
          workspace(b, memory.arena, memory.inputs),
          workspace_bytes(gauge.taken()),
          host_top(host_memory(b, top_rows() * kTopWords * int64_t{sizeof(int32_t)},
                               "the highest logits of a step")),
          host_logits(host_memory(b, m.info().vocab_rows * int64_t{sizeof(float)}, "a row of logits")),
          plans(m, b, pool, workspace, kPlans),
          scheduler(memory.steps) {
        if (o.speculation.on())
            speculation.emplace(o.speculation, o.drafter,
                                Speculation::Limits{.context = context,
                                                    .answer_rows = memory.steps.answer_rows,
                                                    .vocab = m.info().vocab,
                                                    .padded = b.captures()});
        if (b.captures())
            for (int64_t n = 1; n <= decode_bucket(std::min(o.sequences, kMaxAnswerRows)); n = next_bucket(n))
                decode_plan(n);
        if (b.captures() && speculation) capture_rounds();
        measured = {.state = pool_bytes, .scratch = workspace_bytes, .other = gauge.taken()};
    }

    int64_t top_rows() const {
        return std::max(memory.steps.prompt_logits + memory.sequences, memory.steps.answer_rows);
    }
    StepPlan& decode_plan(int64_t bucket) {
        return plans.get(decode_shape(bucket, memory.pages(), model.info().vocab), PlanUse::repeatedly);
    }
    void capture_rounds();
    StepPlan& plan_for(const Step& step);

    uint64_t binding() const;
    bool step();
    void lose(const std::string& error);
    void admit();
    void start(Sequence& s);
    bool caches(const Sequence& s) const { return options.cache_bytes > 0 && s.request.use_cache; }
    void keep_state(Sequence& s);
    void make_room(int64_t pages);
    void run(Step& step);
    void read(StepPlan& plan, const Step& step, Sequence::Clock::time_point begun);
    int32_t choose(const Sequence& s, const StepPlan& plan, const int32_t* top, int64_t row) const;
    void report_prompt(Sequence& s, const StepPlan& plan, int64_t row, int64_t count) const;
    void download_logits(const StepPlan& plan, int64_t row, int64_t count, float* to) const;
    bool append(Sequence& s, int32_t id);
    void advance(Sequence& s, const StepPlan& plan, const int32_t* top, int64_t row);
    void verify(const Slice& slice, const StepPlan& plan, const int32_t* top, int64_t row);
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
    Workspace workspace;
    int64_t workspace_bytes;
    std::shared_ptr<void> host_top, host_logits;
    PlanCache plans;
    Scheduler scheduler;
    std::optional<Speculation> speculation;
    MemoryMeasured measured;
    RequestId next_id = 1;
    std::map<RequestId, std::unique_ptr<Sequence>> sequences;
    std::deque<Sequence*> queue;
    std::vector<Sequence*> running;  // in order of arrival
};

Engine::Engine(Model& model, Backend& backend, const EngineOptions& options) {
    state_ = std::make_unique<State>(model, backend, options);
}

Engine::~Engine() = default;

RequestId Engine::submit(Request request) {
    State& e = *state_;
    const auto prompt = static_cast<int64_t>(request.prompt.size());
    if (prompt == 0) FAIL(usage, "the prompt is empty: at least one token is needed");
    if (prompt >= e.context && request.max_tokens > 0)
        FAIL(too_long,
             "the prompt has {} tokens and leaves no room for an answer: the maximum context length is {} "
             "tokens",
             prompt, e.context);
    if (prompt > e.context)
        FAIL(too_long, "the prompt has {} tokens; the maximum context length is {} tokens", prompt,
             e.context);
    for (int32_t id : request.prompt)
        if (id < 0 || id >= e.model.info().vocab_rows)
            FAIL(usage, "token id {} in the prompt is outside the vocabulary of {}", id,
                 e.model.info().vocab_rows);
    check_sampling(request.sampling, e.model.info().vocab);
    check_drafts(request.drafts, e.options.speculation);
    if (!std::is_sorted(request.boundaries.begin(), request.boundaries.end()))
        FAIL(usage, "the boundaries of a prompt must rise");

    auto s = std::make_unique<Sequence>();
    s->id = e.next_id++;
    s->tokens = request.prompt;
    s->result.prompt_tokens = prompt;
    s->request = std::move(request);
    e.queue.push_back(s.get());
    const RequestId id = s->id;
    e.sequences[id] = std::move(s);
    return id;
}

void Engine::cancel(RequestId id) {
    const auto it = state_->sequences.find(id);
    if (it != state_->sequences.end()) it->second->cancelled = true;
}

bool Engine::finished(RequestId id) const {
    const auto it = state_->sequences.find(id);
    return it != state_->sequences.end() && it->second->done();
}

Result Engine::take(RequestId id) {
    const auto it = state_->sequences.find(id);
    CHECK(it != state_->sequences.end() && it->second->done(), "[engine] request {} has no result to take",
          id);
    Result result = std::move(it->second->result);
    state_->sequences.erase(it);
    return result;
}

Result Engine::run(Request request) {
    const RequestId id = submit(std::move(request));
    while (!finished(id)) step();
    return take(id);
}

int64_t Engine::context() const { return state_->context; }
int64_t Engine::sequences() const { return state_->options.sequences; }
const Model& Engine::model() const { return state_->model; }
Backend& Engine::backend() { return state_->backend; }
const Backend& Engine::backend() const { return state_->backend; }
const MemoryPlan& Engine::memory_plan() const { return state_->memory; }
const MemoryMeasured& Engine::memory_measured() const { return state_->measured; }
int64_t Engine::kernels(int64_t sequences) const {
    if (!state_->backend.captures() || sequences > kMaxAnswerRows) return 0;
    return state_->decode_plan(decode_bucket(sequences)).plan->kernels;
}
std::string Engine::load_states(const std::string& directory) {
    State& e = *state_;
    e.file.emplace(directory, e.binding());
    return e.file->load(e.cache, e.pool);
}

bool Engine::save_states(const std::function<bool()>& go_on) {
    CHECK(state_->file.has_value(), "[engine] there is no directory for states yet");
    return state_->file->save(state_->cache, state_->pool, go_on);
}

/// A hash of all that a state depends on: its bytes, and what they mean.
uint64_t Engine::State::binding() const {
    ContentHash hash;
    hash.add(QUERN_VERSION);
    hash.add(backend.name());
    hash.add(static_cast<int64_t>(model.digest()));
    hash.add(kPageTokens);
    for (const StateSpec& spec : memory.specs) {
        for (const int64_t number : {int64_t{spec.layer}, static_cast<int64_t>(spec.role),
                                     static_cast<int64_t>(spec.dtype), int64_t{spec.paged}})
            hash.add(number);
        hash.add(spec.shape.data(), spec.shape.size() * sizeof(int64_t));
    }
    return hash.value();
}

PrefixCacheStats Engine::cache_stats() const { return state_->cache.stats(); }

bool Engine::step() {
    try {
        return state_->step();
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::device) state_->lose(error.what());
        throw;
    }
}

bool Engine::State::step() {
    admit();
    std::erase_if(running, [](const Sequence* s) { return s->done(); });
    if (running.empty()) return !queue.empty();
    Step step = scheduler.next(running);
    try {
        run(step);
    } catch (const std::exception& error) {
        rethrow_if_device(error);
        // The step is lost for everyone in it: their states are half written.
        for (const Slice& slice : step.slices) finish(*slice.sequence, FinishReason::error, error.what());
    }
    std::erase_if(running, [](const Sequence* s) { return s->done(); });
    return !running.empty() || !queue.empty();
}

/// Ends all requests: the device has failed.
void Engine::State::lose(const std::string& error) {
    for (auto& [id, s] : sequences) finish(*s, FinishReason::error, error);
    running.clear();
    queue.clear();
}

/// Ends what was cancelled and starts what was queued while slots are free.
void Engine::State::admit() {
    for (Sequence* s : running)
        if (s->cancelled) finish(*s, FinishReason::cancelled);
    for (Sequence* s : queue)
        if (s->cancelled) finish(*s, FinishReason::cancelled);
    std::erase_if(queue, [](const Sequence* s) { return s->done(); });
    while (!queue.empty() && pool.free_slots() > 0) {
        Sequence* s = queue.front();
        queue.pop_front();
        s->started = Sequence::Clock::now();
        s->result.timing.queue_seconds = seconds(s->submitted, s->started);
        try {
            start(*s);
            running.push_back(s);
        } catch (const std::exception& error) {
            rethrow_if_device(error);
            finish(*s, FinishReason::error, error.what());
        }
    }
}

/// Starts from the longest kept state that begins the prompt, else from nothing. Rows of a kept state have no logits,
/// so requests for prompt logits use none.
void Engine::State::start(Sequence& s) {
    if (caches(s) && !s.request.on_prompt_logits) {
        const PrefixCache::Match match = cache.find(s.request.prompt);
        s.result.diverged_at = match.common;
        if (match.snapshot != nullptr) s.state = pool.restore(*match.snapshot);
        s.result.cached_tokens = s.state.length;
    }
    if (caches(s))
        s.cuts = cuts_to_keep({.boundaries = s.request.boundaries,
                               .tokens = s.prompt_tokens(),
                               .done = s.state.length,
                               .fewest = backend.captures() ? kFewestKept : 0});
    if (s.state.slot < 0) s.state = pool.acquire();
    if (s.request.on_prefill) s.request.on_prefill(s.state.length);
}

void Engine::State::keep_state(Sequence& s) {
    CHECK(at_page_end(s.state.length), "[engine] a state of {} tokens would be kept", s.state.length);
    const std::span<const int32_t> tokens(s.tokens.data(), static_cast<size_t>(s.state.length));
    if (cache.wants(tokens)) cache.store(tokens, s.state);
}

/// Evicts kept states until the running ones have so many pages.
void Engine::State::make_room(int64_t pages) {
    while (pool.free_pages() < pages && cache.evict()) {
    }
}

void Engine::State::run(Step& step) {
    const auto begun = Sequence::Clock::now();
    if (speculation) speculation->draft(step);
    for (const Slice& slice : step.slices) {
        SequenceState& state = slice.sequence->state;
        const int64_t rows = slice.begin + slice.count;
        make_room(round_up_to_page(rows) / kPageTokens - static_cast<int64_t>(state.pages.size()));
        pool.grow(state, rows);
    }
    StepPlan& plan = plan_for(step);
    fill_inputs(plan, step.slices);
    plan.plan->run();
    read(plan, step, begun);
}

/// The plans that verify drafts of one sequence, so that its first rounds do not wait for them. Those of several sequences
/// are too many, and are captured when they are first needed.
void Engine::State::capture_rounds() {
    BatchShape shape = decode_shape(1, memory.pages(), model.info().vocab);
    for (shape.tokens = 2; shape.tokens <= journal_entries(options.speculation); ++shape.tokens)
        plans.get(verify_shape(shape, memory.steps.answer_rows), PlanUse::repeatedly);
}

/// Answer steps of one row a sequence run repeatedly; where plans are captured they are padded to few shapes. Those of
/// several rows are rare and get a plan of their own size, unless they verify drafts.
StepPlan& Engine::State::plan_for(const Step& step) {
    BatchShape shape{.kind = step.kind,
                     .sequences = static_cast<int64_t>(step.slices.size()),
                     .pages = memory.pages(),
                     .vocab = model.info().vocab};
    for (const Slice& slice : step.slices) {
        shape.tokens += slice.count;
        shape.logit_rows += slice.logit_rows;
    }
    const bool answers = step.kind == StepKind::answer && backend.captures();
    if (answers && shape.tokens == shape.sequences) return decode_plan(decode_bucket(shape.sequences));
    const auto drafted = [](const Slice& slice) { return !slice.draft.empty(); };
    if (answers && std::any_of(step.slices.begin(), step.slices.end(), drafted))
        return plans.get(verify_shape(shape, memory.steps.answer_rows), PlanUse::repeatedly);
    return plans.get(shape, PlanUse::sometimes);
}

/// `begun`: when the step began. A plan's first run says nothing of its cost, since it was made in it; nor do runs that
/// somebody watches.
void Engine::State::read(StepPlan& plan, const Step& step, Sequence::Clock::time_point begun) {
    auto* top = static_cast<int32_t*>(host_top.get());
    backend.download(top, plan.top->data, plan.top->bytes());
    if (speculation && step.kind == StepKind::answer && plan.runs++ > 0 && !backend.after_node)
        speculation->measured(step, seconds(begun, Sequence::Clock::now()));
    int64_t row = 0;  // of the logits
    for (const Slice& slice : step.slices) {
        Sequence& s = *slice.sequence;
        if (s.wants_prompt_logits()) report_prompt(s, plan, row, slice.count);
        row += slice.logit_rows;
        if (!slice.draft.empty()) {
            verify(slice, plan, top, row - slice.logit_rows);
            continue;
        }
        s.state.length += slice.count;
        s.state.journaled = 0;
        if (step.kind == StepKind::prompt && s.request.on_prefill) s.request.on_prefill(s.state.length);
        if (!s.cuts.empty() && s.cuts.front() == s.state.length) {
            s.cuts.pop_front();
            keep_state(s);
        }
        if (slice.last) advance(s, plan, top + (row - 1) * kTopWords, row - 1);
    }
}

void Engine::State::report_prompt(Sequence& s, const StepPlan& plan, int64_t row, int64_t count) const {
    const auto width = static_cast<size_t>(plan.logits->shape[1]);
    std::vector<float> logits(static_cast<size_t>(count) * width);
    download_logits(plan, row, count, logits.data());
    s.request.on_prompt_logits({s.state.length, logits, width});
}

void Engine::State::download_logits(const StepPlan& plan, int64_t row, int64_t count, float* to) const {
    backend.download(to, plan.logits->row<float>(row),
                     count * plan.logits->shape[1] * int64_t{sizeof(float)});
}

/// Chooses from the highest logits of the row if they are enough, else from all.
int32_t Engine::State::choose(const Sequence& s, const StepPlan& plan, const int32_t* top,
                              int64_t row) const {
    const auto position = static_cast<int64_t>(s.tokens.size());
    if (top[kTopWords - 1] != 0 && !s.request.on_logits) {
        const auto count = static_cast<size_t>(std::find(top, top + kTopLogits, -1) - top);
        float values[kTopLogits + 1];
        std::memcpy(values, top + kTopLogits, sizeof values);
        const TopLogits highest{{top, count}, {values, count}, values[kTopLogits]};
        const auto id = sample_top(highest, model.info().vocab, s.request.sampling, position);
        if (id && (!s.request.allow || s.request.allow(*id))) return *id;
    }
    auto* own = static_cast<float*>(host_logits.get());
    download_logits(plan, row, 1, own);
    const std::span<float> logits(own, static_cast<size_t>(plan.logits->shape[1]));
    const int64_t vocab = model.info().vocab;
    int32_t id = sample(logits, vocab, s.request.sampling, s.tokens, position);
    if (s.request.allow && !s.request.allow(id)) {
        // A second, independent draw among the allowed tokens keeps their proportions.
        std::vector<float> allowed(logits.begin(), logits.end());
        for (int32_t other = 0; other < vocab; ++other)
            if (!s.request.allow(other)) allowed[static_cast<size_t>(other)] = -INFINITY;
        id = sample(allowed, vocab, s.request.sampling, s.tokens, position + kSecondDraw);
    }
    if (s.request.on_logits) s.request.on_logits(id, logits);
    return id;
}

/// Adds a token to the answer. False if that ended it.
bool Engine::State::append(Sequence& s, int32_t id) {
    s.tokens.push_back(id);
    s.result.tokens.push_back(id);
    const auto answered = static_cast<int64_t>(s.result.tokens.size());
    if (s.request.on_token && !s.request.on_token(id))
        finish(s, FinishReason::cancelled);
    else if (answered >= s.request.max_tokens || static_cast<int64_t>(s.tokens.size()) >= context)
        finish(s, FinishReason::length);
    return !s.done();
}

/// Chooses the next token of a sequence and ends it if it should end.
void Engine::State::advance(Sequence& s, const StepPlan& plan, const int32_t* top, int64_t row) {
    const auto answered = static_cast<int64_t>(s.result.tokens.size());
    if (answered == 0) {
        s.first_token = Sequence::Clock::now();
        s.result.timing.prefill_seconds = seconds(s.started, s.first_token);
    } else {
        s.result.timing.decode_seconds = seconds(s.first_token, Sequence::Clock::now());
    }
    if (s.request.max_tokens <= answered) return finish(s, FinishReason::length);
    int32_t id;
    try {
        id = choose(s, plan, top, row);
    } catch (const Error& error) {
        rethrow_if_device(error);
        return finish(s, FinishReason::error, error.what());
    }
    const auto& stops = s.request.stop_ids;
    if (std::find(stops.begin(), stops.end(), id) != stops.end()) return finish(s, FinishReason::stop);
    if (!append(s, id) || !s.request.force) return;
    for (const int32_t forced : s.request.force())
        if (!append(s, forced)) return;
}

/// Chooses tokens after the rows of a slice that ends with a draft, as long as its next row was computed with the token that
/// was chosen, and commits these rows. `row`: of the slice's first logits.
void Engine::State::verify(const Slice& slice, const StepPlan& plan, const int32_t* top, int64_t row) {
    Sequence& s = *slice.sequence;
    int64_t rows = matching_rows(slice);
    do {
        const int64_t newest = row + rows - 1;
        advance(s, plan, top + newest * kTopWords, newest);
        rows = matching_rows(slice);
    } while (!s.done() && slice.begin + rows == static_cast<int64_t>(s.tokens.size()));
    speculation->accept(slice);
    if (s.done()) return;
    s.state.length = slice.begin + rows;
    s.state.journaled = rows;
}

void Engine::State::finish(Sequence& s, FinishReason reason, std::string error) {
    if (s.done()) return;
    if (speculation) speculation->release(s);
    s.result.reason = reason;
    s.result.error = std::move(error);
    pool.release(s.state);
}

}  // namespace quern
