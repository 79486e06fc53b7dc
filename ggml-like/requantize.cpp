#include "ggml-like/requantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/thread_pool.h"
#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

constexpr int64_t kAlignment = 64, kGrain = 32;  // rows of a chunk

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

bool changes(const WeightSegment& s, DenseFormat format) {
    if (format == DenseFormat::as_stored || s.scale_kind != ScaleKind::none) return false;
    return format == DenseFormat::fp8 || s.cols % nvfp4::kBlock == 0;
}

int64_t scale_bytes(const WeightSegment& s) {
    return s.scale_kind == ScaleKind::per_row ? s.rows * int64_t{sizeof(float)}
                                              : s.rows * (s.cols / nvfp4::kBlock);
}

/// Where a segment begins in a larger one.
struct Corner {
    const WeightSegment* whole;
    int64_t row = 0, col = 0;
};

Corner corner_of(const WeightSegment& part, const Weight& whole) {
    for (const WeightSegment& s : whole.segments) {
        const int64_t row_bytes = dtype_bytes(s.dtype, s.cols);
        const auto at = reinterpret_cast<intptr_t>(part.data) - reinterpret_cast<intptr_t>(s.data);
        if (at < 0 || at >= s.rows * row_bytes) continue;
        const Corner corner{&s, at / row_bytes, at % row_bytes / dtype_bytes(s.dtype, 1)};
        CHECK(corner.row + part.rows <= s.rows && corner.col + part.cols <= s.cols,
              "[requantize] {} is beyond {}", part.name, s.name);
        return corner;
    }
    FAIL(runtime, "[requantize] {} is no part of {}", part.name, whole.name);
}

/// Requantizes one segment, a chunk of its rows a call.
class Requantizer {
  public:
    Requantizer(const Corner& from, WeightSegment& to, std::byte* memory, ScaleChoice choice)
        : whole_(from.whole->name, {*from.whole}),
          row_(from.row),
          col_(from.col),
          choice_(choice),
          to_(to),
          values_(reinterpret_cast<uint8_t*>(memory)) {
        to.data = memory;
        to.scale = memory + aligned(dtype_bytes(to.dtype, to.rows * to.cols));
    }

    void run(cpu::ThreadPool& pool) {
        if (to_.scale_kind == ScaleKind::nvfp4) {
            std::vector<float> largest(static_cast<size_t>(whole_.rows));
            for_rows(pool, whole_.rows, 0, [&](int64_t row, std::span<const float> w) {
                largest[static_cast<size_t>(row)] = checked_magnitude(w);
            });
            global_ =
                Nvfp4Global::of(*std::max_element(largest.begin(), largest.end()), GlobalForm::multiplier);
            to_.global_scale = global_.stored;
        }
        for_rows(pool, to_.rows, row_, [&](int64_t row, std::span<const float> w) { encode(row, w); });
    }

  private:
    /// Calls f(row, values) for `rows` rows of the whole matrix, from `first` on.
    template <typename F>
    void for_rows(cpu::ThreadPool& pool, int64_t rows, int64_t first, F&& f) {
        pool.parallel_for(rows, kGrain, [&](int64_t begin, int64_t end, int) {
            std::vector<float> w(static_cast<size_t>(whole_.cols));
            for (int64_t row = begin; row < end; ++row) {
                dequantize_row(whole_, first + row, w.data());
                f(row, std::span<const float>(w));
            }
        });
    }
    float checked_magnitude(std::span<const float> w) const {
        const float largest = largest_magnitude(w);
        if (!std::isfinite(largest))
            FAIL(model,
                 "{}: a weight is NaN or infinite, so it cannot be requantized; the file may be damaged. "
                 "Without "
                 "--dense, and with --draft-head full for a drafter, weights stay as they are stored",
                 to_.name);
        return largest;
    }
    /// `whole_row`: also what is beside this segment's columns.
    void encode(int64_t row, std::span<const float> whole_row) const {
        auto* scale = static_cast<uint8_t*>(const_cast<void*>(to_.scale));
        const auto w = whole_row.subspan(static_cast<size_t>(col_), static_cast<size_t>(to_.cols));
        if (to_.scale_kind == ScaleKind::nvfp4) {
            encode_nvfp4(w, global_, choice_, values_ + row * (to_.cols / 2),
                         scale + row * (to_.cols / nvfp4::kBlock));
            return;
        }
        const float factor = fp8_scale(checked_magnitude(whole_row));
        std::memcpy(scale + row * int64_t{sizeof factor}, &factor, sizeof factor);
        encode_fp8(w, factor, values_ + row * to_.cols);
    }

    const Weight whole_;
    const int64_t row_, col_;  // where to_ begins in it
    const ScaleChoice choice_;
    WeightSegment& to_;
    uint8_t* values_;
    Nvfp4Global global_;
};

}  // namespace

const char* dense_format_name(DenseFormat format) {
    return format == DenseFormat::fp8 ? "fp8" : format == DenseFormat::nvfp4 ? "nvfp4" : "as stored";
}

bool can_requantize(const Weight& w, DenseFormat format) {
    int64_t bytes = 0;
    for (const WeightSegment& s : w.segments)
        if (changes(s, format)) bytes += s.bytes();
    return 2 * bytes >= w.bytes() && bytes > 0;
}

Weight requantized_form(const Weight& w, DenseFormat format) {
    Weight form = w;
    form.placed = nullptr;
    for (WeightSegment& s : form.segments) {
        if (!changes(s, format)) continue;
        s.dtype = format == DenseFormat::fp8 ? DType::F8_E4M3 : DType::NVFP4;
        s.scale_kind = format == DenseFormat::fp8 ? ScaleKind::per_row : ScaleKind::nvfp4;
        s.data = s.scale = nullptr;
        s.global_scale = 1.0f;
    }
    return form;
}

std::unique_ptr<std::byte[]> requantize(const Weight& from, Weight& to, int threads, ScaleChoice choice) {
    return requantize_part(from, from, to, threads, choice);
}

std::unique_ptr<std::byte[]> requantize_part(const Weight& from, const Weight& whole, Weight& to, int threads,
                                             ScaleChoice choice) {
    CHECK(from.segments.size() == to.segments.size(), "[requantize] {} is not the form of {}", to.name,
          from.name);
    const auto same = [&](size_t i) { return from.segments[i].dtype == to.segments[i].dtype; };
    int64_t bytes = 0;
    for (size_t i = 0; i < to.segments.size(); ++i) {
        const WeightSegment& s = to.segments[i];
        if (!same(i)) bytes += aligned(dtype_bytes(s.dtype, s.rows * s.cols)) + aligned(scale_bytes(s));
    }
    std::unique_ptr<std::byte[]> memory(new std::byte[static_cast<size_t>(bytes)]);
    cpu::ThreadPool pool(threads);
    int64_t at = 0;
    for (size_t i = 0; i < to.segments.size(); ++i) {
        if (same(i)) continue;
        WeightSegment& s = to.segments[i];
        Requantizer(corner_of(from.segments[i], whole), s, memory.get() + at, choice).run(pool);
        at += aligned(dtype_bytes(s.dtype, s.rows * s.cols)) + aligned(scale_bytes(s));
    }
    return memory;
}

}  // namespace quern
