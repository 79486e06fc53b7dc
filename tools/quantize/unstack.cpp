#include "tools/quantize/unstack.h"

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"
#include "models/scale_rules.h"
#include "tools/quantize/output_form.h"

namespace quern {
namespace {

class Unstacker {
  public:
    Unstacker(const Checkpoint& checkpoint, const Module& module, CheckpointFormat format,
              const ScaleConversion& convert)
        : checkpoint_(checkpoint), m_(module), format_(format), convert_(convert) {}

    std::vector<WriteUnit> units() {
        add_values(m_.tensors[0]);
        for (size_t i = 1; i < m_.tensors.size(); ++i) add_other(m_.tensors[i]);
        return std::move(units_);
    }

  private:
    const SafeTensor& tensor(uint32_t t) const { return *checkpoint_.tensors()[t].tensor; }
    bool nvfp4() const { return m_.segment.scale_kind == ScaleKind::nvfp4; }
    bool ct() const { return format_ == CheckpointFormat::compressed_tensors; }
    /// The module's first row in its tensors.
    int64_t row() const { return m_.stack.index * m_.stack.rows + m_.stack.first; }

    void add_copy(uint32_t source, uint64_t begin, OutTensor out) {
        WriteUnit unit;
        unit.source = source;
        unit.source_begin = begin;
        unit.out.push_back(std::move(out));
        units_.push_back(std::move(unit));
    }

    void add_scalar(std::string name, float value) {
        WriteUnit unit;
        unit.kind = WriteUnit::Kind::scalar;
        unit.value = value;
        unit.out.push_back({std::move(name), SafeDType::F32, scalar_shape(format_)});
        units_.push_back(std::move(unit));
    }

    void add_values(uint32_t t) {
        const int64_t n = m_.segment.rows, k = m_.segment.cols, bytes = nvfp4() ? k / 2 : k;
        add_copy(
            t, static_cast<uint64_t>(row() * bytes),
            {m_.in_file + (nvfp4() && ct() ? ".weight_packed" : ".weight"), tensor(t).dtype, {n, bytes}});
    }

    void add_other(uint32_t t) {
        const std::string_view name = tensor(t).name;
        if (name.ends_with("activation_scale")) return add_scalar(m_.in_file + ".input_scale", number(t));
        if (nvfp4()) {
            for (const ScalarName& s : kScalarNames)
                for (const std::string_view suffix : {s.divisor, s.multiplier})
                    if (name.ends_with(suffix)) return add_global(t, s, suffix == s.divisor);
            return add_copy(t, static_cast<uint64_t>(row() * (m_.segment.cols / nvfp4::kBlock)),
                            {m_.in_file + ".weight_scale",
                             SafeDType::F8_E4M3,
                             {m_.segment.rows, m_.segment.cols / nvfp4::kBlock}});
        }
        if (name.ends_with(".input_scale")) return add_scalar(m_.in_file + ".input_scale", number(t));
        add_fp8_scales(t);
    }

    void add_global(uint32_t t, const ScalarName& name, bool divisor) {
        const std::string mine = m_.in_file + std::string(divisor ? name.divisor : name.multiplier),
                          wanted = m_.in_file + std::string(ct() ? name.divisor : name.multiplier);
        add_scalar(wanted, mine == wanted ? number(t) : convert_(number(t), mine, wanted));
    }

    void add_fp8_scales(uint32_t t) {
        const StackPlace& at = m_.stack;
        const int64_t k = m_.segment.cols;
        const auto scales = fp8_scales(tensor(t), at.count, at.rows, k);
        CHECK(scales.has_value(), "[unstack] {}: scales of another shape", m_.name);
        int64_t first = at.index * scales->each;
        if (scales->kind == ScaleKind::per_row) first += at.first;
        if (scales->kind == ScaleKind::block128) first += at.first / 128 * ((k + 127) / 128);
        const auto size = static_cast<uint64_t>(safe_dtype_bits(tensor(t).dtype) / 8);
        add_copy(t, static_cast<uint64_t>(first) * size,
                 {m_.in_file + ".weight_scale", tensor(t).dtype,
                  fp8_scale_shape(storage_of(m_.segment), m_.segment.rows, k, format_)});
    }

    /// The matrix's own one of the numbers in the tensor, or that of all.
    float number(uint32_t t) const {
        const SafeTensor& from = tensor(t);
        if (DType dtype;
            !plain_dtype(from.dtype, dtype) || (from.elements() != 1 && from.elements() != m_.stack.count))
            FAIL(model, "{}: expected one value, or {}, in F32, BF16 or F16, found {}", checkpoint_.where(t),
                 m_.stack.count, describe(from));
        std::vector<float> all(static_cast<size_t>(from.elements()));
        to_floats(from, all.data());
        return all[all.size() == 1 ? 0 : static_cast<size_t>(m_.stack.index)];
    }

    const Checkpoint& checkpoint_;
    const Module& m_;
    const CheckpointFormat format_;
    const ScaleConversion& convert_;
    std::vector<WriteUnit> units_;
};

}  // namespace

std::vector<WriteUnit> unstack(const Checkpoint& checkpoint, const Module& module, CheckpointFormat format,
                               const ScaleConversion& convert) {
    return Unstacker(checkpoint, module, format, convert).units();
}

}  // namespace quern
