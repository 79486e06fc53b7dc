#include "models/model_weights.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"

namespace quern {

bool WeightUse::again() const {
    return tied != nullptr && matrix->segments[0].dtype == tied->segments[0].dtype;
}

int64_t WeightUse::bytes() const {
    return matrix != nullptr ? matrix->bytes() : experts != nullptr ? experts->bytes() : vector->bytes();
}

int64_t WeightUse::parameters() const {
    if (matrix != nullptr) return matrix->rows * matrix->cols;
    return experts != nullptr ? experts->count() * experts->rows * experts->cols : vector->elements();
}

double WeightUse::share(int64_t tokens) const {
    if (draft || vision) return 0;
    if (picked == 0) return 1;
    const auto choices = static_cast<double>(experts != nullptr ? experts->count() : matrix->rows);
    return 1 - std::pow(1 - static_cast<double>(picked) / choices, static_cast<double>(tokens));
}

bool ModelWeights::changes_later(const Weight& w) const {
    return std::any_of(changes.begin(), changes.end(), [&](const DenseChange& c) { return c.weight == &w; });
}

void ModelWeights::plan_change(const WeightUse& use, DenseFormat format) {
    if (!can_requantize(*use.matrix, format)) return;
    changes.push_back({use.matrix, requantized_form(*use.matrix, format), use.tied != nullptr, format});
    std::swap(*use.matrix, changes.back().other);
}

void ModelWeights::drop_unused() {
    const auto use_of = [&](const Weight* w) {
        return std::find_if(uses.begin(), uses.end(), [&](const WeightUse& use) { return use.matrix == w; });
    };
    std::erase_if(changes, [&](const DenseChange& c) { return use_of(c.weight) == uses.end(); });
    for (DenseChange& c : changes) c.tied = use_of(c.weight)->tied != nullptr;
    const auto use_of_copy = [&](const WeightCopy& c) {
        return std::find_if(uses.begin(), uses.end(), [&](const WeightUse& use) {
            return c.of != nullptr ? use.experts == c.of : use.matrix == c.weight;
        });
    };
    std::erase_if(copies, [&](const WeightCopy& c) { return use_of_copy(c) == uses.end(); });
    for (const WeightCopy& c : copies) use_of_copy(c)->copy = true;
}

void ModelWeights::begin_parts() {
    for (DenseChange& c : changes) {
        std::swap(*c.weight, c.other);
        c.whole = *c.weight;
    }
}

void ModelWeights::plan_parts() {
    drop_unused();
    for (DenseChange& c : changes) {
        c.part = *c.weight;
        *c.weight = requantized_form(c.part, c.format);
        c.other = c.part;
        for (const WeightSegment& s : c.part.segments)
            if (c.format == DenseFormat::nvfp4 && c.whole.cols % nvfp4::kBlock == 0 &&
                s.cols % nvfp4::kBlock != 0)
                FAIL(usage,
                     "--dense nvfp4: of {} each rank has {} columns, which are no whole blocks of {}; choose "
                     "--dense fp8, or fewer ranks",
                     c.whole.name, s.cols, nvfp4::kBlock);
    }
}

void ModelWeights::change_copy(Weight& copy, const Weight& of) {
    const auto same =
        std::find_if(changes.begin(), changes.end(), [&](const DenseChange& c) { return c.weight == &of; });
    if (same == changes.end()) return;
    DenseChange c = *same;
    c.weight = &copy;
    changes.push_back(std::move(c));
}

void ModelWeights::plan_vision(DenseFormat format) {
    if (format == DenseFormat::as_stored) return;
    for (const WeightUse& use : uses)
        if (use.vision && use.matrix != nullptr) plan_change(use, format);
}

void ModelWeights::plan_copy(WeightUse& use, DenseFormat format) {
    const auto can = [&](const Weight& w) { return can_requantize(w, format); };
    if (use.matrix != nullptr ? !can(*use.matrix)
                              : !std::all_of(use.experts->expert.begin(), use.experts->expert.end(), can))
        return;
    const auto plan = [&](Weight& w, const ExpertWeights* of) {
        copies.push_back({&w, w, of});
        w = requantized_form(copies.back().from, format);
    };
    if (use.matrix != nullptr) plan(*use.matrix, nullptr);
    if (use.experts != nullptr)
        for (Weight& expert : use.experts->expert) plan(expert, use.experts);
    use.copy = true;
}

void ModelWeights::plan_drafters(DenseFormat format) {
    if (format == DenseFormat::as_stored) return;
    const bool nvfp4 = std::any_of(uses.begin(), uses.end(), [](const WeightUse& use) {
        if (use.draft || use.vision || use.layer < 0 || use.vector != nullptr) return false;
        const Weight& w = use.matrix != nullptr ? *use.matrix : use.experts->expert.front();
        return w.segments.front().dtype == DType::NVFP4;
    });
    for (WeightUse& use : uses) {
        if (use.draft_layer) plan_copy(use, format);
        if (use.mtp_product && nvfp4) plan_copy(use, DenseFormat::nvfp4);
    }
}

void ModelWeights::plan_dense(DenseFormat format) {
    if (format == DenseFormat::as_stored) return;
    for (const WeightUse& use : uses)
        if (use.projection) plan_change(use, format);
    if (changes.empty())
        FAIL(usage,
             "--dense {}: the attention and DeltaNet projections and the head of this checkpoint are "
             "quantized "
             "already; leave it out",
             dense_format_name(format));
}

}  // namespace quern
