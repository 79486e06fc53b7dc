#include "ggml-like/one_format.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/parallel.h"

namespace quern {
namespace {

constexpr int64_t kRows = 64;  // of a piece of work

/// Formats that kernels tell apart: all of 16 and 32 bits are held in BF16.
DType held(DType dtype) { return dtype == DType::F32 || dtype == DType::F16 ? DType::BF16 : dtype; }

bool same(const WeightSegment& a, const WeightSegment& b) { return held(a.dtype) == held(b.dtype); }

struct Rows {
    const WeightSegment* from;
    std::byte* to;
    int64_t begin, end;
};

void convert(const Rows& rows) {
    const WeightSegment& s = *rows.from;
    std::vector<float> values(static_cast<size_t>(s.cols));
    std::vector<uint16_t> rounded(values.size());
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        dequantize_row(s, r, values.data());
        std::transform(values.begin(), values.end(), rounded.begin(), float_to_bf16);
        std::memcpy(rows.to + dtype_bytes(DType::BF16, r * s.cols), rounded.data(),
                    rounded.size() * sizeof(uint16_t));
    }
}

/// Memory for the segments of `form`, and the work that fills them from `from`.
std::unique_ptr<std::byte[]> plan(const Weight& from, Weight& form, std::vector<Rows>& work) {
    if (from.segments[0].data == nullptr) return nullptr;  // random weights
    std::unique_ptr<std::byte[]> memory(new std::byte[static_cast<size_t>(form.bytes())]);
    std::byte* at = memory.get();
    for (size_t i = 0; i < form.segments.size(); ++i) {
        WeightSegment& s = form.segments[i];
        s.data = at;
        for (int64_t r = 0; r < s.rows; r += kRows)
            work.push_back({&from.segments[i], at, r, std::min(r + kRows, s.rows)});
        at += s.bytes();
    }
    return memory;
}

void run(const std::vector<Rows>& work, int threads) {
    for_each_parallel(threads, work.size(), [&](size_t i) { convert(work[i]); });
}

}  // namespace

bool one_format(const Weight& w, RowOrder order) {
    return order == RowOrder::stacked ||
           std::all_of(w.segments.begin(), w.segments.end(),
                       [&](const WeightSegment& s) { return same(s, w.segments[0]); });
}

bool one_format(const ExpertWeights& experts) {
    const WeightSegment& first = experts.expert.at(0).segments.at(0);
    for (const Weight& w : experts.expert)
        for (const WeightSegment& s : w.segments)
            if (!same(s, first)) return false;
    return true;
}

Weight bf16_form(const Weight& weight) {
    Weight form = weight;
    form.placed = nullptr;
    for (WeightSegment& s : form.segments) {
        s.dtype = DType::BF16;
        s.scale_kind = ScaleKind::none;
        s.data = s.scale = nullptr;
        s.global_scale = 1.0f;
    }
    return form;
}

ExpertWeights bf16_form(const ExpertWeights& experts) {
    ExpertWeights form{experts.name, experts.rows, experts.cols, {}, nullptr};
    for (const Weight& w : experts.expert) form.expert.push_back(bf16_form(w));
    return form;
}

InBf16<Weight> to_bf16(const Weight& weight, int threads) {
    InBf16<Weight> out{bf16_form(weight), {}};
    std::vector<Rows> work;
    out.memory.push_back(plan(weight, out.form, work));
    run(work, threads);
    return out;
}

InBf16<ExpertWeights> to_bf16(const ExpertWeights& experts, int threads) {
    InBf16<ExpertWeights> out{bf16_form(experts), {}};
    std::vector<Rows> work;
    for (size_t e = 0; e < experts.expert.size(); ++e)
        out.memory.push_back(plan(experts.expert[e], out.form.expert[e], work));
    run(work, threads);
    return out;
}

}  // namespace quern
