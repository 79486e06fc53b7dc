#include "tools/quantize/write_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "ggml-like/nvfp4.h"
#include "models/scale_rules.h"
#include "tools/quantize/output_form.h"
#include "tools/quantize/unstack.h"

namespace quern {
namespace {

constexpr const char* kMetadataPrefix = "quern:";

bool ends(std::string_view text, std::string_view end) { return text.ends_with(end); }

class Planner {
  public:
    Planner(const Checkpoint& checkpoint, const ModuleIndex& index, const Recipe* recipe,
            CheckpointFormat format)
        : c_(checkpoint), index_(index), recipe_(recipe) {
        plan_.format = format;
        plan_.scales = recipe == nullptr ? ScaleChoice::mse : recipe->scales;
        for (const SafetensorsFile& f : c_.shards())
            for (const auto& [key, value] : f.metadata()) kept_.emplace(key, value);
    }

    WritePlan plan(uint64_t shard_bytes) {
        choose();
        check_fused();
        note_engines();
        for (uint32_t t = 0; t < c_.tensors().size(); ++t) add_tensor(t);
        if (plan_.quantized == 0 && renamed_ == 0)
            FAIL(usage, "{}: nothing to write: {}", c_.files().directory,
                 recipe_ == nullptr
                     ? fmt::format("no matrix of it is in another format than {}", format_name(plan_.format))
                     : fmt::format("no matrix changes by recipe {}", recipe_->name));
        make_shards(shard_bytes);
        return std::move(plan_);
    }

  private:
    const SafeTensor& tensor(uint32_t t) const { return *c_.tensors()[t].tensor; }

    /// What becomes of every module.
    void choose() {
        for (const Module& m : index_.modules()) {
            const WeightStorage now = storage_of(m.segment);
            WeightStorage wanted = recipe_ == nullptr ? WeightStorage::keep : recipe_->storage_of(m);
            if (wanted == WeightStorage::nvfp4 && now == WeightStorage::keep &&
                m.segment.cols % nvfp4::kBlock != 0) {
                plan_.notes.push_back(
                    fmt::format("{}: {} columns are no multiple of 16: kept", m.name, m.segment.cols));
                wanted = WeightStorage::keep;
            }
            if (wanted != WeightStorage::keep && now != WeightStorage::keep && wanted != now)
                FAIL(usage, "{}: it is {} already, and the recipe asks for {}: start from the BF16 original",
                     m.name, storage_name(now), storage_name(wanted));
            const bool change = wanted != now && wanted != WeightStorage::keep;
            check_activations(m, change ? wanted : now);
            plan_.stored.push_back(change ? wanted : now);
            change_.push_back(change);
            plan_.quantized += change;
            if (change) changed_[m.group].push_back(static_cast<uint32_t>(plan_.stored.size() - 1));
        }
    }

    /// ModelOpt's FP8 quantizes activations by a scale from calibration; readers take anything for a missing
    /// one.
    void check_activations(const Module& m, WeightStorage storage) const {
        if (storage != WeightStorage::fp8_tensor || plan_.format != CheckpointFormat::modelopt) return;
        for (const uint32_t t : m.tensors)
            if (ends(tensor(t).name, ".input_scale") || ends(tensor(t).name, "activation_scale")) return;
        FAIL(usage,
             "{}: ModelOpt's format needs an input_scale beside an FP8 matrix with one scale, found none; "
             "take fp8 or fp8-block in the recipe, or --format compressed-tensors",
             m.name);
    }

    /// Engines that fuse matrices, or the experts of a layer, read one format for all of them.
    void check_fused() const {
        std::map<std::string, uint32_t> first;
        for (uint32_t i = 0; i < index_.modules().size(); ++i) {
            const Module& m = index_.modules()[i];
            const bool expert = m.role == ModuleRole::experts;
            const std::string set = expert ? m.name.substr(0, m.name.rfind(".experts.")) : m.group;
            const uint32_t other = first.emplace(set, i).first->second;
            if (plan_.stored[other] != plan_.stored[i] && recipe_ != nullptr)
                FAIL(usage,
                     "{} would be {}, {} would be {}: other engines fuse them, so they need one format",
                     index_.modules()[other].name, storage_name(plan_.stored[other]), m.name,
                     storage_name(plan_.stored[i]));
        }
    }

    /// What scripts/verify_engines.py found that they cannot read.
    void note_engines() {
        bool fp8 = false;
        for (uint32_t i = 0; i < index_.modules().size(); ++i) {
            const WeightStorage s = plan_.stored[i];
            fp8 |= s == WeightStorage::fp8 || s == WeightStorage::fp8_block;
            if (index_.modules()[i].role == ModuleRole::head && s == WeightStorage::fp8_block)
                plan_.notes.push_back("lm_head in FP8 blocks: vLLM and SGLang do not read it; fp8 they do");
        }
        if (fp8 && plan_.format == CheckpointFormat::modelopt)
            plan_.notes.push_back(
                "FP8 in rows or blocks in ModelOpt's format: vLLM reads it, SGLang does not");
    }

    void add_tensor(uint32_t t) {
        if (done_.contains(t)) return;
        const std::vector<uint32_t>& modules = index_.of_tensor(t);
        if (modules.empty()) return plan_kept(t);
        const Module& first = index_.modules()[modules[0]];
        if (first.stack.count > 0 && storage_of(first.segment) != WeightStorage::keep)
            return plan_unstacked(modules);
        if (!change_[modules[0]]) return plan_kept(t);
        for (const uint32_t m : modules) {
            if (planned_.contains(m)) continue;
            const std::vector<uint32_t> alone = {m};
            const bool shared = plan_.stored[m] == WeightStorage::nvfp4;
            plan_quantized(shared ? changed_[index_.modules()[m].group] : alone);
        }
    }

    void plan_unstacked(const std::vector<uint32_t>& modules) {
        for (const uint32_t i : modules) {
            const Module& m = index_.modules()[i];
            done_.insert(m.tensors.begin(), m.tensors.end());
            std::vector<WriteUnit> units = unstack(
                c_, m, plan_.format, [&](float stored, const std::string& name, const std::string& renamed) {
                    ++plan_.converted;
                    return converted(stored, name, renamed);
                });
            std::move(units.begin(), units.end(), std::back_inserter(units_));
            ++renamed_;
        }
    }

    void plan_quantized(const std::vector<uint32_t>& modules) {
        WriteUnit unit;
        unit.kind = WriteUnit::Kind::quantize;
        unit.storage = plan_.stored[modules[0]];
        for (const uint32_t i : modules) {
            const Module& m = index_.modules()[i];
            planned_.insert(i);
            done_.insert(m.tensors.begin(), m.tensors.end());
            unit.modules.push_back(i);
            add_outputs(m, unit);
        }
        units_.push_back(std::move(unit));
    }

    void add_outputs(const Module& m, WriteUnit& unit) const {
        const int64_t n = m.segment.rows, k = m.segment.cols;
        const auto add = [&](const char* suffix, SafeDType dtype, std::vector<int64_t> shape) {
            unit.out.push_back({m.in_file + suffix, dtype, std::move(shape)});
        };
        const bool ct = plan_.format == CheckpointFormat::compressed_tensors;
        if (unit.storage == WeightStorage::keep) FAIL(runtime, "[write_plan] {} is not quantized", m.name);
        if (unit.storage == WeightStorage::nvfp4) {
            add(ct ? ".weight_packed" : ".weight", SafeDType::U8, {n, k / 2});
            add(".weight_scale", SafeDType::F8_E4M3, {n, k / nvfp4::kBlock});
            add(ct ? ".weight_global_scale" : ".weight_scale_2", SafeDType::F32, scalar_shape(plan_.format));
            return;
        }
        add(".weight", SafeDType::F8_E4M3, {n, k});
        add(".weight_scale", unit.storage == WeightStorage::fp8_tensor ? SafeDType::F32 : SafeDType::BF16,
            fp8_scale_shape(unit.storage, n, k, plan_.format));
    }

    /// A tensor whose values stay: copied, or renamed and inverted by the format of NVFP4.
    void plan_kept(uint32_t t) {
        const std::vector<uint32_t>& modules = index_.of_tensor(t);
        OutTensor out{
            std::string(tensor(t).name), tensor(t).dtype, {tensor(t).dims().begin(), tensor(t).dims().end()}};
        out.other_dtype = tensor(t).other_dtype;
        out.other_bytes = tensor(t).bytes();
        const OutTensor before = out;
        if (!modules.empty()) {
            const WeightSegment& segment = index_.modules()[modules[0]].segment;
            if (segment.scale_kind == ScaleKind::nvfp4) {
                if (plan_scalar(t)) return;
                out.name = other_name(out.name);
            } else if (is_fp8(segment.scale_kind)) {
                shape_fp8_scale(segment, out);
            }
        }
        renamed_ += out.name != before.name || out.shape != before.shape;
        WriteUnit unit;
        unit.source = t;
        unit.out.push_back(std::move(out));
        units_.push_back(std::move(unit));
    }

    void shape_fp8_scale(const WeightSegment& segment, OutTensor& out) const {
        if (ends(out.name, ".weight_scale_inv")) out.name.resize(out.name.size() - 4);
        if (ends(out.name, ".weight_scale"))
            out.shape = fp8_scale_shape(storage_of(segment), segment.rows, segment.cols, plan_.format);
        else if (ends(out.name, ".input_scale"))
            out.shape = fp8_scale_shape(WeightStorage::fp8_tensor, 1, 1, plan_.format);
    }

    std::string other_name(std::string name) const {
        const bool ct = plan_.format == CheckpointFormat::compressed_tensors;
        const std::string_view from = ct ? ".weight" : ".weight_packed",
                               to = ct ? ".weight_packed" : ".weight";
        if (!ends(name, from)) return name;
        name.resize(name.size() - from.size());
        return name.append(to);
    }

    /// False if it is no scale in the form of the other format.
    bool plan_scalar(uint32_t t) {
        const bool ct = plan_.format == CheckpointFormat::compressed_tensors;
        const std::string name(tensor(t).name);
        for (const ScalarName& s : kScalarNames) {
            const std::string_view from = ct ? s.multiplier : s.divisor, to = ct ? s.divisor : s.multiplier;
            if (!ends(name, from)) continue;
            if (DType dtype; !plain_dtype(tensor(t).dtype, dtype) || tensor(t).elements() != 1)
                FAIL(model, "{}: expected one value in F32, BF16 or F16, found {}", c_.where(t),
                     describe(tensor(t)));
            const std::string renamed = name.substr(0, name.size() - from.size()).append(to);
            WriteUnit unit;
            unit.kind = WriteUnit::Kind::scalar;
            float stored;
            to_floats(tensor(t), &stored);
            if (!std::isnormal(stored) || stored < 0)
                FAIL(model, "{}: expected a positive number, found {}", c_.where(t), stored);
            unit.value = converted(stored, name, renamed);
            unit.out.push_back({renamed, SafeDType::F32, scalar_shape(plan_.format)});
            units_.push_back(std::move(unit));
            ++plan_.converted;
            ++renamed_;
            return true;
        }
        return false;
    }

    float converted(float stored, const std::string& name, const std::string& renamed) {
        const bool ct = plan_.format == CheckpointFormat::compressed_tensors;
        const GlobalForm to = ct ? GlobalForm::divisor : GlobalForm::multiplier;
        const GlobalForm back = ct ? GlobalForm::multiplier : GlobalForm::divisor;
        if (const std::optional<float> kept = kept_original(renamed);
            kept && inverse_of(*kept, back) == stored)
            return *kept;
        const float value = inverse_of(stored, to);
        plan_.inexact += ct && 1.0f / value != stored;
        if (inverse_of(value, back) != stored) originals_[renamed] = {name, fmt::format("{:a}", stored)};
        return value;
    }

    std::optional<float> kept_original(const std::string& name) const {
        const auto at = kept_.find(kMetadataPrefix + name);
        if (at == kept_.end()) return std::nullopt;
        char* end = nullptr;
        const float value = std::strtof(at->second.c_str(), &end);
        if (*end != '\0' || !std::isnormal(value) || value < 0) return std::nullopt;
        return value;
    }

    void make_shards(uint64_t shard_bytes) {
        uint64_t filled = 0;
        for (WriteUnit& unit : units_) {
            if (plan_.shards.empty() || (filled > 0 && filled + unit.bytes() > shard_bytes)) {
                plan_.shards.emplace_back();
                filled = 0;
            }
            filled += unit.bytes();
            plan_.shards.back().units.push_back(std::move(unit));
        }
        const size_t count = plan_.shards.size();
        for (size_t i = 0; i < count; ++i) {
            plan_.shards[i].name = count == 1 ? "model.safetensors"
                                              : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, count);
            lay_out(plan_.shards[i]);
        }
    }

    /// Larger elements first, as PyTorch needs them: every tensor starts at a multiple of its element size.
    void lay_out(ShardPlan& shard) const {
        std::vector<OutTensor*> order;
        for (WriteUnit& unit : shard.units)
            for (OutTensor& out : unit.out) order.push_back(&out);
        std::stable_sort(order.begin(), order.end(), [](const OutTensor* a, const OutTensor* b) {
            return safe_dtype_bits(a->dtype) > safe_dtype_bits(b->dtype);
        });
        const auto quoted = [](const std::string& text) { return nlohmann::json(text).dump(); };
        std::string json = R"({"__metadata__":{"format":"pt")";
        for (const OutTensor* out : order)
            if (const auto at = originals_.find(out->name); at != originals_.end())
                json += fmt::format(",{}:{}", quoted(kMetadataPrefix + at->second.name),
                                    quoted(at->second.value));
        json += '}';
        uint64_t at = 0;
        for (OutTensor* out : order) {
            json += fmt::format(R"(,{}:{{"dtype":{},"shape":[{}],"data_offsets":[{},{}]}})",
                                quoted(out->name), quoted(std::string(out->dtype_name())),
                                fmt::join(out->shape, ","), at, at + out->bytes());
            out->begin = at;
            at += out->bytes();
        }
        json += '}';
        json.resize((json.size() + 7) / 8 * 8, ' ');
        for (int i = 0; i < 8; ++i)
            shard.header += static_cast<char>(uint64_t{json.size()} >> (8 * i) & 0xff);
        shard.header += json;
        for (OutTensor* out : order) out->begin += shard.header.size();
        shard.bytes = shard.header.size() + at;
    }

    struct Original {
        std::string name, value;
    };

    const Checkpoint& c_;
    const ModuleIndex& index_;
    const Recipe* recipe_;
    WritePlan plan_;
    std::vector<bool> change_;                              // by module
    std::map<std::string, std::vector<uint32_t>> changed_;  // by group
    std::set<uint32_t> done_, planned_;                     // tensors, modules
    std::vector<WriteUnit> units_;
    std::map<std::string, std::string> kept_;    // metadata of the source
    std::map<std::string, Original> originals_;  // by the name of the scale that replaces it
    int64_t renamed_ = 0;
};

}  // namespace

const char* format_name(CheckpointFormat format) {
    return format == CheckpointFormat::modelopt ? "modelopt" : "compressed-tensors";
}

uint64_t OutTensor::bytes() const {
    if (dtype == SafeDType::other) return other_bytes;
    uint64_t bits = static_cast<uint64_t>(safe_dtype_bits(dtype));
    for (const int64_t d : shape) bits *= static_cast<uint64_t>(d);
    return bits / 8;
}

std::string_view OutTensor::dtype_name() const {
    return dtype == SafeDType::other ? other_dtype : safe_dtype_name(dtype);
}

uint64_t WriteUnit::bytes() const {
    uint64_t sum = 0;
    for (const OutTensor& t : out) sum += t.bytes();
    return sum;
}

uint64_t WritePlan::bytes() const {
    uint64_t sum = 0;
    for (const ShardPlan& s : shards) sum += s.bytes;
    return sum;
}

WritePlan plan_write(const Checkpoint& checkpoint, const ModuleIndex& index, const Recipe* recipe,
                     CheckpointFormat format, uint64_t shard_bytes) {
    return Planner(checkpoint, index, recipe, format).plan(shard_bytes);
}

}  // namespace quern
