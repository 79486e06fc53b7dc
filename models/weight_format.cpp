#include "models/weight_format.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"
#include "ggml-like/nvfp4.h"
#include "models/scale_rules.h"

namespace quern {
namespace {

constexpr uint32_t kNone = Checkpoint::kNone;
constexpr int64_t kMaxDim = int64_t{1} << 30;  // products of two cannot overflow

/// How the tensors of a matrix are called.
enum class Naming : uint8_t {
    module,  // P.weight, P.weight_scale, ...
    bare,    // P, P_scale_inv: parameters that no module holds
};

/// One linear module, or several of the same size stacked in its tensors, while it is read.
class LinearReader {
  public:
    LinearReader(const Checkpoint& checkpoint, const std::string& module, int64_t count, int64_t rows,
                 int64_t cols, TensorUse& use, Naming naming = Naming::module)
        : checkpoint_(checkpoint), module_(module), name_(module), use_(use), count_(count), each_(rows) {
        CHECK(count > 0 && rows > 0 && cols > 0 && rows <= kMaxDim / count && cols <= kMaxDim,
              "[read_linear] {}: bad size [{}, {}, {}]", module, count, rows, cols);
        out_.name = module;
        out_.rows = count * rows;
        out_.cols = cols;
        if (naming == Naming::bare) {
            weight_ = find("");
            scale_ = find("_scale");
            scale_inv_ = find("_scale_inv");
            return;
        }
        weight_ = find(".weight");
        packed_ = find(".weight_packed");
        scale_ = find(".weight_scale");
        scale_inv_ = find(".weight_scale_inv");
        scale_2_ = find(".weight_scale_2");
        global_ = find(".weight_global_scale");
    }

    /// All matrices below each other.
    WeightSegment read() {
        if (weight_ != kNone && packed_ != kNone) {
            fail(packed_,
                 "expected one of weight and weight_packed, found both; was a quantized model saved over the "
                 "original one?");
        }
        if (packed_ != kNone) {
            read_nvfp4(packed_, global_, ".weight_global_scale", scale_2_, GlobalForm::divisor);
        } else if (weight_ == kNone) {
            fail_missing();
        } else if (at(weight_).dtype == SafeDType::U8 || at(weight_).dtype == SafeDType::I8) {
            read_nvfp4(weight_, scale_2_, ".weight_scale_2", global_, GlobalForm::multiplier);
        } else if (at(weight_).dtype == SafeDType::F8_E4M3) {
            read_fp8();
        } else {
            read_plain();
        }
        return out_;
    }

    std::vector<WeightSegment> read_each() {
        const WeightSegment all = read();
        std::vector<WeightSegment> each;
        for (int64_t i = 0; i < count_; ++i) {
            const std::string name = fmt::format("{}[{}]", module_, i);
            each.push_back(all.dtype == DType::F8_E4M3 ? fp8_matrix(all, i, name)
                                                       : slice_rows(all, i * each_, each_, name));
            if (globals_.size() > 1) each.back().global_scale = globals_[static_cast<size_t>(i)];
        }
        return each;
    }

  private:
    uint32_t find(std::string_view suffix) const {
        name_.resize(module_.size());
        return checkpoint_.find(name_.append(suffix));
    }
    const SafeTensor& at(uint32_t i) const { return *checkpoint_.tensors()[i].tensor; }
    bool values() const { return use_.mode() == ReadMode::values; }
    /// Whether the tensor has `cols` columns for every row, the matrices below each other or side by side.
    bool has_columns(const SafeTensor& t, int64_t cols) const {
        return t.has_shape({out_.rows, cols}) || (count_ > 1 && t.has_shape({count_, each_, cols}));
    }

    [[noreturn]] void fail(uint32_t tensor, const std::string& message) const {
        FAIL(model, "{}: {}", checkpoint_.where(tensor), message);
    }

    [[noreturn]] void fail_missing() const {
        const char* cause = "is the download complete, and is it this architecture?";
        if (find(".qweight") != kNone)
            cause = "there is a 'qweight': GPTQ and AWQ checkpoints are not read";
        else if (find(".scales") != kNone)
            cause = "there are 'scales': MLX and AWQ checkpoints are not read";
        else if (scale_ != kNone)
            cause = "its weight_scale is there: was the file edited?";
        FAIL(model,
             "{}: tensor '{}.weight' or '{}.weight_packed': expected a matrix [{}, {}], found none; {}",
             checkpoint_.files().directory, module_, module_, out_.rows, out_.cols, cause);
    }

    void expect_absent(uint32_t tensor, const char* beside) const {
        if (tensor == kNone) return;
        fail(tensor, fmt::format("expected no such scale beside {}, found {}; were two exports mixed?",
                                 beside, describe(at(tensor))));
    }

    uint32_t expect_there(uint32_t tensor, const char* suffix, const char* beside) const {
        if (tensor != kNone) return tensor;
        FAIL(model,
             "{}: tensor '{}{}': expected beside {}, found none; is the download complete, or was the export "
             "interrupted?",
             checkpoint_.files().directory, module_, suffix, beside);
    }

    void read_nvfp4(uint32_t codes, uint32_t global, const char* global_suffix, uint32_t other_global,
                    GlobalForm form) {
        const char* beside =
            form == GlobalForm::divisor ? "weight_packed (compressed-tensors)" : "a U8 weight (ModelOpt)";
        const int64_t rows = out_.rows, cols = out_.cols;
        if (at(codes).dtype != SafeDType::U8 || !has_columns(at(codes), cols / 2) ||
            cols % nvfp4::kBlock != 0) {
            fail(codes, explain_codes(at(codes), rows, cols));
        }
        expect_absent(other_global, beside);
        expect_absent(scale_inv_, beside);
        expect_there(scale_, ".weight_scale", beside);
        // Before the global scale is missed: MXFP4 has none.
        const SafeTensor& scale = at(scale_);
        if (scale.dtype != SafeDType::F8_E4M3 || !has_columns(scale, cols / nvfp4::kBlock)) {
            fail(scale_, explain_block_scale(scale, rows, cols));
        }
        expect_there(global, global_suffix, beside);
        out_.dtype = DType::NVFP4;
        out_.scale_kind = ScaleKind::nvfp4;
        out_.data = at(codes).data;
        out_.scale = scale.data;
        read_globals(global, at(codes), form);
        use_.use(codes, "codes");
        use_.use(scale_, "block scales");
        use_.use(global, "global scale");
    }

    /// One global scale for all matrices, or one for each.
    void read_globals(uint32_t global, const SafeTensor& codes, GlobalForm form) {
        const SafeTensor& g = at(global);
        DType dtype = DType::F32;
        const bool for_each = count_ > 1 && g.elements() == count_ && g.rank > 0 && g.shape[0] == count_;
        if (!plain_dtype(g.dtype, dtype) || !(for_each || (g.elements() == 1 && g.rank <= 1))) {
            fail(global, fmt::format("expected one value{} in F32, BF16 or F16, found {}; were the scales of "
                                     "fused modules merged?",
                                     count_ > 1 ? fmt::format(", or {},", count_) : "", describe(g)));
        }
        if (!values()) return;
        globals_.resize(static_cast<size_t>(g.elements()));
        std::vector<float> stored(globals_.size());
        to_floats(g, stored.data());
        const uint64_t bytes = codes.bytes() / globals_.size();
        for (size_t i = 0; i < stored.size(); ++i) {
            const std::string problem =
                read_global_scale(stored[i], {codes.data + i * bytes, bytes}, form, globals_[i]);
            if (!problem.empty()) fail(global, problem);
        }
        out_.global_scale = globals_[0];
    }

    void read_fp8() {
        const SafeTensor& w = at(weight_);
        if (!has_columns(w, out_.cols)) fail(weight_, explain_shape(w, std::array{out_.rows, out_.cols}));
        expect_absent(scale_2_, "an F8_E4M3 weight");
        expect_absent(global_, "an F8_E4M3 weight");
        if (scale_ != kNone && scale_inv_ != kNone) expect_absent(scale_inv_, "weight_scale");
        const uint32_t scale_index =
            expect_there(scale_ != kNone ? scale_ : scale_inv_, ".weight_scale", "an F8_E4M3 weight");
        const SafeTensor& scale = at(scale_index);
        const std::optional<Fp8Scales> scales = fp8_scales(scale, count_, each_, out_.cols);
        if (DType dtype; !plain_dtype(scale.dtype, dtype) || !scales)
            fail(scale_index, (count_ > 1 ? fmt::format("of each of {} matrices: ", count_) : "") +
                                  explain_fp8_scale(scale, each_, out_.cols));
        fp8_each_ = scales->each;
        out_.scale_kind = scales->kind;
        out_.dtype = DType::F8_E4M3;
        out_.data = w.data;
        if (values()) {
            const auto count = static_cast<size_t>(scale.elements());
            float* floats = use_.new_floats(count);
            to_floats(scale, floats);
            fp8_scales_ = {floats, count};
            if (const std::string problem = check_scales_of_each(); !problem.empty())
                fail(scale_index, problem);
            if (count_ == 1) out_ = fp8_matrix(out_, 0, module_);
        }
        use_.use(weight_, "values");
        use_.use(scale_index, "scales");
    }

    /// One of the matrices, with its own scales.
    WeightSegment fp8_matrix(const WeightSegment& all, int64_t i, const std::string& name) const {
        WeightSegment one = all;
        one.name = name;
        one.rows = each_;
        one.data = static_cast<const std::byte*>(all.data) + i * each_ * all.cols;
        if (fp8_scales_.empty()) return one;
        const float* scales = fp8_scales_.data() + i * fp8_each_;
        if (one.scale_kind == ScaleKind::per_tensor)
            one.global_scale = *scales;
        else
            one.scale = scales;
        return one;
    }

    std::string check_scales_of_each() const {
        const int64_t different = fp8_each_ == 0 ? 1 : count_;
        for (int64_t i = 0; i < different; ++i) {
            WeightSegment one = fp8_matrix(out_, i, module_);
            if (fp8_each_ == 0) one.rows = out_.rows;
            const auto each = fp8_scales_.size() / static_cast<size_t>(different);
            std::string problem =
                check_fp8_scales(one, fp8_scales_.subspan(static_cast<size_t>(i) * each, each));
            if (!problem.empty()) return count_ == 1 ? problem : fmt::format("matrix {}: {}", i, problem);
        }
        return "";
    }

    void read_plain() {
        const SafeTensor& w = at(weight_);
        if (!plain_dtype(w.dtype, out_.dtype)) {
            fail(weight_,
                 fmt::format("expected BF16, F16, F32, F8_E4M3 or U8 (NVFP4), found {}{}", describe(w),
                             w.dtype == SafeDType::F8_E5M2 ? "; E5M2 is no weight format" : ""));
        }
        if (!has_columns(w, out_.cols)) fail(weight_, explain_shape(w, std::array{out_.rows, out_.cols}));
        for (const uint32_t leftover : {scale_, scale_inv_, scale_2_, global_}) {
            if (leftover == kNone) continue;
            fail(leftover,
                 fmt::format("a scale beside a {} weight, which needs none; was the weight dequantized "
                             "without removing its scales, or cast by accident?",
                             safe_dtype_name(w.dtype)));
        }
        out_.scale_kind = ScaleKind::none;
        out_.data = w.data;
        use_.use(weight_, "values");
    }

    const Checkpoint& checkpoint_;
    const std::string& module_;
    mutable std::string name_;  // of the tensor that is looked for
    TensorUse& use_;
    const int64_t count_, each_;  // matrices, and rows of each
    WeightSegment out_;
    std::vector<float> globals_;         // NVFP4, ReadMode::values: one, or one a matrix
    std::span<const float> fp8_scales_;  // FP8, ReadMode::values: of all matrices
    int64_t fp8_each_ = 0;               // of these, how many a matrix has; 0: all have the same one
    uint32_t weight_, packed_ = kNone, scale_, scale_inv_, scale_2_ = kNone, global_ = kNone;
};

uint32_t require_tensor(const Checkpoint& checkpoint, const std::string& name,
                        std::span<const int64_t> shape) {
    const uint32_t i = checkpoint.find(name);
    if (i != kNone) return i;
    FAIL(model,
         "{}: tensor '{}': expected {}, found none; is the download complete, and is it this architecture?",
         checkpoint.files().directory, name, shape_text(shape));
}

const SafeTensor& require_plain(const Checkpoint& checkpoint, uint32_t i, std::span<const int64_t> shape,
                                DType& dtype) {
    const SafeTensor& t = *checkpoint.tensors()[i].tensor;
    if (!plain_dtype(t.dtype, dtype)) {
        FAIL(model, "{}: expected BF16, F16 or F32, found {}{}", checkpoint.where(i), describe(t),
             t.rank == 3 ? "; in a tensor without a module's name, matrices are stacked unquantized only"
                         : "");
    }
    if (!std::equal(t.dims().begin(), t.dims().end(), shape.begin(), shape.end())) {
        FAIL(model, "{}: {}", checkpoint.where(i), explain_shape(t, shape));
    }
    return t;
}

}  // namespace

bool has_linear(const Checkpoint& checkpoint, const std::string& module) {
    return checkpoint.find(module + ".weight") != kNone ||
           checkpoint.find(module + ".weight_packed") != kNone;
}

WeightSegment read_linear(const Checkpoint& checkpoint, const std::string& module, int64_t rows, int64_t cols,
                          TensorUse& use) {
    return LinearReader(checkpoint, module, 1, rows, cols, use).read();
}

bool has_stacked(const Checkpoint& checkpoint, const std::string& name) {
    return checkpoint.find(name) != kNone || has_linear(checkpoint, name);
}

std::vector<WeightSegment> read_stacked(const Checkpoint& checkpoint, const std::string& name, int64_t count,
                                        int64_t rows, int64_t cols, TensorUse& use) {
    CHECK(count > 0 && rows > 0 && cols > 0, "[read_stacked] {}: bad size [{}, {}, {}]", name, count, rows,
          cols);
    if (has_linear(checkpoint, name))
        return LinearReader(checkpoint, name, count, rows, cols, use).read_each();
    const int64_t shape[] = {count, rows, cols};
    const uint32_t index = require_tensor(checkpoint, name, shape);
    if (checkpoint.tensors()[index].tensor->dtype == SafeDType::F8_E4M3)
        return LinearReader(checkpoint, name, count, rows, cols, use, Naming::bare).read_each();
    DType dtype = DType::BF16;
    const SafeTensor& t = require_plain(checkpoint, index, shape, dtype);
    use.use(index, "values");
    std::vector<WeightSegment> out(static_cast<size_t>(count));
    const uint64_t step = t.bytes() / static_cast<uint64_t>(count);
    for (size_t i = 0; i < out.size(); ++i) {
        out[i].name = fmt::format("{}[{}]", name, i);
        out[i].dtype = dtype;
        out[i].rows = rows;
        out[i].cols = cols;
        out[i].data = t.data + i * step;
    }
    return out;
}

Tensor read_floats(const Checkpoint& checkpoint, const std::string& name,
                   std::initializer_list<int64_t> shape, TensorUse& use) {
    const std::span<const int64_t> dims(shape.begin(), shape.size());
    const uint32_t index = require_tensor(checkpoint, name, dims);
    DType dtype = DType::F32;
    const SafeTensor& t = require_plain(checkpoint, index, dims, dtype);
    use.use(index, "values");
    Tensor out = make_tensor(
        name.size() < sizeof(Tensor::name) ? name : name.substr(name.size() - sizeof(Tensor::name) + 1),
        DType::F32, Place::weight, shape);
    if (use.mode() == ReadMode::headers) return out;
    float* floats = use.new_floats(static_cast<size_t>(t.elements()));
    to_floats(t, floats);
    for (int64_t i = 0; i < t.elements(); ++i) {
        if (!std::isfinite(floats[i])) {
            FAIL(model, "{}: element {} of {} is {}; the file is damaged", checkpoint.where(index), i,
                 describe(t), floats[i]);
        }
    }
    out.data = floats;
    return out;
}

}  // namespace quern
