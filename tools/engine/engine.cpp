#include "tools/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <optional>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/ops/logits_top.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/prefix_cache.h"
#include "tools/engine/sampler.h"
#include "tools/engine/scheduler.h"
#include "tools/engine/sequence.h"
#include "tools/engine/state_pool.h"

namespace quern {
namespace {

constexpr size_t kPlans = 8;
constexpr int64_t kSecondDraw = int64_t{1} << 40;  // beyond every position

double seconds(Sequence::Clock::time_point from, Sequence::Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
}

DType kv_dtype(const std::string& name, const Backend& backend) {
    if (name == "auto") return backend.activation_dtype();
    if (name == "f32") return DType::F32;
    if (name == "bf16") return DType::BF16;
    if (name == "f16") return DType::F16;
    FAIL(usage, "KV cache type '{}' is not supported; choose auto, f32, bf16 or f16", name);
}

int64_t pages_for(int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

/// The context asked for, or the largest whose KV takes at most half of the free memory.
int64_t choose_context(const EngineOptions& options, const Model& model, const Backend& backend,
                       const std::vector<StateSpec>& specs) {
    const int64_t longest = model.info().context;
    if (options.context < 0) FAIL(usage, "the context is {} tokens; it must be positive", options.context);
    if (options.context > longest)
        FAIL(usage, "a context of {} tokens was asked for, but this model was made for {}", options.context,
             longest);
    if (options.context > 0) return options.context;
    const int64_t page = page_bytes(specs) * options.sequences;
    if (page == 0) return longest;
    const int64_t fits = backend.memory_info().free_bytes / 2 / page * kPageTokens;
    return std::clamp<int64_t>(fits, std::min<int64_t>(kPageTokens, longest), longest);
}

}  // namespace

struct Engine::State {
    State(Model& m, Backend& b, const EngineOptions& o)
        : model(m),
          backend(b),
          options(o),
          specs(m.state_specs({.kv = kv_dtype(o.kv_type, b), .conv = b.activation_dtype(), .journal = 0})),
          context(choose_context(o, m, b, specs)),
          pool(b, specs, o.sequences, o.sequences * pages_for(context)),
          cache(pool, o.cache_bytes, page_bytes(specs), slot_bytes(specs)),
          plans(m, b, pool, kPlans) {}

    void admit();
    void start(Sequence& s);
    void plan_snapshots(Sequence& s) const;
    void keep_state(Sequence& s, bool wanted);
    void make_room(int64_t pages);
    void run(const std::vector<Slice>& slices);
    void fill(StepPlan& step, const std::vector<Slice>& slices);
    void read(const StepPlan& step, const std::vector<Slice>& slices);
    int32_t choose(const Sequence& s, const StepPlan& step, const int32_t* top, int64_t row) const;
    std::vector<float> row_logits(const StepPlan& step, int64_t row, int64_t count) const;
    bool append(Sequence& s, int32_t id);
    void advance(Sequence& s, const StepPlan& step, const int32_t* top, int64_t row);
    void finish(Sequence& s, FinishReason reason, std::string error = {});

    Model& model;
    Backend& backend;
    EngineOptions options;
    std::vector<StateSpec> specs;
    int64_t context;
    StatePool pool;
    PrefixCache cache;
    PlanCache plans;
    RequestId next_id = 1;
    std::map<RequestId, std::unique_ptr<Sequence>> sequences;
    std::deque<Sequence*> queue;
    std::vector<Sequence*> running;  // in order of arrival
};

Engine::Engine(Model& model, Backend& backend, const EngineOptions& options) {
    if (options.sequences < 1 || options.sequences > 1024)
        FAIL(usage, "{} sequences at the same time; choose 1 to 1024", options.sequences);
    if (options.step_tokens < 1 || options.step_tokens > 1 << 16)
        FAIL(usage, "{} tokens in a step; choose 1 to 65536", options.step_tokens);
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
    check_sampling(request.sampling, e.model.info().vocab_rows);
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
PrefixCacheStats Engine::cache_stats() const { return state_->cache.stats(); }
int64_t Engine::memory_bytes() const { return state_->pool.bytes() + state_->plans.bytes(); }

bool Engine::step() {
    State& e = *state_;
    e.admit();
    std::erase_if(e.running, [](const Sequence* s) { return s->done(); });
    if (e.running.empty()) return !e.queue.empty();
    const std::vector<Slice> slices = next_batch(e.running, e.options.step_tokens);
    try {
        e.run(slices);
    } catch (const std::exception& error) {
        // The step is lost for everyone in it: their states are half written.
        for (const Slice& slice : slices) e.finish(*slice.sequence, FinishReason::error, error.what());
    }
    std::erase_if(e.running, [](const Sequence* s) { return s->done(); });
    return !e.running.empty() || !e.queue.empty();
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
            finish(*s, FinishReason::error, error.what());
        }
    }
}

/// From the longest kept state that begins the prompt, else from nothing.
void Engine::State::start(Sequence& s) {
    if (options.cache_bytes > 0 && !s.request.on_prompt_logits) {
        make_room(1);  // before the search: it may evict
        const PrefixCache::Match match = cache.find(s.request.prompt);
        s.result.diverged_at = match.common;
        if (match.snapshot != nullptr) s.state = pool.restore(*match.snapshot);
        s.result.cached_tokens = s.state.length;
        plan_snapshots(s);
    }
    if (s.state.slot < 0) s.state = pool.acquire();
}

/// The first boundary (system and tools), the last one and the end of the prompt are where the next request most
/// likely branches off; those between only where much lies between them.
void Engine::State::plan_snapshots(Sequence& s) const {
    constexpr int64_t kFarApart = 2048;
    const auto& at = s.request.boundaries;
    int64_t kept = s.state.length;
    for (size_t i = 0; i < at.size(); ++i) {
        const bool edge = i == 0 || i + 1 == at.size();
        if (at[i] <= kept || at[i] >= s.prompt_tokens() || (!edge && at[i] - kept < kFarApart)) continue;
        s.snapshots.push_back(kept = at[i]);
    }
    s.snapshots.push_back(s.prompt_tokens());
}

void Engine::State::keep_state(Sequence& s, bool wanted) {
    while (!s.snapshots.empty() && s.snapshots.front() <= s.state.length) s.snapshots.pop_front();
    const std::span<const int32_t> tokens(s.tokens.data(), static_cast<size_t>(s.state.length));
    if (!wanted || !cache.wants(tokens)) return;
    make_room(1);
    cache.store(tokens, s.state);
}

/// Kept states give way to those who run.
void Engine::State::make_room(int64_t pages) {
    while (pool.free_pages() < pages && cache.evict()) {
    }
}

void Engine::State::run(const std::vector<Slice>& slices) {
    BatchShape shape{.sequences = static_cast<int64_t>(slices.size()), .pages = pages_for(context), .vocab = model.info().vocab};
    for (const Slice& slice : slices) {
        shape.tokens += slice.count;
        shape.logit_rows +=
            slice.sequence->request.on_prompt_logits && slice.sequence->in_prompt() ? slice.count : 1;
        SequenceState& state = slice.sequence->state;
        make_room(pages_for(slice.begin + slice.count) - static_cast<int64_t>(state.pages.size()));
        pool.grow(state, slice.begin + slice.count);
    }
    StepPlan& step = plans.get(shape);
    fill(step, slices);
    step.plan->run();
    read(step, slices);
}

void Engine::State::fill(StepPlan& step, const std::vector<Slice>& slices) {
    Plan& plan = *step.plan;
    auto* token_ids = plan.input<int32_t>(step.batch.token_ids);
    auto* positions = plan.input<int32_t>(step.batch.positions);
    auto* row_sequence = plan.input<int32_t>(step.batch.row_sequence);
    auto* start = plan.input<int32_t>(step.batch.start);
    auto* slots = plan.input<int32_t>(step.batch.slots);
    auto* pages = plan.input<int32_t>(step.batch.pages);
    auto* logit_rows = plan.input<int32_t>(step.batch.logit_rows);
    auto* temperature = plan.input<float>(step.batch.temperature);
    std::fill_n(plan.input<int32_t>(step.batch.committed), slices.size(), 0);
    std::fill_n(plan.input<int32_t>(step.batch.journal), slices.size(), 0);

    int32_t row = 0;
    for (size_t i = 0; i < slices.size(); ++i) {
        const Slice& slice = slices[i];
        const Sequence& s = *slice.sequence;
        const bool all = s.request.on_prompt_logits && s.in_prompt();
        start[i] = row;
        slots[i] = s.state.slot;
        std::copy(s.state.pages.begin(), s.state.pages.end(),
                  pages + static_cast<int64_t>(i) * step.shape.pages);
        for (int64_t t = slice.begin; t < slice.begin + slice.count; ++t, ++row) {
            token_ids[row] = s.tokens[static_cast<size_t>(t)];
            positions[row] = static_cast<int32_t>(t);
            row_sequence[row] = static_cast<int32_t>(i);
            if (!all && t + 1 < slice.begin + slice.count) continue;
            *logit_rows++ = row;
            *temperature++ = s.request.sampling.temperature;
        }
    }
    start[slices.size()] = row;
}

void Engine::State::read(const StepPlan& step, const std::vector<Slice>& slices) {
    std::vector<int32_t> top(static_cast<size_t>(step.top->elements()));
    backend.download(top.data(), step.top->data, step.top->bytes());
    backend.synchronize();
    int64_t row = 0;
    for (const Slice& slice : slices) {
        Sequence& s = *slice.sequence;
        const bool in_prompt = s.in_prompt(), all = s.request.on_prompt_logits && in_prompt;
        if (all) {
            const std::vector<float> logits = row_logits(step, row, slice.count);
            for (int64_t t = 0; t < slice.count; ++t)
                s.request.on_prompt_logits(slice.begin + t, logits.data() + t * step.logits->shape[1]);
        }
        row += all ? slice.count : 1;
        s.state.length += slice.count;
        if (in_prompt && s.request.on_prefill)
            s.request.on_prefill(std::min(s.state.length, s.prompt_tokens()));
        if (!s.snapshots.empty() && s.snapshots.front() == s.state.length) keep_state(s, true);
        if (slice.last) advance(s, step, top.data() + (row - 1) * kTopWords, row - 1);
    }
}

std::vector<float> Engine::State::row_logits(const StepPlan& step, int64_t row, int64_t count) const {
    std::vector<float> logits(static_cast<size_t>(count * step.logits->shape[1]));
    backend.download(logits.data(), step.logits->row<float>(row), static_cast<int64_t>(logits.size() * sizeof(float)));
    backend.synchronize();
    return logits;
}

/// From the highest logits of the row if they are enough, else from all of them.
int32_t Engine::State::choose(const Sequence& s, const StepPlan& step, const int32_t* top, int64_t row) const {
    const auto position = static_cast<int64_t>(s.tokens.size());
    if (top[kTopWords - 1] != 0 && !s.request.on_logits) {
        const auto count = static_cast<size_t>(std::find(top, top + kTopLogits, -1) - top);
        float values[kTopLogits + 1];
        std::memcpy(values, top + kTopLogits, sizeof values);
        const TopLogits highest{{top, count}, {values, count}, values[kTopLogits]};
        const auto id = sample_top(highest, model.info().vocab, s.request.sampling, position);
        if (id && (!s.request.allow || s.request.allow(*id))) return *id;
    }
    std::vector<float> logits = row_logits(step, row, 1);
    const int64_t vocab = model.info().vocab;
    int32_t id = sample(logits, vocab, s.request.sampling, s.tokens, position);
    if (s.request.allow && !s.request.allow(id)) {
        // Drawing again among the allowed ones, independently, gives each of them its share of the whole.
        std::vector<float> allowed = logits;
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
void Engine::State::advance(Sequence& s, const StepPlan& step, const int32_t* top, int64_t row) {
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
        id = choose(s, step, top, row);
    } catch (const Error& error) {
        return finish(s, FinishReason::error, error.what());
    }
    const auto& stops = s.request.stop_ids;
    if (std::find(stops.begin(), stops.end(), id) != stops.end()) return finish(s, FinishReason::stop);
    if (!append(s, id) || !s.request.force) return;
    for (const int32_t forced : s.request.force())
        if (!append(s, forced)) return;
}

void Engine::State::finish(Sequence& s, FinishReason reason, std::string error) {
    if (s.done()) return;
    s.result.reason = reason;
    s.result.error = std::move(error);
    const bool whole = reason != FinishReason::error && s.state.length > s.prompt_tokens();
    if (whole && options.cache_bytes > 0) keep_state(s, !s.request.keep_answer || s.request.keep_answer());
    pool.release(s.state);
}

}  // namespace quern
