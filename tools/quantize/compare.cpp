#include "tools/quantize/compare.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/parallel.h"
#include "models/scale_rules.h"
#include "models/tensor_names.h"
#include "tools/common/inspection.h"
#include "tools/common/loading.h"

namespace quern {
namespace {

constexpr size_t kWorstBlocks = 3;

/// The relative error of a sound quantization is below these: normal weights have 0.095 in NVFP4, heavy tails
/// less, and 0.026 in FP8. Exchanged matrices, shifted scales and permuted values have 0.2 to 1.4.
double sound_error(const WeightSegment& s) {
    if (s.dtype == DType::NVFP4) return 0.15;
    if (s.dtype == DType::F8_E4M3) return 0.05;
    return 0.005;  // a cast between BF16 and F16
}

class MatrixComparer {
  public:
    MatrixComparer(const WeightSegment& a, const WeightSegment& b)
        : a_(a), b_(b), row_a_(static_cast<size_t>(a.cols)), row_b_(row_a_.size()) {}

    void run(ModuleComparison& out) {
        for (int64_t r = 0; r < a_.rows; ++r) {
            dequantize_row(a_, r, row_a_.data());
            dequantize_row(b_, r, row_b_.data());
            for (int64_t begin = 0; begin < a_.cols; begin += nvfp4::kBlock) add_block(out, r, begin);
        }
        const double rms = std::sqrt(out.error.squared / static_cast<double>(out.error.values));
        for (BlockError& block : out.worst)
            block.error = rms > 0 ? std::sqrt(block.error / nvfp4::kBlock) / rms : 0;
    }

  private:
    void add_block(ModuleComparison& out, int64_t row, int64_t begin) {
        MatrixError e;
        for (int64_t i = begin; i < std::min<int64_t>(begin + nvfp4::kBlock, a_.cols); ++i) {
            const double a = static_cast<double>(row_a_[static_cast<size_t>(i)]);
            const double b = static_cast<double>(row_b_[static_cast<size_t>(i)]);
            const double d = a - b;
            e.squared_error += d * d;
            e.squared += b * b;
            e.other_squared += a * a;
            e.product += a * b;
            e.largest = std::max(e.largest, std::fabs(d));
            e.different += !(a == b);
            ++e.values;
        }
        out.error.add(e);
        keep_worst(out.worst, {row, begin / nvfp4::kBlock, e.squared_error});
    }

    static void keep_worst(std::vector<BlockError>& worst, const BlockError& block) {
        if (block.error == 0 || (worst.size() == kWorstBlocks && block.error <= worst.back().error)) return;
        const auto at = std::find_if(worst.begin(), worst.end(),
                                     [&](const BlockError& w) { return w.error < block.error; });
        worst.insert(at, block);
        if (worst.size() > kWorstBlocks) worst.pop_back();
    }

    const WeightSegment &a_, &b_;
    std::vector<float> row_a_, row_b_;
};

class Comparer {
  public:
    Comparer(const Checkpoint& checkpoint, const Checkpoint& original)
        : a_(checkpoint), b_(original), index_a_(checkpoint), index_b_(original) {}

    Comparison run(int threads) {
        pair_modules();
        compare_modules(threads);
        compare_small();
        std::stable_sort(out_.modules.begin(), out_.modules.end(), [](const auto& x, const auto& y) {
            const double ex = x.error.relative_rms(), ey = y.error.relative_rms();
            return std::isnan(ex) != std::isnan(ey) ? std::isnan(ex) : ex > ey;
        });
        return std::move(out_);
    }

  private:
    static bool optional(const std::string& name) {
        return name.starts_with("mtp.") || name.starts_with("model.visual.");
    }

    void pair_modules() {
        for (const Module& a : index_a_.modules()) {
            const int64_t at = index_b_.find(a.name);
            if (at < 0) {
                missing(a.name, b_);
                continue;
            }
            const Module& b = index_b_.modules()[static_cast<size_t>(at)];
            if (a.segment.rows != b.segment.rows || a.segment.cols != b.segment.cols)
                out_.problems.push_back(fmt::format("{}: [{}, {}], in {} [{}, {}]", a.name, a.segment.rows,
                                                    a.segment.cols, b_.files().directory, b.segment.rows,
                                                    b.segment.cols));
            else
                pairs_.emplace_back(&a, &b);
        }
        for (const Module& b : index_b_.modules())
            if (index_a_.find(b.name) < 0) missing(b.name, a_);
    }

    void missing(const std::string& name, const Checkpoint& from) {
        if (!optional(name))
            out_.problems.push_back(fmt::format("{}: not in {}", name, from.files().directory));
    }

    void compare_modules(int threads) {
        out_.modules.resize(pairs_.size());
        std::vector<size_t> order(pairs_.size());  // largest first: none is left for the end
        std::iota(order.begin(), order.end(), size_t{0});
        const auto bytes = [&](size_t i) {
            return pairs_[i].first->segment.bytes() + pairs_[i].second->segment.bytes();
        };
        std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) { return bytes(x) > bytes(y); });
        ProgressBar bar("comparing");
        LoadProgress progress;
        for (size_t i = 0; i < pairs_.size(); ++i) progress.bytes_total += bytes(i);
        std::mutex mutex;
        for_each_parallel(threads, order.size(), [&](size_t i) {
            compare(order[i]);
            const std::lock_guard lock(mutex);
            progress.bytes_done += bytes(order[i]);
            bar.update(progress);
        });
    }

    void compare(size_t i) {
        const Module &a = *pairs_[i].first, &b = *pairs_[i].second;
        ModuleComparison& m = out_.modules[i];
        m.name = a.name;
        m.role = a.role;
        m.format = format_name(a.segment);
        m.other_format = format_name(b.segment);
        MatrixComparer(a.segment, b.segment).run(m);
        const double error = m.error.relative_rms(), sound = sound_error(a.segment) + sound_error(b.segment);
        if (std::isnan(error))
            m.problem = "a weight is NaN or infinite";
        else if (error > sound)
            m.problem = fmt::format(
                "relative error {:.3g}, expected at most {:.3g} of {} against {}: not the same weights",
                error, sound, m.format, m.other_format);
    }

    /// Norms, convolutions and the like: compared as numbers, all of them.
    void compare_small() {
        for (uint32_t i = 0; i < a_.tensors().size(); ++i) {
            const CheckpointTensor& t = a_.tensors()[i];
            if (!index_a_.of_tensor(i).empty()) continue;
            const uint32_t other = b_.find(t.name);
            if (other == Checkpoint::kNone)
                missing(std::string(t.name), b_);
            else if (index_b_.of_tensor(other).empty())
                compare_small(t, *b_.tensors()[other].tensor);
        }
        for (uint32_t i = 0; i < b_.tensors().size(); ++i)
            if (index_b_.of_tensor(i).empty() && a_.find(b_.tensors()[i].name) == Checkpoint::kNone)
                missing(std::string(b_.tensors()[i].name), a_);
    }

    void compare_small(const CheckpointTensor& t, const SafeTensor& b) {
        const SafeTensor& a = *t.tensor;
        DType dtype;
        const auto say = [&](const std::string& what) {
            out_.problems.push_back(fmt::format("{}: {}", t.name, what));
        };
        if (!std::equal(a.dims().begin(), a.dims().end(), b.dims().begin(), b.dims().end()))
            return say(fmt::format("{}, in the other {}", describe(a), describe(b)));
        bool same = a.dtype == b.dtype && std::equal(a.data, a.data + a.bytes(), b.data);
        if (!same && plain_dtype(a.dtype, dtype) && plain_dtype(b.dtype, dtype)) {
            std::vector<float> x(static_cast<size_t>(a.elements())), y(x.size());
            to_floats(a, x.data());
            to_floats(b, y.data());
            double error = 0, sum = 0;
            for (size_t i = 0; i < x.size(); ++i) {
                error += std::pow(static_cast<double>(x[i]) - static_cast<double>(y[i]), 2);
                sum += std::pow(static_cast<double>(y[i]), 2);
            }
            same = error == 0 || (a.dtype != b.dtype && std::sqrt(error / sum) < 0.005);
            if (!same)
                return say(fmt::format("relative error {:.3g}, expected equal", std::sqrt(error / sum)));
        }
        if (!same) return say("differs");
        ++out_.same_small;
    }

    const Checkpoint &a_, &b_;
    ModuleIndex index_a_, index_b_;
    std::vector<std::pair<const Module*, const Module*>> pairs_;
    Comparison out_;
};

}  // namespace

void MatrixError::add(const MatrixError& more) {
    squared_error += more.squared_error;
    squared += more.squared;
    other_squared += more.other_squared;
    product += more.product;
    largest = std::max(largest, more.largest);
    values += more.values;
    different += more.different;
}

double MatrixError::relative_rms() const {
    return squared_error == 0 ? 0 : std::sqrt(squared_error / squared);
}

double MatrixError::cosine() const {
    if (squared == 0 || other_squared == 0) return squared == other_squared ? 1 : 0;
    return product / std::sqrt(squared * other_squared);
}

bool Comparison::clean() const {
    return problems.empty() &&
           std::all_of(modules.begin(), modules.end(), [](const auto& m) { return m.problem.empty(); });
}

Comparison compare_checkpoints(const Checkpoint& checkpoint, const Checkpoint& original, int threads) {
    const auto start = std::chrono::steady_clock::now();
    Comparison out = Comparer(checkpoint, original).run(threads);
    out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return out;
}

}  // namespace quern
