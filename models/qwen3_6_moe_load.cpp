// From checkpoint names to weight fields. Every shape is checked once, here.
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/parallel.h"
#include "models/qwen3_6_moe.h"
#include "models/scale_rules.h"
#include "models/weight_format.h"

namespace quern {
namespace {

class Reader {
  public:
    Reader(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, TensorUse& use)
        : checkpoint_(checkpoint), c_(config), use_(use) {}

    Qwen36MoeWeights read(int threads) {
        Qwen36MoeWeights w;
        w.embedding = Weight("embedding", {matrix(kText + "embed_tokens", c_.vocab_rows, c_.width)});
        w.layers.resize(static_cast<size_t>(c_.layers));
        for_each_parallel(threads, w.layers.size(), [&](size_t i) {
            w.layers[i] = read_layer(fmt::format("{}layers.{}.", kText, i), fmt::format("L{}.", i),
                                     c_.full_attention[i]);
        });
        w.final_norm = shifted_norm(kText + "norm.weight", c_.width);
        read_head(w);
        return w;
    }

    MtpWeights read_mtp(int threads) {
        refuse_other_mtp();
        const int64_t d = c_.width;
        MtpWeights w;
        w.embedding_norm = shifted_norm("mtp.pre_fc_norm_embedding.weight", d);
        w.fc = Weight("mtp.fc", {matrix("mtp.fc", d, 2 * d)});
        w.layers.push_back(read_layer("mtp.layers.0.", "mtp.", true));
        w.norm = shifted_norm("mtp.norm.weight", d);
        w.hidden_norm = shifted_norm("mtp.pre_fc_norm_hidden.weight", d);
        check(w, threads);
        return w;
    }

  private:
    inline static const std::string kText = "model.language_model.";

    WeightSegment matrix(const std::string& module, int64_t rows, int64_t cols) {
        return read_linear(checkpoint_, module, rows, cols, use_);
    }

    Weight stacked(const std::string& name, std::vector<std::pair<std::string, int64_t>> parts,
                   int64_t cols) {
        std::vector<WeightSegment> segments;
        for (const auto& [module, rows] : parts) segments.push_back(matrix(module, rows, cols));
        return Weight(name, std::move(segments));
    }

    /// Norms stored as w - 1, except the one inside the DeltaNet.
    Tensor shifted_norm(const std::string& name, int64_t width) {
        return transformed(name, {width}, [](float w) { return 1.0f + w; });
    }

    template <typename F>
    Tensor transformed(const std::string& name, std::initializer_list<int64_t> shape, F&& f) {
        const Tensor t = read_floats(checkpoint_, name, shape, use_);
        if (t.data != nullptr)
            for (int64_t i = 0; i < t.elements(); ++i) t.as<float>()[i] = f(t.as<float>()[i]);
        return t;
    }

    Tensor vector(const std::string& name, int64_t width) {
        return read_floats(checkpoint_, name, {width}, use_);
    }

    void refuse_other_mtp() const {
        if (!has_linear(checkpoint_, "mtp.fc"))
            FAIL(model, "{}: the checkpoint has no MTP layer; expected 'mtp.fc.weight' and more below 'mtp.'",
                 checkpoint_.files().directory);
        for (const auto& [tensor, what] : {std::pair("mtp.layers.1.input_layernorm.weight", "a second layer"),
                                           std::pair("mtp.embed_tokens.weight", "embeddings of its own")}) {
            const uint32_t i = checkpoint_.find(tensor);
            if (i != Checkpoint::kNone)
                FAIL(model,
                     "{}: an MTP part with {} is not read; expected one layer with the model's embeddings",
                     checkpoint_.where(i), what);
        }
    }

    /// Finds now what placing the weights would refuse.
    void check(const MtpWeights& w, int threads) const {
        const LayerWeights& l = w.layers.front();
        std::vector<const WeightSegment*> segments;
        const auto add = [&](const Weight& weight) {
            for (const WeightSegment& s : weight.segments) segments.push_back(&s);
        };
        for (const Weight* weight : {&w.fc, &l.attention.in_proj, &l.attention.out_proj, &l.moe.router,
                                     &l.moe.shared_gate_up, &l.moe.shared_down, &l.mlp.gate_up, &l.mlp.down})
            add(*weight);
        for (const ExpertWeights* experts : {&l.moe.gate_up, &l.moe.down})
            for (const Weight& expert : experts->expert) add(expert);
        const ScaleCheck result = check_scales(checkpoint_, segments, threads);
        if (!result.problems.empty()) FAIL(model, "{}", result.problems.front());
    }

    LayerWeights read_layer(const std::string& prefix, const std::string& name, bool full_attention) {
        LayerWeights w;
        w.input_norm = shifted_norm(prefix + "input_layernorm.weight", c_.width);
        w.post_norm = shifted_norm(prefix + "post_attention_layernorm.weight", c_.width);
        if (full_attention)
            w.attention = read_attention(prefix + "self_attn.", name + "attn.");
        else
            w.delta = read_delta(prefix + "linear_attn.", name + "gdn.");
        if (c_.dense())
            w.mlp = read_mlp(prefix + "mlp.", name + "mlp.");
        else
            w.moe = read_moe(prefix + "mlp.", name + "moe.");
        return w;
    }

    AttentionWeights read_attention(const std::string& prefix, const std::string& name) {
        const int64_t d = c_.head_dim;
        AttentionWeights w;
        w.in_proj = stacked(name + "in_proj",
                            {{prefix + "q_proj", 2 * c_.heads * d},
                             {prefix + "k_proj", c_.kv_heads * d},
                             {prefix + "v_proj", c_.kv_heads * d}},
                            c_.width);
        w.q_norm = shifted_norm(prefix + "q_norm.weight", d);
        w.k_norm = shifted_norm(prefix + "k_norm.weight", d);
        w.out_proj = stacked(name + "out_proj", {{prefix + "o_proj", c_.width}}, c_.heads * d);
        w.kv_scales = read_kv_scales(prefix);
        return w;
    }

    DeltaWeights read_delta(const std::string& prefix, const std::string& name) {
        const int64_t nv = c_.value_heads;
        DeltaWeights w;
        w.in_proj = stacked(name + "in_proj",
                            {{prefix + "in_proj_qkv", c_.qkv_columns()},
                             {prefix + "in_proj_z", c_.value_columns()},
                             {prefix + "in_proj_a", nv},
                             {prefix + "in_proj_b", nv}},
                            c_.width);
        w.conv =
            read_floats(checkpoint_, prefix + "conv1d.weight", {c_.qkv_columns(), 1, c_.conv_taps}, use_);
        w.conv.rank = 2;  // the middle 1 goes
        w.conv.shape[1] = c_.conv_taps;
        w.conv.stride[1] = 1;
        w.conv.shape[2] = 1;
        w.decay_rate = transformed(prefix + "A_log", {nv}, [](float a) { return -std::exp(a); });
        w.dt_bias = vector(prefix + "dt_bias", nv);
        w.norm = vector(prefix + "norm.weight", c_.value_dim);
        w.out_proj = stacked(name + "out_proj", {{prefix + "out_proj", c_.width}}, c_.value_columns());
        return w;
    }

    MoeWeights read_moe(const std::string& prefix, const std::string& name) {
        const std::string shared = prefix + "shared_expert.";
        MoeWeights w;
        w.router = stacked(name + "router",
                           {{prefix + "gate", c_.experts}, {prefix + "shared_expert_gate", 1}}, c_.width);
        read_experts(prefix + "experts.", name, w);
        w.shared_gate_up = stacked(
            name + "shared_gate_up",
            {{shared + "gate_proj", c_.shared_width}, {shared + "up_proj", c_.shared_width}}, c_.width);
        w.shared_down = stacked(name + "shared_down", {{shared + "down_proj", c_.width}}, c_.shared_width);
        return w;
    }

    MlpWeights read_mlp(const std::string& prefix, const std::string& name) {
        const int64_t m = c_.dense_width;
        MlpWeights w;
        w.gate_up = stacked(name + "gate_up", {{prefix + "gate_proj", m}, {prefix + "up_proj", m}}, c_.width);
        w.down = stacked(name + "down", {{prefix + "down_proj", c_.width}}, m);
        return w;
    }

    /// Experts come as one matrix each, or all in one stacked tensor.
    void read_experts(const std::string& prefix, const std::string& name, MoeWeights& w) {
        const int64_t f = c_.expert_width;
        w.gate_up = {.name = name + "gate_up", .rows = 2 * f, .cols = c_.width, .expert = {}};
        w.down = {.name = name + "down", .rows = c_.width, .cols = f, .expert = {}};
        refuse_foreign_stack(prefix + "gate_up_proj");
        if (has_stacked(checkpoint_, prefix + "gate_up_proj")) return read_stacked_experts(prefix, name, w);
        for (int64_t e = 0; e < c_.experts; ++e) {
            const std::string module = fmt::format("{}{}.", prefix, e), label = expert_label(name, e);
            w.gate_up.expert.push_back(
                stacked(label, {{module + "gate_proj", f}, {module + "up_proj", f}}, c_.width));
            w.down.expert.push_back(stacked(label, {{module + "down_proj", c_.width}}, f));
        }
    }

    static std::string expert_label(const std::string& name, int64_t e) {
        return fmt::format("{}[{}]", name, e);
    }

    void refuse_foreign_stack(const std::string& name) const {
        for (const char* suffix : {"_packed", "_blocks"}) {
            const uint32_t i = checkpoint_.find(name + suffix);
            if (i == Checkpoint::kNone) continue;
            FAIL(model,
                 "{}: experts stacked as {} are not read; expected {}, {}.weight_packed or one module "
                 "for each expert",
                 checkpoint_.where(i),
                 suffix == std::string_view("_blocks") ? "MXFP4 (blocks and scales)"
                                                       : "codes without a module",
                 name, name);
        }
    }

    void read_stacked_experts(const std::string& prefix, const std::string& name, MoeWeights& w) {
        const int64_t f = c_.expert_width;
        const auto gate_up =
            read_stacked(checkpoint_, prefix + "gate_up_proj", c_.experts, 2 * f, c_.width, use_);
        const auto down = read_stacked(checkpoint_, prefix + "down_proj", c_.experts, c_.width, f, use_);
        for (size_t e = 0; e < gate_up.size(); ++e) {
            const WeightSegment& both = gate_up[e];
            const std::string label = expert_label(name, static_cast<int64_t>(e));
            w.gate_up.expert.emplace_back(label, std::vector{slice_rows(both, 0, f, both.name + ".gate"),
                                                             slice_rows(both, f, f, both.name + ".up")});
            w.down.expert.emplace_back(label, std::vector{down[e]});
        }
    }

    /// The scales of a quantized KV cache: compressed-tensors has them beside the projections, ModelOpt in them.
    /// Those that make no sense are left out with a note, like none at all: then scales come from the values.
    KvScales read_kv_scales(const std::string& prefix) {
        const auto first = [&](const char* beside, const char* inside) {
            std::vector<float> scales = read_scales(prefix + beside);
            return scales.empty() ? read_scales(prefix + inside) : scales;
        };
        return {.k = first("k_scale", "k_proj.k_scale"), .v = first("v_scale", "v_proj.v_scale")};
    }

    std::vector<float> read_scales(const std::string& name) {
        const uint32_t i = checkpoint_.find(name);
        if (i == Checkpoint::kNone || use_.mode() == ReadMode::headers) return {};
        const SafeTensor& t = *checkpoint_.tensors()[i].tensor;
        DType dtype;
        if (!plain_dtype(t.dtype, dtype) || (t.elements() != 1 && t.elements() != c_.kv_heads)) {
            use_.note(
                fmt::format("{}: expected one scale, or one for each of {} kv heads, in F32, BF16 or F16, "
                            "found {}; it is left out",
                            checkpoint_.where(i), c_.kv_heads, describe(t)));
            return {};
        }
        std::vector<float> scales(static_cast<size_t>(t.elements()));
        to_floats(t, scales.data());
        for (const float s : scales) {
            if (std::isfinite(s) && s > 0) continue;
            use_.note(fmt::format("{}: expected positive numbers, found {}; it is left out",
                                  checkpoint_.where(i), s));
            return {};
        }
        return scales;
    }

    /// As in the reference, a head of its own is used whatever the config says.
    void read_head(Qwen36MoeWeights& w) {
        if (has_linear(checkpoint_, "lm_head")) {
            w.head = Weight("head", {matrix("lm_head", c_.vocab_rows, c_.width)});
            if (c_.tied_head)
                use_.note(
                    "config: tie_word_embeddings is true, but the checkpoint has an lm_head of its own, "
                    "which is used");
            return;
        }
        if (!c_.tied_head)
            FAIL(model,
                 "{}: the checkpoint has no lm_head.weight, and tie_word_embeddings is not true. A shard may "
                 "be missing",
                 checkpoint_.files().directory);
        w.head = w.embedding;
        w.head.name = "head";
        w.tied_head = true;
    }

    const Checkpoint& checkpoint_;
    const Qwen36MoeConfig& c_;
    TensorUse& use_;
};

}  // namespace

Qwen36MoeWeights read_qwen3_6_moe_weights(const Checkpoint& checkpoint, const Qwen36MoeConfig& config,
                                          TensorUse& use, int threads) {
    return Reader(checkpoint, config, use).read(threads);
}

MtpWeights read_qwen3_6_mtp(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, TensorUse& use,
                            int threads) {
    TensorUse own(checkpoint, use.mode());
    MtpWeights w = Reader(checkpoint, config, own).read_mtp(threads);
    use.adopt(std::move(own));
    return w;
}

}  // namespace quern
