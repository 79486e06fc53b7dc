#include "models/weight_placement.h"

#include <algorithm>
#include <future>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "ggml-like/check.h"
#include "ggml-like/parallel.h"
#include "models/model_group.h"

namespace quern {
namespace {

/// A copy of more bytes than that is made by all threads together, others each by one.
constexpr int64_t kLargeCopy = 16 << 20;

int64_t aligned(int64_t bytes) { return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment; }

int64_t placed_bytes(const WeightUse& use, const Backend& backend) {
    return use.matrix != nullptr ? backend.placed_bytes(*use.matrix, use.order)
                                 : backend.placed_bytes(*use.experts, use.order);
}

std::vector<WeightSegment*> segments_of(const WeightUse& use) {
    std::vector<WeightSegment*> list;
    const auto add = [&](Weight& w) {
        for (WeightSegment& s : w.segments) list.push_back(&s);
    };
    if (use.matrix != nullptr) add(*use.matrix);
    if (use.experts != nullptr)
        for (Weight& expert : use.experts->expert) add(expert);
    return list;
}

/// Copies of the columns that this rank has of some matrices.
class Columns {
  public:
    Columns(std::span<const WeightUse* const> uses, int threads) {
        for (const WeightUse* use : uses)
            for (WeightSegment* s : segments_of(*use))
                if (s->stored_cols > 0) segments_.push_back(s);
        std::vector<int64_t> at;
        int64_t bytes = 0;
        for (const WeightSegment* s : segments_) {
            at.push_back(bytes);
            bytes += aligned(gathered_bytes(*s));
        }
        if (bytes == 0) return;
        memory_ = std::shared_ptr<std::byte[]>(new std::byte[static_cast<size_t>(bytes)]);
        for_each_parallel(threads, segments_.size(),
                          [&](size_t i) { gather_columns(*segments_[i], memory_.get() + at[i]); });
    }

    bool any() const { return !segments_.empty(); }
    const std::shared_ptr<std::byte[]>& memory() const { return memory_; }
    void forget() {
        for (WeightSegment* s : segments_) s->data = s->scale = nullptr;
    }

  private:
    std::vector<WeightSegment*> segments_;
    std::shared_ptr<std::byte[]> memory_;
};

class Placement {
  public:
    Placement(Model& model, Backend& backend, const OnProgress& progress)
        : model_(model), weights_(model.weights()), backend_(backend), on_progress_(progress) {}

    void run() {
        reserve_memory();
        // Beside the placing of those that are stored, which come first.
        std::future<std::vector<std::shared_ptr<void>>> making =
            std::async(std::launch::async, [this] { return make_copies(); });
        std::vector<std::shared_ptr<void>> made;
        const std::vector<Group> groups = layers();
        for (const Group& group : groups)
            for (const WeightUse* use : group) progress_.bytes_total += use->bytes();
        for (const Group& group : groups) {
            if (making.valid() && has_copies(group)) made = making.get();
            place(group);
        }
        if (making.valid()) made = making.get();
        backend_.weights_complete();
        keep_copies(made);
        for (const WeightCopy& c : weights_.copies)
            if (c.first_rows != nullptr) backend_.share_first_rows(*c.first_rows, *c.weight);
        for (const WeightUse& use : weights_.uses)
            if (use.tied != nullptr && use.again()) share(*use.matrix, *use.tied);
        place_vectors();
    }

  private:
    using Group = std::vector<const WeightUse*>;

    /// Matrices and experts, those of a layer together.
    std::vector<Group> layers() const {
        std::vector<Group> groups;
        for (const WeightUse& use : weights_.uses) {
            if (use.vector != nullptr || use.again()) continue;
            if (groups.empty() || groups.back().back()->layer != use.layer) groups.emplace_back();
            groups.back().push_back(&use);
        }
        return groups;
    }

    static bool has_copies(const Group& group) {
        return std::any_of(group.begin(), group.end(), [](const WeightUse* use) { return use->copy; });
    }

    /// What the copies point into; none of random weights, which the backend makes.
    std::vector<std::shared_ptr<void>> make_copies() const {
        std::vector<const WeightCopy*> large, small;
        for (const WeightCopy& c : weights_.copies)
            if (c.from.segments[0].data != nullptr)
                (c.from.bytes() > kLargeCopy ? large : small).push_back(&c);
        std::vector<std::shared_ptr<void>> memory(small.size());
        const auto make = [](const WeightCopy& c, int threads) {
            const ScaleChoice choice =
                c.of != nullptr ? ScaleChoice::amax : ScaleChoice::mse;  // many, and soon
            return std::shared_ptr<std::byte[]>(requantize(c.from, *c.weight, threads, choice));
        };
        for_each_parallel(backend_.threads(), small.size(),
                          [&](size_t i) { memory[i] = make(*small[i], 1); });
        for (const WeightCopy* c : large) memory.push_back(make(*c, backend_.threads()));
        return memory;
    }

    /// Those that the backend has not copied are read where they are.
    void keep_copies(const std::vector<std::shared_ptr<void>>& made) {
        const bool read_there = std::any_of(weights_.copies.begin(), weights_.copies.end(),
                                            [](const WeightCopy& c) { return !c.placed(); });
        if (read_there) weights_.memory.insert(weights_.memory.end(), made.begin(), made.end());
    }

    void reserve_memory() {
        int64_t bytes = 0, vectors = 0;
        for (const WeightUse& use : weights_.uses) {
            if (use.vector != nullptr)
                vectors += aligned(use.vector->bytes());
            else if (!use.again() && !apart(use))
                bytes += placed_bytes(use, backend_);
        }
        if (bytes > 0) backend_.reserve_weights(bytes);
        Backend& backend = backend_;
        vectors_ = {backend.alloc(vectors, "norms"), [&backend](void* memory) { backend.free(memory); }};
        weights_.memory.push_back(vectors_);
    }

    /// What will change later is placed where its memory can be freed.
    bool apart(const WeightUse& use) const {
        return use.matrix != nullptr && weights_.changes_later(*use.matrix);
    }

    void place(const Group& group) {
        Columns columns(group, backend_.threads());
        check(group);
        for (const WeightUse* use : group) {
            if (use->experts != nullptr)
                backend_.place_experts(*use->experts, use->order);
            else if (apart(*use))
                backend_.place_apart(*use->matrix, use->order);
            else
                backend_.place_weight(*use->matrix, use->order);
            progress_.bytes_done += use->bytes();
        }
        if (columns.any()) keep(columns, group);
        if (on_progress_) on_progress_(progress_);
    }

    /// Where the backend has placed what it read, the copies go.
    void keep(Columns& columns, const Group& group) {
        const bool read_there = std::any_of(group.begin(), group.end(), [](const WeightUse* use) {
            return (use->matrix != nullptr ? use->matrix->placed : use->experts->placed) == nullptr;
        });
        if (read_there) {
            weights_.memory.push_back(columns.memory());
            return;
        }
        backend_.finish_reading();
        columns.forget();
    }

    void check(const Group& group) const {
        std::vector<const Weight*> list;
        for (const WeightUse* use : group) {
            if (use->copy) continue;
            if (use->matrix != nullptr) list.push_back(use->matrix);
            if (use->experts != nullptr)
                for (const Weight& expert : use->experts->expert) list.push_back(&expert);
        }
        model_.check_weights(list, backend_.threads());
    }

    static void share(Weight& head, const Weight& embedding) {
        std::string name = std::move(head.name);
        head = embedding;
        head.name = std::move(name);
    }

    void place_vectors() {
        auto* memory = static_cast<std::byte*>(vectors_.get());
        for (const WeightUse& use : weights_.uses) {
            if (use.vector == nullptr) continue;
            backend_.upload(memory, use.vector->data, use.vector->bytes());
            use.vector->data = memory;
            memory += aligned(use.vector->bytes());
        }
        backend_.synchronize();
    }

    Model& model_;
    ModelWeights& weights_;
    Backend& backend_;
    const OnProgress on_progress_;
    LoadProgress progress_;
    std::shared_ptr<void> vectors_;  // all norms and other small vectors, on the backend
};

}  // namespace

namespace {

/// Adds up what stages say, also at the same time.
class TotalProgress {
  public:
    /// `total`: bytes of all.
    TotalProgress(int stages, int64_t total, const OnProgress& tell)
        : done_(static_cast<size_t>(stages), 0), total_(total), tell_(tell) {}
    OnProgress of_stage(int stage) {
        return [this, stage](const LoadProgress& p) {
            const std::lock_guard lock(mutex_);
            done_[static_cast<size_t>(stage)] = p.bytes_done;
            if (tell_) tell_({std::accumulate(done_.begin(), done_.end(), int64_t{0}), total_});
        };
    }

  private:
    std::mutex mutex_;
    std::vector<int64_t> done_;
    const int64_t total_;
    const OnProgress& tell_;
};

/// Weights that will change take the form that they are stored in.
void begin_as_stored(ModelWeights& weights) {
    for (DenseChange& c : weights.changes) std::swap(*c.weight, c.other);
}

void place_stages(Model& model, Backend& backend, const OnProgress& progress) {
    int64_t bytes = 0;
    for (int s = 0; s < model.stages(); ++s) {
        begin_as_stored(model.of_stage(s).weights());
        for (const WeightUse& use : model.of_stage(s).weights().uses)
            if (use.vector == nullptr && !use.again()) bytes += use.bytes();
    }
    TotalProgress total(model.stages(), bytes, progress);
    for_each_parallel(model.stages(), static_cast<size_t>(model.stages()), [&](size_t i) {
        const int stage = static_cast<int>(i);
        Placement(model.of_stage(stage), backend.of_stage(stage), total.of_stage(stage)).run();
    });
}

}  // namespace

std::unique_ptr<Model> open_for(const Backend& backend, const std::vector<double>& shares,
                                const OpenOptions& options,
                                const std::function<std::unique_ptr<Model>(const OpenOptions&)>& open) {
    const int stages = backend.stages();
    if (stages == 1) return open_ranks(backend.ranks(), options, open);
    if (!shares.empty() && shares.size() != static_cast<size_t>(stages))
        FAIL(usage, "--tensor-split has {} numbers for {} devices; give one for each", shares.size(), stages);
    StageShares split{.of_device = shares, .by_bytes = shares.empty()};
    for (int s = 0; s < stages && split.by_bytes; ++s)
        split.of_device.push_back(static_cast<double>(backend.of_stage(s).memory_info().free_bytes));
    return open_stages(split, options, open);
}

void place_weights(Model& model, Backend& backend, const OnProgress& progress) {
    if (model.stages() > 1) return place_stages(model, backend, progress);
    backend.on_ranks([&](int rank) {
        Model& own = model.of_rank(rank);
        begin_as_stored(own.weights());
        Placement(own, backend.of_rank(rank), rank == 0 ? progress : OnProgress{}).run();
    });
}

bool changes_later(const Model& model) {
    for (int s = 0; s < model.stages(); ++s)
        if (!model.of_stage(s).weights().changes.empty()) return true;
    return false;
}

int64_t extra_bytes_as_stored(const Model& model, const Backend& backend) {
    int64_t extra = 0;
    for (const DenseChange& c : model.weights().changes) {
        if (!c.tied) extra += backend.placed_bytes(c.other, RowOrder::stacked);
        extra -= backend.placed_bytes(*c.weight, RowOrder::stacked);
    }
    return extra;
}

namespace {

int64_t bytes_to_change(const ModelWeights& weights) {
    int64_t bytes = 0;
    for (const DenseChange& c : weights.changes) bytes += c.weight->bytes();
    return bytes;
}

/// Of one device.
void requantize_own(ModelWeights& weights, Backend& backend, const OnProgress& progress) {
    LoadProgress done{0, bytes_to_change(weights)};
    for (DenseChange& c : weights.changes) {
        std::shared_ptr<std::byte[]> memory =
            c.whole ? requantize_part(c.part, c.whole, c.other, backend.threads())
                    : requantize(*c.weight, c.other, backend.threads());
        if (!c.tied) c.other.placed = c.weight->placed;  // to be given back
        done.bytes_done += c.weight->bytes();
        *c.weight = std::move(c.other);
        backend.place_apart(*c.weight, RowOrder::stacked);
        if (c.weight->placed == nullptr)
            weights.memory.push_back(std::move(memory));  // read where it is
        else
            for (WeightSegment& s : c.weight->segments) s.data = s.scale = nullptr;
        if (progress) progress(done);
    }
    weights.changes.clear();
    backend.weights_complete();
}

}  // namespace

void requantize_weights(Model& model, Backend& backend, const OnProgress& progress) {
    if (model.stages() == 1) {
        backend.on_ranks([&](int rank) {
            requantize_own(model.of_rank(rank).weights(), backend.of_rank(rank),
                           rank == 0 ? progress : OnProgress{});
        });
        return;
    }
    int64_t bytes = 0;
    for (int s = 0; s < model.stages(); ++s) bytes += bytes_to_change(model.of_stage(s).weights());
    TotalProgress total(model.stages(), bytes, progress);
    for (int s = 0; s < model.stages(); ++s)  // one after another, each by all threads
        requantize_own(model.of_stage(s).weights(), backend.of_stage(s), total.of_stage(s));
}

std::unique_ptr<Model> load_model(const std::string& path, Backend& backend, OpenOptions options,
                                  const OnProgress& progress, const std::vector<double>& shares) {
    options.threads = backend.threads();
    std::unique_ptr<Model> model =
        open_for(backend, shares, options, [&](const OpenOptions& own) { return open_model(path, own); });
    place_weights(*model, backend, progress);
    return model;
}

}  // namespace quern
