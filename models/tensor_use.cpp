#include "models/tensor_use.h"

#include <algorithm>
#include <iterator>

#include "ggml-like/check.h"
#include "ggml-like/json_pull.h"

namespace quern {
namespace {

constexpr size_t kMaxListed = 20;

/// Why a tensor that nobody asked for may be there.
const char* guess_cause(std::string_view name) {
    struct Suffix {
        std::string_view end;
        const char* cause;
    };
    static constexpr Suffix kSuffixes[] = {
        {".qweight", "a GPTQ or AWQ checkpoint?"},
        {".qzeros", "a GPTQ or AWQ checkpoint?"},
        {".scales", "a GPTQ, AWQ or MLX checkpoint?"},
        {".biases", "an MLX checkpoint?"},
        {".g_idx", "a GPTQ checkpoint?"},
        {".weight_zero_point", "an asymmetric quantization, which quern does not read"},
        {".weight_shape", "an integer pack-quantized checkpoint?"},
        {".pre_quant_scale", "an AWQ export of ModelOpt, whose activations would have to be scaled"},
        {".bias", "this architecture has no biases in its text layers"},
        {".weight_scale", "a scale without the quantized weight it belongs to"},
        {".weight_scale_inv", "a scale without the quantized weight it belongs to"},
        {".weight_scale_2", "a scale without the quantized weight it belongs to"},
        {".weight_global_scale", "a scale without the quantized weight it belongs to"},
        {".lora_A.weight", "an adapter that was not merged"},
        {".lora_B.weight", "an adapter that was not merged"},
    };
    for (const Suffix& s : kSuffixes) {
        if (name.ends_with(s.end)) return s.cause;
    }
    if (name.find(".experts.") != std::string_view::npos) return "more experts than config.json says?";
    if (name.find(".layers.") != std::string_view::npos)
        return "more layers than config.json says, or another architecture?";
    return "another architecture, or a newer export format?";
}

void add(Audit::Count& count, const SafeTensor& t) {
    ++count.tensors;
    count.bytes += t.bytes();
}

}  // namespace

TensorUse::TensorUse(const Checkpoint& checkpoint, ReadMode mode)
    : checkpoint_(checkpoint), mode_(mode), entries_(checkpoint.tensors().size()) {}

void TensorUse::use(uint32_t tensor, const char* role) {
    Entry& e = entries_.at(tensor);
    if (e.state == State::used) {
        FAIL(model, "{}: read twice, as {} and as {}; two modules claim it", checkpoint_.where(tensor),
             e.role, role);
    }
    e.state = State::used;
    e.role = role;
}

void TensorUse::leave(uint32_t tensor, UnusedReason reason) {
    Entry& e = entries_.at(tensor);
    if (e.state == State::used) return;
    e.state = State::unused;
    e.reason = reason;
}

void TensorUse::adopt(TensorUse&& other) {
    for (uint32_t i = 0; i < entries_.size(); ++i)
        if (other.entries_[i].state == State::used) use(i, other.entries_[i].role);
    const std::lock_guard lock(mutex_);
    std::move(other.notes_.begin(), other.notes_.end(), std::back_inserter(notes_));
    std::move(other.floats_.begin(), other.floats_.end(), std::back_inserter(floats_));
}

void TensorUse::note(std::string text) {
    const std::lock_guard lock(mutex_);
    notes_.push_back(std::move(text));
}

float* TensorUse::new_floats(size_t count) {
    const std::lock_guard lock(mutex_);
    return floats_.emplace_back(std::make_unique<float[]>(count)).get();
}

Audit TensorUse::audit() {
    Audit audit;
    audit.notes = checkpoint_.notes();
    std::sort(notes_.begin(), notes_.end());
    audit.notes.insert(audit.notes.end(), notes_.begin(), notes_.end());
    for (const SafetensorsFile& f : checkpoint_.shards()) {
        audit.header_bytes += f.header_bytes();
        audit.file_bytes += f.file_size();
    }
    for (uint32_t i = 0; i < entries_.size(); ++i) {
        Entry& e = entries_[i];
        const CheckpointTensor& t = checkpoint_.tensors()[i];
        if (e.state == State::unknown && known_unused(t.name, e.reason)) e.state = State::unused;
        switch (e.state) {
            case State::used:
                add(audit.used, *t.tensor);
                break;
            case State::unused:
                add(audit.unused[static_cast<int>(e.reason)], *t.tensor);
                break;
            case State::unknown:
                add(audit.unknown, *t.tensor);
                if (audit.unknown.tensors > kMaxListed) break;
                audit.problems.push_back(fmt::format("{}: {} is not part of this model as quern knows it; {}",
                                                     checkpoint_.where(i), describe(*t.tensor),
                                                     guess_cause(t.name)));
        }
    }
    if (audit.unknown.tensors > kMaxListed) {
        audit.problems.push_back(
            fmt::format("and {} more unknown tensors", audit.unknown.tensors - kMaxListed));
    }
    return audit;
}

std::string Audit::totals() const {
    std::string out;
    const auto line = [&](const Count& c, const char* what) {
        if (c.tensors > 0) out += fmt::format("{:>8} tensors {:>15} bytes  {}\n", c.tensors, c.bytes, what);
    };
    line(used, "used");
    for (int i = 0; i < kUnusedReasons; ++i)
        line(unused[i], unused_reason_text(static_cast<UnusedReason>(i)));
    line(unknown, "UNKNOWN");
    out += fmt::format("{:>16} {:>15} bytes  file headers\n", "", header_bytes);
    out += fmt::format("{:>16} {:>15} bytes  in all\n", "", file_bytes);
    return out;
}

void Audit::require_ok() const {
    if (ok()) return;
    std::string message =
        fmt::format("the checkpoint is not fully understood ({} tensors unknown):", unknown.tensors);
    for (const std::string& p : problems) message += "\n  " + p;
    throw Error(ErrorKind::model, message, __FILE__, __LINE__);
}

}  // namespace quern
