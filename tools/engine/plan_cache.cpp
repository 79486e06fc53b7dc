#include "tools/engine/plan_cache.h"

#include <algorithm>
#include <bit>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"

namespace quern {
namespace {

std::list<StepPlan>::iterator find(std::list<StepPlan>& plans, const BatchShape& shape) {
    return std::find_if(plans.begin(), plans.end(), [&](const StepPlan& p) { return p.shape == shape; });
}

/// The next one, or the number itself.
int64_t power_of_two(int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); }

}  // namespace

int64_t padded_sequences(int64_t sequences) {
    return sequences <= kMaxUnpadded ? sequences : power_of_two(sequences);
}

BatchShape decode_shape(int64_t sequences, int64_t pages, int64_t vocab) {
    return {.kind = StepKind::answer,
            .tokens = sequences,
            .sequences = sequences,
            .logit_rows = sequences,
            .pages = pages,
            .vocab = vocab};
}

BatchShape verify_shape(const BatchShape& shape, int64_t rows) {
    BatchShape out = shape;
    out.verifies = true;
    // Not padded, or to one of four sizes between powers of two.
    const int64_t power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(shape.tokens)));
    const int64_t step = std::max<int64_t>(1, power / 4);
    out.tokens = out.logit_rows =
        shape.tokens <= kMaxUnpadded ? shape.tokens : std::min(rows, (shape.tokens + step - 1) / step * step);
    out.sequences = padded_sequences(shape.sequences);
    return out;
}

/// One row a sequence, or a power of two.
BatchShape draft_shape(const BatchShape& shape, int64_t rows) {
    BatchShape out = shape;
    const bool one_each = shape.tokens == shape.sequences;
    out.sequences = padded_sequences(shape.sequences);
    out.tokens =
        one_each ? out.sequences : std::min(rows, power_of_two(std::max(shape.tokens, out.sequences + 1)));
    CHECK(out.tokens >= shape.tokens && (one_each || out.tokens > out.sequences),
          "[plan] {} rows of {} sequences do not fit {}", shape.tokens, shape.sequences, rows);
    return out;
}

bool drafts_alone(const BatchShape& shape) {
    const bool drafts = shape.pass == Pass::dflash || (shape.pass == Pass::mtp && shape.drafts > 0);
    return drafts && shape.sequences == 1 && !shape.full_head;
}

int64_t StepPlan::kernels() const {
    int64_t sum = plan->kernels;
    for (const StagePlan& stage : later) sum += stage.plan->kernels;
    return sum;
}

/// Each stage goes on from what the one before leaves.
void StepPlan::run_later() {
    const std::vector<Tensor*>* left = &leaving;
    for (size_t i = 0; i < later.size(); ++i) {
        StagePlan& own = later[i];
        std::vector<BlockCopy> rows;
        for (size_t t = 0; t < left->size(); ++t) {
            const Tensor &from = *(*left)[t], &to = *own.arriving[t];
            CHECK(from.bytes() == to.bytes(), "[plan] {} arrives as {}", describe(from), describe(to));
            rows.push_back({static_cast<std::byte*>(to.data), static_cast<const std::byte*>(from.data),
                            to.bytes(), to.bytes(), to.bytes(), 1});
        }
        const int stage = static_cast<int>(i) + 1;
        Backend& receiver = backend->of_stage(stage);
        own.plan->await_inputs();
        own.plan->copy_inputs(*plan);
        receiver.receive(backend->of_stage(stage - 1), rows);
        own.plan->run_marked();
        left = &own.leaving;
    }
}

void StepPlan::await_inputs() { plan->await_inputs(); }

void StepPlan::run_before(Plan& next) {
    CHECK(later.empty() && others.empty(), "[plan] drafts ahead on several devices");
    plan->run_before(next);
}

void StepPlan::run() {
    if (backend->stages() > 1) {
        plan->run_marked();
        return run_later();
    }
    if (others.empty()) return plan->run();
    backend->on_ranks([this](int rank) {
        if (rank == 0) return plan->run();
        Plan& own = *others[static_cast<size_t>(rank) - 1].plan;
        own.copy_inputs(*plan);
        own.run();
    });
}

PlanCache::PlanCache(const Model& model, Backend& backend, const StateViews& state, Workspace& workspace,
                     size_t capacity, const std::vector<ScratchSize>& later_stages, Workspace* drafting)
    : model_(model),
      backend_(backend),
      state_(state),
      workspace_(workspace),
      drafting_(drafting),
      capacity_(capacity) {
    for (int stage = 1; stage < backend.stages(); ++stage) {
        const auto i = static_cast<size_t>(stage) - 1;
        const ScratchSize size = i < later_stages.size()
                                     ? later_stages[i]
                                     : ScratchSize{workspace.arena_bytes(), workspace.input_bytes()};
        later_.push_back(std::make_unique<Workspace>(backend.of_stage(stage), size.arena, size.inputs));
    }
    for (int rank = 1; rank < backend.ranks(); ++rank) others_.push_back({{state, backend, rank}, nullptr});
    backend.on_ranks([&](int rank) {
        if (rank > 0)
            others_[static_cast<size_t>(rank) - 1].workspace = std::make_unique<Workspace>(
                backend.of_rank(rank), workspace.arena_bytes(), workspace.input_bytes());
    });
}

Tensor RankState::find(int layer, StateRole role) const {
    Tensor t = state_.find(layer, role);
    t.data = backend_.memory_of(rank_, t.data);
    return t;
}

RankPlan PlanCache::make_other(const BatchShape& shape, PlanUse use, int rank) const {
    const Rank& own = others_[static_cast<size_t>(rank) - 1];
    Backend& backend = backend_.of_rank(rank);
    BuiltGraph built = model_.of_rank(rank).build(shape, own.state, backend.activation_dtype());
    return {built.logits, built.top,
            std::make_unique<Plan>(std::move(built.graph), backend, *own.workspace, use)};
}

void PlanCache::make_stages(StepPlan& step, PlanUse use) const {
    const auto build = [&](int stage) {
        return model_.of_stage(stage).build(step.shape, state_, backend_.activation_dtype());
    };
    BuiltGraph built = build(0);
    step.batch = built.batch;
    step.next_ids = built.next_ids;
    step.next_source = built.next_source;
    step.leaving = built.leaving;
    step.device = &backend_.of_stage(0);
    step.plan = std::make_unique<Plan>(std::move(built.graph), backend_.of_stage(0), workspace_, use);
    for (int stage = 1; stage < backend_.stages(); ++stage) {
        built = build(stage);
        step.logits = built.logits;
        step.top = built.top;
        Workspace& own = *later_[static_cast<size_t>(stage) - 1];
        step.later.push_back(
            {built.arriving, built.leaving,
             std::make_unique<Plan>(std::move(built.graph), backend_.of_stage(stage), own, use)});
    }
}

StepPlan PlanCache::make(const BatchShape& shape, PlanUse use) const {
    StepPlan step{.shape = shape, .backend = &backend_};
    if (shape.pass == Pass::mtp || shape.pass == Pass::dflash) {
        make_drafting(step, use);
        return step;
    }
    if (backend_.stages() > 1) {
        make_stages(step, use);
        return step;
    }
    step.others.resize(others_.size());
    backend_.on_ranks([&](int rank) {
        if (rank > 0)
            step.others[static_cast<size_t>(rank) - 1] = make_other(shape, use, rank);
        else
            make_first(step, use);
    });
    return step;
}

void PlanCache::make_first(StepPlan& step, PlanUse use) const {
    make_own(step, use, model_.of_rank(0), backend_.of_rank(0), workspace_);
}

void PlanCache::make_drafting(StepPlan& step, PlanUse use) const {
    if (backend_.stages() == 1) {
        Workspace& own = drafting_ != nullptr && drafts_alone(step.shape) ? *drafting_ : workspace_;
        return make_own(step, use, model_.of_rank(0), backend_.of_rank(0), own);
    }
    const int last = backend_.stages() - 1;
    make_own(step, use, model_.of_stage(last), backend_.of_stage(last), *later_.back());
}

void PlanCache::make_own(StepPlan& step, PlanUse use, const Model& model, Backend& device,
                         Workspace& workspace) const {
    BuiltGraph built = model.build(step.shape, state_, backend_.activation_dtype());
    step.device = &device;
    step.batch = built.batch;
    step.logits = built.logits;
    step.top = built.top;
    step.next_ids = built.next_ids;
    step.next_source = built.next_source;
    step.mtp = std::move(built.mtp);
    step.plan = std::make_unique<Plan>(std::move(built.graph), device, workspace, use);
}

StepPlan& PlanCache::get(const BatchShape& shape, PlanUse use) {
    if (const auto hit = find(kept_, shape); hit != kept_.end()) return *hit;
    if (use == PlanUse::repeatedly) return kept_.emplace_back(make(shape, use));
    if (const auto hit = find(plans_, shape); hit != plans_.end()) {
        plans_.splice(plans_.begin(), plans_, hit);
        return plans_.front();
    }
    while (plans_.size() >= capacity_) plans_.pop_back();
    return plans_.emplace_front(make(shape, use));
}

}  // namespace quern
