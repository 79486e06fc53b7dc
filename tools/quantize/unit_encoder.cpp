#include "tools/quantize/unit_encoder.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/tensor.h"

namespace quern {
namespace {

constexpr int64_t kChunkValues = 1 << 20;
constexpr size_t kCopyBytes = 8 << 20;
constexpr int64_t kFp8Block = 128;
/// Readers take largest weights outside of (1e-3, 1e3) for a damaged scale. A matrix of smaller weights gets
/// the global scale of these: its block scales are smaller then, and as precise.
constexpr float kSmallestAmax = 2e-3f, kLargestAmax = 1e3f;

/// Tells the kernel that these pages of a mapping are not needed soon.
void release_pages(const void* data, uint64_t bytes) {
    static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
    if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

class UnitEncoder {
  public:
    UnitEncoder(const ModuleIndex& index, const WritePlan& plan, const WriteUnit& unit, const ByteSink& sink)
        : index_(index), plan_(plan), unit_(unit), sink_(sink) {}

    void run() {
        if (unit_.storage == WeightStorage::nvfp4) return nvfp4_group();
        const Module& m = index_.modules()[unit_.modules[0]];
        if (unit_.storage == WeightStorage::fp8_tensor) return fp8_tensor(m);
        unit_.storage == WeightStorage::fp8 ? fp8_rows(m) : fp8_blocks(m);
    }

  private:
    /// f(first row, rows as floats, number of rows) over the matrix in chunks of a multiple of `step` rows.
    template <typename F>
    void for_chunks(const Module& m, int64_t step, bool last_pass, F&& f) {
        const WeightSegment& s = m.segment;
        const int64_t rows = std::max<int64_t>(1, kChunkValues / s.cols / step) * step;
        for (int64_t begin = 0; begin < s.rows; begin += rows) {
            const int64_t count = std::min(rows, s.rows - begin);
            values_.resize(static_cast<size_t>(count * s.cols));
            for (int64_t r = 0; r < count; ++r) dequantize_row(s, begin + r, values_.data() + r * s.cols);
            f(begin, count);
            const auto* data = static_cast<const std::byte*>(s.data) + dtype_bytes(s.dtype, begin * s.cols);
            if (last_pass) release_pages(data, static_cast<uint64_t>(dtype_bytes(s.dtype, count * s.cols)));
        }
    }

    float checked(const Module& m, float amax) const {
        if (!std::isfinite(amax)) FAIL(model, "{}: a weight is NaN or infinite; the file is damaged", m.name);
        if (amax >= kLargestAmax)
            FAIL(model, "{}: a weight of {:.3g}, expected less than {}; the file is damaged", m.name, amax,
                 kLargestAmax);
        return amax;
    }

    float amax_of(const Module& m) {
        float amax = 0;
        for_chunks(m, 1, false, [&](int64_t, int64_t) {
            const float here = largest_magnitude(values_);
            amax = std::isnan(here) ? here : std::max(amax, here);
            checked(m, amax);
        });
        return amax;
    }

    void nvfp4_group() {
        float amax = 0;
        for (const uint32_t m : unit_.modules) amax = std::max(amax, amax_of(index_.modules()[m]));
        if (amax > 0) amax = std::max(amax, kSmallestAmax);
        const bool ct = plan_.format == CheckpointFormat::compressed_tensors;
        const auto global = Nvfp4Global::of(amax, ct ? GlobalForm::divisor : GlobalForm::multiplier);
        for (size_t i = 0; i < unit_.modules.size(); ++i) {
            const Module& m = index_.modules()[unit_.modules[i]];
            const OutTensor* out = &unit_.out[3 * i];
            for_chunks(m, 1, true, [&](int64_t row, int64_t) {
                codes_.resize(values_.size() / 2);
                scales_.resize(values_.size() / nvfp4::kBlock);
                encode_nvfp4(values_, global, plan_.scales, codes_.data(), scales_.data());
                sink_(out[0], static_cast<uint64_t>(row * m.segment.cols / 2), codes_.data(), codes_.size());
                sink_(out[1], static_cast<uint64_t>(row * m.segment.cols / nvfp4::kBlock), scales_.data(),
                      scales_.size());
            });
            sink_(out[2], 0, &global.stored, sizeof global.stored);
        }
    }

    void fp8_tensor(const Module& m) {
        const float scale = fp8_scale(amax_of(m));
        for_chunks(m, 1, true, [&](int64_t row, int64_t) {
            codes_.resize(values_.size());
            encode_fp8(values_, scale, codes_.data());
            sink_(unit_.out[0], static_cast<uint64_t>(row * m.segment.cols), codes_.data(), codes_.size());
        });
        sink_(unit_.out[1], 0, &scale, sizeof scale);
    }

    void fp8_rows(const Module& m) {
        const auto cols = static_cast<size_t>(m.segment.cols);
        for_chunks(m, 1, true, [&](int64_t row, int64_t count) {
            codes_.resize(values_.size());
            bf16_.clear();
            for (size_t r = 0; r < static_cast<size_t>(count); ++r) {
                const std::span<const float> values(values_.data() + r * cols, cols);
                encode_fp8(values, bf16_scale(m, largest_magnitude(values)), codes_.data() + r * cols);
            }
            sink_(unit_.out[0], static_cast<uint64_t>(row * m.segment.cols), codes_.data(), codes_.size());
            sink_(unit_.out[1], static_cast<uint64_t>(2 * row), bf16_.data(), 2 * bf16_.size());
        });
    }

    void fp8_blocks(const Module& m) {
        const int64_t cols = m.segment.cols, across = (cols + kFp8Block - 1) / kFp8Block;
        for_chunks(m, kFp8Block, true, [&](int64_t row, int64_t count) {
            codes_.resize(values_.size());
            bf16_.clear();
            for (int64_t r = 0; r < count; r += kFp8Block)
                for (int64_t c = 0; c < cols; c += kFp8Block)
                    fp8_block(m, r, std::min(r + kFp8Block, count), c, std::min(c + kFp8Block, cols));
            sink_(unit_.out[0], static_cast<uint64_t>(row * cols), codes_.data(), codes_.size());
            sink_(unit_.out[1], static_cast<uint64_t>(2 * (row / kFp8Block) * across), bf16_.data(),
                  2 * bf16_.size());
        });
    }

    void fp8_block(const Module& m, int64_t row, int64_t row_end, int64_t col, int64_t col_end) {
        const auto part = [&](int64_t r) {
            return std::span<const float>(values_.data() + r * m.segment.cols + col,
                                          static_cast<size_t>(col_end - col));
        };
        float amax = 0;
        for (int64_t r = row; r < row_end; ++r) amax = std::max(amax, checked(m, largest_magnitude(part(r))));
        const float scale = bf16_scale(m, amax);
        for (int64_t r = row; r < row_end; ++r)
            encode_fp8(part(r), scale, codes_.data() + r * m.segment.cols + col);
    }

    /// The scale as it will be read.
    float bf16_scale(const Module& m, float amax) {
        bf16_.push_back(float_to_bf16(fp8_scale(checked(m, amax))));
        return bf16_to_float(bf16_.back());
    }

    const ModuleIndex& index_;
    const WritePlan& plan_;
    const WriteUnit& unit_;
    const ByteSink& sink_;
    std::vector<float> values_;
    std::vector<uint8_t> codes_, scales_;
    std::vector<uint16_t> bf16_;
};

}  // namespace

void encode_unit(const Checkpoint& checkpoint, const ModuleIndex& index, const WritePlan& plan,
                 const WriteUnit& unit, const ByteSink& sink) {
    switch (unit.kind) {
        case WriteUnit::Kind::quantize:
            return UnitEncoder(index, plan, unit, sink).run();
        case WriteUnit::Kind::scalar:
            return sink(unit.out[0], 0, &unit.value, sizeof unit.value);
        case WriteUnit::Kind::copy:
            break;
    }
    const SafeTensor& from = *checkpoint.tensors()[unit.source].tensor;
    const std::byte* data = from.data + unit.source_begin;
    for (uint64_t at = 0; at < unit.bytes(); at += kCopyBytes) {
        const size_t bytes = std::min<uint64_t>(kCopyBytes, unit.bytes() - at);
        sink(unit.out[0], at, data + at, bytes);
        release_pages(data + at, bytes);
    }
}

}  // namespace quern
