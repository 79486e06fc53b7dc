#include "tools/engine/engine.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/ops/logits_top.h"
#include "tools/engine/engine_state.h"
#include "tools/engine/lookup_drafter.h"
#include "tools/engine/mtp_drafter.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/paid_drafter.h"
#include "tools/engine/prompt_cuts.h"
#include "tools/engine/sampling_ranges.h"
#include "tools/engine/stage_marks.h"

namespace quern {
namespace {

constexpr size_t kPlans = 16;
/// On a device an extra step takes as long as some 400 more prompt rows: too much for the first state of a short
/// conversation.
constexpr int64_t kFewestKept = 256;

MemoryPlan fitting_plan(const Model& model, const Backend& backend, const EngineOptions& options) {
    MemoryPlan plan = make_memory_plan(model, backend, options, true);
    require_fit(plan);
    return plan;
}

std::vector<ScratchSize> later_scratch(const MemoryPlan& plan) {
    std::vector<ScratchSize> sizes;
    for (size_t s = 1; s < plan.stages.size(); ++s)
        sizes.push_back({plan.stages[s].arena, plan.stages[s].inputs});
    return sizes;
}

/// Host memory that lives as long as the backend's transfers need it.
std::shared_ptr<void> host_memory(Backend& backend, int64_t bytes, const char* what) {
    return {backend.alloc_host(bytes, what), [&backend](void* memory) { backend.free_host(memory); }};
}

}  // namespace

Engine::State::State(Model& m, Backend& b, const EngineOptions& o)
    : model(m),
      backend(b),
      options(o),
      memory(fitting_plan(m, b, o)),
      context(memory.context),
      gauge(b),
      pool(b, memory.specs, o.sequences, o.sequences * memory.pages(), memory.kept_states),
      pool_bytes(gauge.taken()),
      cache(b, pool, o.cache_bytes - o.sharing * memory.features, o.kept),
      workspace(b.of_rank(0), memory.of_stage(0).arena, memory.of_stage(0).inputs),
      drafting(memory.drafting_arena == 0
                   ? nullptr
                   : std::make_unique<Workspace>(b.of_rank(0), memory.drafting_arena, memory.drafting_inputs,
                                                 kDraftInputsMark)),
      tower(m, b.of_rank(0), workspace, memory),
      results(b, steps_on_their_way(b, o), o.sequences, m.info().vocab_rows),
      workspace_bytes(gauge.taken()),
      host_top(host_memory(b.of_rank(0), top_rows() * kTopWords * int64_t{sizeof(int32_t)},
                           "the highest logits of a step")),
      host_logits(host_memory(b.of_rank(0), m.info().vocab_rows * int64_t{sizeof(float)}, "a row of logits")),
      plans(m, b, pool, workspace, kPlans, later_scratch(memory), drafting.get()),
      scheduler(memory.steps) {
    if (o.speculation.on()) start_speculation();
    capture_answers();
    if (b.captures() && speculation) capture_rounds();
    measured = {.state = pool_bytes, .scratch = workspace_bytes, .other = gauge.taken()};
}

void Engine::State::start_speculation() {
    drafters = make_drafters();
    use_drafters();
}

/// From now on; what was learnt of drafts so far is forgotten.
void Engine::State::use_drafters() {
    speculation.emplace(options.speculation, drafters,
                        Speculation::Limits{.context = context,
                                            .answer_rows = memory.steps.answer_rows,
                                            .vocab = model.info().vocab,
                                            .padded = backend.captures(),
                                            .whole = backend.ranks() == 1 && backend.stages() == 1,
                                            .asynchronous = backend.asynchronous(),
                                            .draft_tokens = model.info().draft_tokens});
}

/// What costs least comes first.
std::vector<std::shared_ptr<Drafter>> Engine::State::make_drafters() {
    const DrafterKind kind = options.speculation.kind;
    std::shared_ptr<Drafter> weights = make_dflash_drafter();
    if (weights == nullptr) weights = make_mtp_drafter();
    if (options.drafter != nullptr && weights != nullptr)
        return {std::make_shared<PaidDrafter>(options.drafter, weights)};
    if (options.drafter != nullptr) return {options.drafter};
    std::vector<std::shared_ptr<Drafter>> list;
    if (allows(kind, DrafterKind::lookup)) list.push_back(std::make_shared<LookupDrafter>());
    if (weights != nullptr) list.push_back(weights);
    return list;
}

/// Null if it is not wanted, or if it does not work here and others may draft.
std::shared_ptr<Drafter> Engine::State::make_dflash_drafter() {
    const bool named = options.speculation.kind == DrafterKind::dflash;
    if (named && !memory.dflash)
        FAIL(usage,
             "drafts by DFlash were asked for, but no drafter was opened; name its directory with -md");
    if (!memory.dflash) return nullptr;
    try {
        dflash = std::make_shared<DflashDrafter>(model, backend, plans, memory);
        pass = Pass::taps;
        return dflash;
    } catch (const Error& error) {
        if (named) throw;
        notes.push_back(fmt::format("no drafts by DFlash: {}", error.what()));
        return nullptr;
    }
}

/// Null if it is not wanted, or if it does not work here and others may draft.
std::shared_ptr<Drafter> Engine::State::make_mtp_drafter() {
    const bool named = options.speculation.kind == DrafterKind::mtp;
    if (named && !memory.mtp)
        FAIL(usage, "drafts by MTP were asked for, but the model was opened without its MTP layer");
    if (!memory.mtp) return nullptr;
    try {
        auto drafter =
            std::make_shared<MtpDrafter>(model, backend, plans, memory, options.speculation.draft_max);
        pass = Pass::hidden;
        return drafter;
    } catch (const Error& error) {
        if (named) throw;
        notes.push_back(fmt::format("no drafts by MTP: {}", error.what()));
        return nullptr;
    }
}

Engine::Engine(Model& model, Backend& backend, const EngineOptions& options) {
    state_ = std::make_unique<State>(model, backend, options);
    state_->test_drafters([this](Request request) { return run(std::move(request)); });
}

Engine::~Engine() = default;

/// A step that nobody reads may still run.
Engine::State::~State() {
    try {
        backend.synchronize();
    } catch (const std::exception&) {  // the device has failed, which was reported
    }
}

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
    if (!request.images.empty() && !e.model.info().vision)
        FAIL(usage, "the prompt has images, but this model reads text only");
    PromptImages images(request.prompt, request.images);
    for (int32_t id : request.prompt)
        if (!is_image_key(id) && id >= e.model.info().vocab_rows)
            FAIL(usage, "token id {} in the prompt is outside the vocabulary of {}", id,
                 e.model.info().vocab_rows);
    check_sampling(request.sampling, e.model.info().vocab);
    check_drafts(request.drafts, e.options.speculation);
    if (request.on_draft_logits && e.backend.ranks() > 1 && e.model.info().draft_tokens)
        FAIL(usage, "with -tp the logits of drafts are those of the whole head with --draft-head full only");
    if (!std::is_sorted(request.boundaries.begin(), request.boundaries.end()))
        FAIL(usage, "the boundaries of a prompt must rise");

    auto s = std::make_unique<Sequence>();
    s->id = e.next_id++;
    s->tokens = request.prompt;
    s->result.prompt_tokens = prompt;
    s->request = std::move(request);
    s->images = std::move(images);
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

const ImageSizes& Engine::image_sizes() const { return state_->memory.image_sizes; }
int64_t Engine::context() const { return state_->context; }
const std::vector<std::string>& Engine::notes() const { return state_->notes; }
int64_t Engine::sequences() const { return state_->options.sequences; }
const Model& Engine::model() const { return state_->model; }
Backend& Engine::backend() { return state_->backend; }
const Backend& Engine::backend() const { return state_->backend; }
const MemoryPlan& Engine::memory_plan() const { return state_->memory; }
const MemoryMeasured& Engine::memory_measured() const { return state_->measured; }
int64_t Engine::kernels(int64_t sequences) const {
    if (!state_->backend.captures() || sequences > state_->memory.steps.answer_rows) return 0;
    return state_->decode_plan(sequences).kernels();
}
std::string Engine::load_states(const std::string& directory) {
    State& e = *state_;
    e.file.emplace(directory, e.binding());
    return e.file->load(e.cache);
}

void Engine::name_directory(const std::string& directory) {
    state_->file.emplace(directory, state_->binding());
}

bool Engine::save_states(const std::function<bool()>& go_on) {
    CHECK(state_->file.has_value(), "[engine] there is no directory for states yet");
    return state_->file->save(state_->cache, go_on);
}

/// A hash of all that a state depends on: its bytes, and what they mean.
uint64_t Engine::State::binding() const {
    ContentHash hash;
    hash.add(QUERN_VERSION);
    hash.add(backend.name());
    if (backend.ranks() > 1) hash.add(int64_t{backend.ranks()});  // each has a part
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

std::shared_ptr<KeptStates> Engine::kept_states() const { return state_->cache.shared(); }
void Engine::expect_states(int64_t tokens) {
    if (state_->backend.captures() && state_->options.cache_bytes > 0) state_->cache.expect(tokens);
}
void Engine::settle_states() { state_->cache.settle(true); }
void Engine::abandon_states() { state_->cache.abandon(); }

PrefixCacheStats Engine::cache_stats() const { return state_->cache.stats(); }
KeptReport Engine::kept_report() const { return state_->cache.report(); }

std::optional<SpeculationReport> Engine::speculation() const {
    if (!state_->speculation) return std::nullopt;
    return state_->speculation->report();
}

bool Engine::step(const std::function<void()>& before_next) {
    try {
        return state_->step(before_next);
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::device) state_->lose(error.what());
        throw;
    }
}

bool Engine::State::step(const std::function<void()>& before_next) {
    cache.settle(false);
    end_cancelled();
    forget_ended();
    while (!launched.empty() && !launched.front().awaited()) read_launched();  // it may still need its inputs
    if (launched.empty()) encode_images();
    fill_stages(before_next);
    if (!launched.empty()) {
        if (read_launched()) fill_stages(before_next);
    }
    tell_all();
    if (launched.empty() || launched.front().step.kind == StepKind::answer) cache.keep_ahead();
    forget_ended();
    return !running.empty() || !queue.empty();
}

/// Launches steps until one is on its way for every stage, or none can be.
void Engine::State::fill_stages(const std::function<void()>& before_next) {
    while (may_launch() && launch_next(before_next)) {
    }
}

/// Images are encoded with nothing on its way, and logits of a prompt are read before anything is launched after them.
bool Engine::State::may_launch() const {
    if (launched.empty()) return true;
    return launched.size() < static_cast<size_t>(results.rooms()) && launched.back().room >= 0 &&
           !before_images;
}

/// Whether a step may have rows of the sequence although others are on their way: what these will tell is not needed for more
/// of a prompt, but for a state that is kept.
bool Engine::State::ready(const Sequence& s) const {
    const bool on_its_way =
        std::any_of(launched.begin(), launched.end(), [&](const LaunchedStep& step) { return step.has(s); });
    const bool kept = !s.cuts.empty() && s.cuts.front() == s.state.length;
    return !on_its_way || (s.in_prompt() && !kept);
}

/// Without slices if all sequences wait for steps that are on their way.
Step Engine::State::next_step() {
    std::vector<Sequence*> free;
    Scheduler::Others others{.answers = 0, .steps = std::max(1, results.rooms())};
    for (Sequence* s : running)
        if (ready(*s))
            free.push_back(s);
        else if (!s->in_prompt())
            ++others.answers;
    return free.empty() ? Step{} : scheduler.next(free, others);
}

/// False: nothing was launched.
bool Engine::State::launch_next(const std::function<void()>& before_next) {
    if (before_next) before_next();
    end_cancelled();
    admit();
    Step step = next_step();
    if (step.slices.empty()) return false;
    const size_t before = launched.size();
    take_turn(std::move(step));
    return launched.size() > before;
}

bool Engine::State::read_launched() {
    LaunchedStep done = std::move(launched.front());
    launched.pop_front();
    bool ahead = false;
    guarded(done.step, [&] { ahead = read(done); });
    if (done.room >= 0) results.leave(done.room);
    return ahead;
}

void Engine::State::guarded(Step& step, const std::function<void()>& work) {
    try {
        work();
    } catch (const std::exception& error) {
        rethrow_if_device(error);
        // The step is lost for everyone in it: their states are half written.
        for (const Slice& slice : step.slices)
            if (slice.sequence != nullptr) finish(*slice.sequence, FinishReason::error, error.what());
    }
    std::erase_if(running, [](const Sequence* s) { return s->done(); });
}

/// Before the caller can take the results of sequences that have ended.
void Engine::State::forget_ended() {
    std::erase_if(running, [](const Sequence* s) { return s->done(); });
    if (before_images)
        std::erase_if(before_images->slices, [](const Slice& slice) { return slice.sequence->done(); });
    for (LaunchedStep& l : launched)
        for (Slice& slice : l.step.slices)
            if (slice.sequence != nullptr && slice.sequence->done()) slice.sequence = nullptr;
}

/// Ends all requests: the device has failed.
void Engine::State::lose(const std::string& error) {
    launched.clear();
    before_images.reset();
    for (auto& [id, s] : sequences) finish(*s, FinishReason::error, error);
    tell_all();  // what was chosen before that
    running.clear();
    queue.clear();
}

void Engine::State::end_cancelled() {
    for (Sequence* s : running)
        if (s->cancelled) finish(*s, FinishReason::cancelled);
    for (Sequence* s : queue)
        if (s->cancelled) finish(*s, FinishReason::cancelled);
    const auto done = [](const Sequence* s) { return s->done(); };
    std::erase_if(running, done);
    std::erase_if(queue, done);
}

/// Starts what was queued while slots are free.
void Engine::State::admit() {
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
        if (match.entry != nullptr) s.state = cache.resume(match);  // none: another engine has given it up
        s.result.cached_tokens = s.state.length;
    }
    const std::vector<int64_t> image_ends = s.images.ends();
    if (caches(s))
        s.cuts = cuts_to_keep({.boundaries = s.request.boundaries,
                               .tokens = s.prompt_tokens(),
                               .done = s.state.length,
                               .fewest = backend.captures() ? kFewestKept : 0,
                               .images = image_ends});
    std::erase_if(s.cuts, [&](int64_t tokens) { return !s.images.tells_apart(tokens); });
    if (s.state.slot < 0) s.state = pool.acquire();
    if (s.request.on_prefill) s.request.on_prefill(s.state.length);
}

void Engine::State::finish(Sequence& s, FinishReason reason, std::string error) {
    if (s.done()) return;
    if (speculation) speculation->release(s);
    s.result.reason = reason;
    s.result.error = std::move(error);
    pool.release(s.state);
    s.images = {};
    s.request.images.clear();
}

}  // namespace quern
