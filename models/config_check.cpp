#include "models/config_check.h"

#include <algorithm>
#include <cctype>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "ggml-like/json_pull.h"
#include "models/module_list.h"
#include "models/tokenizer.h"

namespace quern {
namespace {

using nlohmann::json;

constexpr int64_t kMaxMatches = 20'000'000;  // of modules with wildcards: a second at most
constexpr size_t kMaxNamed = 3;

const json& member(const json& object, const char* key) {
    static const json null;
    if (!object.is_object()) return null;
    const auto it = object.find(key);
    return it == object.end() ? null : *it;
}

std::string text_of(const json& value) {
    return value.is_string() ? escaped(value.get_ref<const std::string&>()) : std::string();
}

const json& quantization_section(const Checkpoint& c) {
    const json& outer = member(c.config(), "quantization_config");
    return outer.is_object() && !outer.empty()
               ? outer
               : member(member(c.config(), "text_config"), "quantization_config");
}

enum class Stored : uint8_t { plain, nvfp4, fp8 };

struct Module {
    std::string_view official, in_file;
    Stored stored;
};

/// The linear modules of the text model by their values' tensors.
std::vector<Module> text_modules(const Checkpoint& checkpoint) {
    std::vector<Module> modules;
    for (const CheckpointTensor& t : checkpoint.tensors()) {
        if (!t.name.starts_with("model.language_model.") && !t.name.starts_with("lm_head.")) continue;
        const bool packed = t.name.ends_with(".weight_packed");
        if (!packed && !t.name.ends_with(".weight")) continue;
        const SafeDType dtype = t.tensor->dtype;
        Stored stored = Stored::plain;
        if (packed || dtype == SafeDType::U8 || dtype == SafeDType::I8)
            stored = Stored::nvfp4;
        else if (dtype == SafeDType::F8_E4M3)
            stored = Stored::fp8;
        else if (t.tensor->rank != 2 || t.name.ends_with(".mlp.gate.weight") ||
                 t.name.ends_with("embed_tokens.weight"))
            continue;  // norms, convolutions, and what no producer counts among its linear modules
        const size_t end = packed ? 14 : 7;
        const auto cut = [&](std::string_view name) { return name.substr(0, name.size() - end); };
        modules.push_back({cut(t.name), cut(t.tensor->name), stored});
    }
    return modules;
}

/// Counts modules and names the first few.
class Some {
  public:
    void add(std::string_view name) {
        if (++count_ <= kMaxNamed) names_.append(names_.empty() ? "" : ", ").append(escaped(name));
    }
    explicit operator bool() const { return count_ > 0; }
    std::string text() const {
        return fmt::format("{} module{} ({}{})", count_, count_ == 1 ? "" : "s", names_,
                           count_ > kMaxNamed ? ", ..." : "");
    }

  private:
    size_t count_ = 0;
    std::string names_;
};

class Check {
  public:
    Check(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, Audit& audit)
        : c_(checkpoint), config_(config), audit_(audit), quantization_(quantization_section(checkpoint)) {}

    void all() {
        layer_types();
        const std::vector<Module> modules = text_modules(c_);
        declared_format(modules);
        ignore_lists(modules);
        activations();
        token_ids();
    }

  private:
    template <typename... Args>
    void note(fmt::format_string<Args...> format, Args&&... args) {
        audit_.notes.push_back("config: " + fmt::format(format, std::forward<Args>(args)...));
    }

    void layer_types() {
        for (int64_t i = 0; i < config_.layers; ++i) {
            const std::string prefix = fmt::format("model.language_model.layers.{}.", i);
            const bool full = config_.full_attention[static_cast<size_t>(i)];
            const bool has_attention = c_.find(prefix + "self_attn.q_norm.weight") != Checkpoint::kNone;
            const bool has_delta = c_.find(prefix + "linear_attn.A_log") != Checkpoint::kNone;
            if (full ? has_attention || !has_delta : has_delta || !has_attention) continue;
            audit_.problems.push_back(fmt::format(
                "{}: layer_types makes layer {} {}, expected tensors of {}, found those of {}; does "
                "config.json belong to these weights?",
                c_.files().config, i, full ? "full_attention" : "linear_attention",
                full ? "self_attn" : "linear_attn", full ? "linear_attn" : "self_attn"));
        }
    }

    void declared_format(const std::vector<Module>& modules) {
        int64_t nvfp4 = 0, fp8 = 0;
        for (const Module& m : modules) {
            nvfp4 += m.stored == Stored::nvfp4;
            fp8 += m.stored == Stored::fp8;
            if (m.official.ends_with("embed_tokens"))
                note("embed_tokens is stored as {}; producers leave it in BF16: was it quantized afterwards?",
                     m.stored == Stored::nvfp4 ? "NVFP4" : "FP8");
        }
        const QuantInfo& q = c_.quant();
        if (!q.method.empty() && nvfp4 + fp8 == 0)
            note("quantization '{}' is declared, but no matrix of the text model is quantized", q.method);
        if (q.method.empty() && nvfp4 + fp8 > 0)
            note(
                "{} matrices are quantized, but no quantization is declared; other engines will not load "
                "this",
                nvfp4 + fp8);
        if (q.format.find("NVFP4") != std::string::npos && nvfp4 == 0 && fp8 > 0)
            note("'{}' is declared, but only FP8 matrices are stored", q.format);
        const std::string algo = text_of(member(quantization_, "quant_algo")),
                          hf = text_of(member(member(c_.hf_quant_config(), "quantization"), "quant_algo"));
        if (!algo.empty() && !hf.empty() && algo != hf)
            note("config.json says quant_algo '{}', hf_quant_config.json '{}'", algo, hf);
        if (!hf.empty() && q.method == "compressed-tensors")
            note(
                "hf_quant_config.json of ModelOpt lies beside a compressed-tensors config.json; were two "
                "exports mixed?");
    }

    void ignore_lists(const std::vector<Module>& modules) {
        using Syntax = ModuleList::Syntax;
        ModuleList ignored;
        const bool regex = text_of(member(quantization_, "quant_method")) == "compressed-tensors";
        ignored.add(member(quantization_, "ignore"), regex ? Syntax::regex : Syntax::glob);
        ignored.add(member(quantization_, "modules_to_not_convert"), Syntax::glob);
        const json& hf = member(c_.hf_quant_config(), "quantization");
        ignored.add(member(hf, "exclude_modules"), Syntax::glob);
        if (ignored.empty()) return;
        if (static_cast<int64_t>(modules.size() * ignored.wildcards()) > kMaxMatches)
            return note("the ignore list has {} patterns, too many to be checked", ignored.wildcards());
        if (ignored.unread() > 0)
            note("the ignore list has {} expression{} beyond wildcards, not checked", ignored.unread(),
                 ignored.unread() == 1 ? "" : "s");
        Some quantized, plain;
        for (const Module& m : modules) {
            const bool listed = ignored.contains(m.official, m.in_file);
            if (listed && m.stored != Stored::plain) quantized.add(m.in_file);
            if (!listed && m.stored == Stored::plain) plain.add(m.in_file);
        }
        if (quantized)
            note("the ignore list names {} that are stored quantized; the tensors decide", quantized.text());
        if (plain && targets_all_linear(hf) && ignored.unread() == 0)
            note("{} neither quantized nor on the ignore list; the tensors decide", plain.text());
    }

    /// Whether the config says that every linear module is quantized unless it is ignored.
    bool targets_all_linear(const json& hf) const {
        if (!member(hf, "quantized_layers").is_null()) return false;
        const json& groups = member(quantization_, "config_groups");
        if (!groups.is_object()) return true;
        for (const json& group : groups) {
            const json& targets = member(group, "targets");
            if (targets.is_array() && std::find(targets.begin(), targets.end(), "Linear") != targets.end())
                return true;
        }
        return false;
    }

    void activations() {
        const Fingerprint f = fingerprint(c_);
        const int64_t scaled = f.with_input_scale - f.weights_only;
        std::string format =
            c_.quant().format;  // "mixed-precision", "MIXED_PRECISION": each module its own scheme
        std::transform(format.begin(), format.end(), format.begin(),
                       [](unsigned char c) { return std::tolower(c); });
        if (f.with_input_scale > 0 && f.with_input_scale < f.nvfp4_modules && !format.starts_with("mixed"))
            note("{} of {} NVFP4 matrices have an activation scale", f.with_input_scale, f.nvfp4_modules);
        const json& groups = member(quantization_, "config_groups");
        if (!groups.is_object() || f.nvfp4_modules == 0) return;
        bool four_bits = false;
        for (const json& group : groups)
            four_bits |= member(member(group, "input_activations"), "num_bits") == 4;
        if (four_bits && f.with_input_scale == 0)
            note("W4A4 is declared (4-bit input_activations), but no matrix has an activation scale");
        if (!four_bits && scaled > 0)
            note("W4A16 is declared (no 4-bit input_activations), but {} matrices have an activation scale",
                 scaled);
    }

    void token_ids() {
        const json& text = member(c_.config(), "text_config");
        for (const char* key : {"bos_token_id", "pad_token_id", "image_token_id", "video_token_id",
                                "vision_start_token_id", "vision_end_token_id"}) {
            for (const json* level : {&c_.config(), &text}) {
                const json& id = member(*level, key);
                if (id.is_number_integer() &&
                    (id.get<int64_t>() < 0 || id.get<int64_t>() >= config_.vocab_rows))
                    note("{} is {}, but the vocabulary has {} rows", key, id.dump(), config_.vocab_rows);
            }
        }
        const json& eos = member(c_.generation_config(), "eos_token_id");
        const json list = eos.is_array() ? eos : json::array({eos});
        for (const int32_t id : config_.eos_ids)
            if (!eos.is_null() && std::find(list.begin(), list.end(), id) == list.end())
                note(
                    "eos_token_id {} of config.json is not among those of generation_config.json, which "
                    "decide",
                    id);
    }

    const Checkpoint& c_;
    const Qwen36MoeConfig& config_;
    Audit& audit_;
    const json& quantization_;
};

std::string producer_of(const Checkpoint& c, bool divisor, bool multiplier) {
    const QuantInfo& q = c.quant();
    if (!q.producer.empty()) return q.producer;
    if (q.method == "compressed-tensors") {
        const std::string version = text_of(member(quantization_section(c), "version"));
        return fmt::format("llm-compressor (compressed-tensors{}{})", version.empty() ? "" : " ", version);
    }
    if (q.method.starts_with("modelopt")) return "modelopt";
    if (q.method == "fp8") return "FP8 block export";
    if (q.method.ends_with("auto-round")) {
        const std::string version = text_of(member(quantization_section(c), "autoround_version"));
        return "auto-round" + (version.empty() ? "" : " " + version);
    }
    return divisor      ? "llm-compressor, by its tensors"
           : multiplier ? "modelopt, by its tensors"
                        : "not quantized";
}

/// The modules whose weights alone are quantized, where the config gives each module its algorithm. ModelOpt stores
/// activation scales for them all the same.
ModuleList weights_only_modules(const Checkpoint& c) {
    json names = json::array();
    for (const json& section : {member(c.hf_quant_config(), "quantization"), quantization_section(c)}) {
        const json& layers = member(section, "quantized_layers");
        if (!layers.is_object()) continue;
        for (const auto& [name, layer] : layers.items())
            if (text_of(member(layer, "quant_algo")).starts_with("W4A16")) names.push_back(name);
    }
    ModuleList list;
    list.add(names, ModuleList::Syntax::glob);
    return list;
}

}  // namespace

const char* Fingerprint::scheme() const {
    if (nvfp4_modules == 0) return "not NVFP4";
    const int64_t scaled = with_input_scale - weights_only;
    if (scaled == 0) return "W4A16";
    return scaled == nvfp4_modules ? "W4A4" : "W4A4 in part";
}

Fingerprint fingerprint(const Checkpoint& checkpoint) {
    Fingerprint f;
    bool divisor = false, multiplier = false, mtp_shares = false;
    std::vector<bool> has_text(checkpoint.shards().size());
    uint32_t mtp_shard = Checkpoint::kNone;
    std::string input_scale;
    const ModuleList declared_weights_only = weights_only_modules(checkpoint);
    for (const CheckpointTensor& t : checkpoint.tensors()) {
        if (t.name.starts_with("mtp.")) {
            mtp_shard = t.shard;
            continue;
        }
        if (t.name.starts_with("model.visual.")) {
            f.vision = true;
            continue;
        }
        has_text[t.shard] = true;
        if (!t.name.ends_with("_scale") && !t.name.ends_with("_scale_2")) continue;
        const bool by_divisor = t.name.ends_with(".weight_global_scale"),
                   by_multiplier = t.name.ends_with(".weight_scale_2");
        divisor |= by_divisor;
        multiplier |= by_multiplier;
        f.nvfp4_modules += by_divisor || by_multiplier;
        if (!by_divisor && !by_multiplier) continue;
        input_scale.assign(t.name, 0, t.name.rfind('.'));
        input_scale += by_divisor ? ".input_global_scale" : ".input_scale";
        if (checkpoint.find(input_scale) == Checkpoint::kNone) continue;
        ++f.with_input_scale;
        f.weights_only += !declared_weights_only.empty() &&
                          declared_weights_only.contains(t.name.substr(0, t.name.rfind('.')),
                                                         t.tensor->name.substr(0, t.tensor->name.rfind('.')));
    }
    for (const CheckpointTensor& t : checkpoint.tensors())
        mtp_shares |= t.name.starts_with("mtp.") && has_text[t.shard];
    f.producer = producer_of(checkpoint, divisor, multiplier);
    f.mtp = mtp_shard == Checkpoint::kNone ? "absent"
            : mtp_shares                   ? "in the shards of the text model"
                         : "grafted: in " + checkpoint.shard_name(mtp_shard) + ", without text layers";
    return f;
}

void check_config(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, Audit& audit) {
    Check(checkpoint, config, audit).all();
}

void check_token_ids(const Checkpoint& checkpoint, const Tokenizer& tokenizer,
                     const std::vector<int32_t>& eos_ids, Audit& audit) {
    static constexpr std::pair<const char*, const char*> kMarkers[] = {
        {"image_token_id", "<|image_pad|>"},
        {"video_token_id", "<|video_pad|>"},
        {"vision_start_token_id", "<|vision_start|>"},
        {"vision_end_token_id", "<|vision_end|>"}};
    for (const auto& [key, marker] : kMarkers) {
        const json& id = member(checkpoint.config(), key);
        const auto real = tokenizer.find_added(marker);
        if (id.is_number_integer() && real && id != *real)
            audit.notes.push_back(fmt::format("config: {} is {}, but the tokenizer has {} at {}", key,
                                              id.dump(), marker, *real));
    }
    const auto end = tokenizer.find_added("<|im_end|>");
    if (end && std::find(eos_ids.begin(), eos_ids.end(), *end) == eos_ids.end())
        audit.notes.push_back(fmt::format(
            "config: no eos_token_id is <|im_end|> ({}), which ends a chat's turn; quern adds it", *end));
}

}  // namespace quern
