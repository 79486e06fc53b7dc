#include "tools/engine/head_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-like/backend.h"
#include "ggml-like/ops/logits_top.h"

namespace quern {
namespace {

/// One rank's list, from its highest logit on.
struct List {
    const int32_t* top;
    int32_t first_id;
    int next = 0;

    bool ended() const { return next == kTopLogits || top[next] < 0; }
    int32_t id() const { return first_id + top[next]; }
    float value(int i) const {
        float v;
        std::memcpy(&v, top + kTopLogits + i, sizeof v);
        return v;
    }
    float value() const { return value(next); }
    float sum() const {
        float v;
        std::memcpy(&v, top + 2 * kTopLogits, sizeof v);
        return v;
    }
    bool exact() const { return top[kTopWords - 1] != 0; }
};

/// The list with the highest logit that is left, of equal ones that with the lowest id; null: none is left.
List* highest(std::vector<List>& lists) {
    List* best = nullptr;
    for (List& l : lists)  // in the order of their ids
        if (!l.ended() && (best == nullptr || l.value() > best->value())) best = &l;
    return best;
}

}  // namespace

void merge_top(std::span<const int32_t* const> tops, int64_t rows, int64_t vocab, float temperature,
               int32_t* out) {
    std::vector<List> lists;
    for (const int32_t* top : tops) {
        const int64_t first = static_cast<int64_t>(lists.size()) * rows;
        if (first >= vocab) break;
        lists.push_back({top, static_cast<int32_t>(first)});
    }
    float values[kTopLogits];
    const int wanted = temperature < 0 ? 1 : kTopLogits;
    for (int i = 0; i < kTopLogits; ++i) {
        List* best = i < wanted ? highest(lists) : nullptr;
        out[i] = best != nullptr ? best->id() : -1;
        values[i] = best != nullptr ? best->value() : -INFINITY;
        if (best != nullptr) ++best->next;
    }
    const double scale = temperature > 0 ? 1.0 / temperature : 1.0;
    double sum = 0;
    for (const List& l : lists)
        if (l.top[0] >= 0) sum += l.sum() * std::exp((l.value(0) - values[0]) * scale);
    const auto rounded = static_cast<float>(sum);
    std::memcpy(out + kTopLogits, values, sizeof values);
    std::memcpy(out + 2 * kTopLogits, &rounded, sizeof rounded);
    const bool exact = std::all_of(lists.begin(), lists.end(), [](const List& l) { return l.exact(); });
    out[kTopWords - 1] = exact ? 1 : 0;
}

int64_t logit_columns(const StepPlan& step) { return step.logits->shape[1] * step.backend->ranks(); }

void download_top(const StepPlan& step, std::span<const float> temperatures, int32_t* top) {
    Backend& backend = *step.backend;
    if (step.others.empty()) return backend.download(top, step.top->data, step.top->bytes());
    const auto words = static_cast<size_t>(step.top->elements());
    std::vector<std::vector<int32_t>> each(step.others.size() + 1, std::vector<int32_t>(words));
    backend.on_ranks([&](int rank) {
        const auto r = static_cast<size_t>(rank);
        const Tensor& own = rank == 0 ? *step.top : *step.others[r - 1].top;
        backend.of_rank(rank).download(each[r].data(), own.data, own.bytes());
    });
    for (size_t row = 0; row < temperatures.size(); ++row) {
        std::vector<const int32_t*> tops;
        for (const auto& own : each) tops.push_back(own.data() + row * kTopWords);
        merge_top(tops, step.logits->shape[1], step.shape.vocab, temperatures[row], top + row * kTopWords);
    }
}

void download_logits(const StepPlan& step, int64_t row, int64_t count, float* to) {
    const int64_t own = step.logits->shape[1], all = logit_columns(step);
    const auto bytes = count * own * int64_t{sizeof(float)};
    Backend& backend = *step.backend;
    if (step.others.empty()) return backend.download(to, step.logits->row<float>(row), bytes);
    backend.on_ranks([&](int rank) {
        const auto r = static_cast<size_t>(rank);
        const Tensor& logits = rank == 0 ? *step.logits : *step.others[r - 1].logits;
        std::vector<float> rows(static_cast<size_t>(count * own));
        backend.of_rank(rank).download(rows.data(), logits.row<float>(row), bytes);
        for (int64_t i = 0; i < count; ++i)
            std::copy_n(rows.begin() + i * own, own, to + i * all + rank * own);
    });
}

}  // namespace quern
