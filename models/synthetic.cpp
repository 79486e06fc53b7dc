#include "models/synthetic.h"

#include <cmath>
#include <random>

#include "ggml-like/check.h"

namespace quern {
namespace {

struct Format {
    DType dtype;
    ScaleKind scale;
};
constexpr Format kBf16{DType::BF16, ScaleKind::none}, kNvfp4{DType::NVFP4, ScaleKind::nvfp4},
    kFp8Blocks{DType::F8_E4M3, ScaleKind::block128}, kFp8{DType::F8_E4M3, ScaleKind::per_tensor};

/// feed_forward: experts, shared experts or dense MLPs. delta_gates: in_proj_a and in_proj_b.
struct Mix {
    const char* name;
    Format attention, delta, delta_gates, feed_forward, head;
};
constexpr Mix kMixes[] = {{"aeon", kNvfp4, kBf16, kBf16, kNvfp4, kBf16},
                          {"fp8-head", kNvfp4, kBf16, kBf16, kNvfp4, kFp8Blocks},
                          {"xs", kNvfp4, kNvfp4, kNvfp4, kNvfp4, kBf16},
                          {"nvidia", kFp8, kFp8, kBf16, kNvfp4, kNvfp4},
                          {"qwen-fp8", kFp8Blocks, kFp8Blocks, kBf16, kFp8Blocks, kBf16}};

const Mix& find_mix(const std::string& name) {
    for (const Mix& mix : kMixes)
        if (name == mix.name) return mix;
    FAIL(usage, "--mix {}: expected aeon, fp8-head, xs, nvidia or qwen-fp8", name);
}

/// The formats of published MTP layers: BF16, or FP8 where all else is.
Mix mtp_mix(const Mix& mix) {
    const bool fp8 = mix.feed_forward.scale == ScaleKind::block128;
    const Format format = fp8 ? kFp8Blocks : kBf16;
    return {mix.name, format, format, kBf16, format, kBf16};
}

class Generator {
  public:
    Generator(const Qwen36MoeConfig& config, const Mix& mix, std::vector<std::unique_ptr<float[]>>& floats)
        : c_(config), mix_(mix), floats_(floats) {}

    Qwen36MoeWeights make() {
        Qwen36MoeWeights w;
        w.embedding = matrix("embedding", {c_.vocab_rows}, c_.width, kBf16);
        for (int64_t i = 0; i < c_.layers; ++i)
            w.layers.push_back(layer(fmt::format("L{}.", i), c_.full_attention[static_cast<size_t>(i)]));
        w.final_norm = vector("final_norm", c_.width, 1.0f, 0.1f);
        w.head = matrix("head", {c_.vocab_rows}, c_.width, mix_.head);
        return w;
    }

    MtpWeights make_mtp() {
        const int64_t d = c_.width;
        MtpWeights w;
        w.embedding_norm = vector("mtp.embedding_norm", d, 1.0f, 0.1f);
        w.fc = matrix("mtp.fc", {d}, 2 * d, kBf16);
        w.layers.push_back(layer("mtp.", true));
        w.norm = vector("mtp.norm", d, 1.0f, 0.1f);
        w.hidden_norm = vector("mtp.hidden_norm", d, 1.0f, 0.1f);
        return w;
    }

    Qwen36VisionWeights make_vision(const Qwen36VisionConfig& v) {
        const int64_t d = v.width, square = v.merge * v.merge * d;
        Qwen36VisionWeights w;
        w.patches = biased("vision.patches", d, 3 * v.frames * v.patch * v.patch);
        w.positions = vector("vision.positions", v.side * v.side * d, 0.0f, 0.3f);
        w.positions.rank = 2;
        w.positions.shape[0] = v.side * v.side, w.positions.shape[1] = d;
        w.positions.stride[0] = d, w.positions.stride[1] = 1;
        for (int64_t i = 0; i < v.blocks; ++i) {
            const std::string name = fmt::format("vision.blocks.{}.", i);
            w.blocks.push_back({.norm1 = layer_norm(name + "norm1", d),
                                .norm2 = layer_norm(name + "norm2", d),
                                .qkv = biased(name + "qkv", 3 * d, d),
                                .proj = biased(name + "proj", d, d),
                                .fc1 = biased(name + "fc1", v.mlp_width, d),
                                .fc2 = biased(name + "fc2", d, v.mlp_width)});
        }
        w.merger_norm = layer_norm("vision.merger_norm", d);
        w.merger_fc1 = biased("vision.merger_fc1", square, square);
        w.merger_fc2 = biased("vision.merger_fc2", v.out_width, square);
        return w;
    }

  private:
    BiasedWeight biased(const std::string& name, int64_t rows, int64_t cols) {
        return {matrix(name, {rows}, cols, kBf16), vector(name + ".bias", rows, 0.0f, 0.1f)};
    }
    LayerNormWeights layer_norm(const std::string& name, int64_t width) {
        return {vector(name + ".weight", width, 1.0f, 0.1f), vector(name + ".bias", width, 0.0f, 0.1f)};
    }

    struct Rows {
        int64_t count;
        Format format;
    };
    static Weight matrix(const std::string& name, const std::vector<Rows>& rows, int64_t cols) {
        std::vector<WeightSegment> segments;
        for (const Rows& r : rows) {
            WeightSegment s;
            s.name = fmt::format("{}.{}", name, segments.size());
            s.dtype = r.format.dtype;
            s.rows = r.count;
            s.cols = cols;
            s.scale_kind = r.format.scale;
            segments.push_back(std::move(s));
        }
        return Weight(name, std::move(segments));
    }
    static Weight matrix(const std::string& name, const std::vector<int64_t>& rows, int64_t cols,
                         Format format) {
        std::vector<Rows> list;
        for (const int64_t r : rows) list.push_back({r, format});
        return matrix(name, list, cols);
    }

    ExpertWeights experts(const std::string& name, const std::vector<int64_t>& rows, int64_t cols) const {
        ExpertWeights e{.name = name, .rows = 0, .cols = cols, .expert = {}};
        for (int64_t i = 0; i < c_.experts; ++i)
            e.expert.push_back(matrix(fmt::format("{}[{}]", name, i), rows, cols, mix_.feed_forward));
        e.rows = e.expert[0].rows;
        return e;
    }

    Tensor vector(const std::string& name, int64_t size, float mean, float deviation) {
        Tensor t = make_tensor(name, DType::F32, Place::weight, {size});
        floats_.push_back(std::make_unique<float[]>(static_cast<size_t>(size)));
        t.data = floats_.back().get();
        std::normal_distribution<float> normal(mean, deviation);
        for (int64_t i = 0; i < size; ++i) t.as<float>()[i] = normal(random_);
        return t;
    }

    LayerWeights layer(const std::string& name, bool full_attention) {
        LayerWeights w;
        w.input_norm = vector(name + "input_norm", c_.width, 1.0f, 0.1f);
        w.post_norm = vector(name + "post_norm", c_.width, 1.0f, 0.1f);
        if (full_attention)
            w.attention = attention(name + "attn.");
        else
            w.delta = delta(name + "gdn.");
        if (c_.dense())
            w.mlp = mlp(name + "mlp.");
        else
            w.moe = moe(name + "moe.");
        return w;
    }

    AttentionWeights attention(const std::string& name) {
        const int64_t d = c_.head_dim;
        return {.in_proj = matrix(name + "in_proj", {2 * c_.heads * d, c_.kv_heads * d, c_.kv_heads * d},
                                  c_.width, mix_.attention),
                .q_norm = vector(name + "q_norm", d, 1.0f, 0.1f),
                .k_norm = vector(name + "k_norm", d, 1.0f, 0.1f),
                .out_proj = matrix(name + "out_proj", {c_.width}, c_.heads * d, mix_.attention)};
    }

    DeltaWeights delta(const std::string& name) {
        const int64_t nv = c_.value_heads;
        DeltaWeights w;
        w.in_proj = matrix(name + "in_proj",
                           std::vector<Rows>{{c_.qkv_columns(), mix_.delta},
                                             {c_.value_columns(), mix_.delta},
                                             {nv, mix_.delta_gates},
                                             {nv, mix_.delta_gates}},
                           c_.width);
        w.conv = vector(name + "conv", c_.qkv_columns() * c_.conv_taps, 0.0f, 0.5f);
        w.conv.rank = 2;
        w.conv.shape[0] = c_.qkv_columns();
        w.conv.shape[1] = c_.conv_taps;
        w.conv.stride[0] = c_.conv_taps;
        w.conv.stride[1] = 1;
        w.decay_rate = vector(name + "decay_rate", nv, -4.0f, 1.0f);
        w.dt_bias = vector(name + "dt_bias", nv, -4.0f, 1.0f);
        w.norm = vector(name + "norm", c_.value_dim, 1.0f, 0.1f);
        w.out_proj = matrix(name + "out_proj", {c_.width}, c_.value_columns(), mix_.delta);
        for (int64_t i = 0; i < nv; ++i) {
            float& rate = w.decay_rate.as<float>()[i];
            rate = -std::fabs(rate) - 0.01f;
        }
        return w;
    }

    MoeWeights moe(const std::string& name) {
        const int64_t f = c_.expert_width, fs = c_.shared_width;
        MoeWeights w;
        w.router = matrix(name + "router", {c_.experts, 1}, c_.width, kBf16);
        w.gate_up = experts(name + "gate_up", {f, f}, c_.width);
        w.down = experts(name + "down", {c_.width}, f);
        w.shared_gate_up = matrix(name + "shared_gate_up", {fs, fs}, c_.width, mix_.feed_forward);
        w.shared_down = matrix(name + "shared_down", {c_.width}, fs, mix_.feed_forward);
        return w;
    }

    MlpWeights mlp(const std::string& name) const {
        return {.gate_up =
                    matrix(name + "gate_up", {c_.dense_width, c_.dense_width}, c_.width, mix_.feed_forward),
                .down = matrix(name + "down", {c_.width}, c_.dense_width, mix_.feed_forward)};
    }

    const Qwen36MoeConfig& c_;
    const Mix& mix_;
    std::vector<std::unique_ptr<float[]>>& floats_;
    std::mt19937 random_{20260901};
};

/// What all shapes have in common.
Qwen36MoeConfig base_config(int64_t layers) {
    Qwen36MoeConfig c;
    c.layers = layers;
    for (int i = 0; i < c.layers; ++i) c.full_attention.push_back(i % 4 == 3);
    c.head_dim = 256;
    c.rotary_dims = 64;
    c.rope_theta = 1e7f;
    c.key_dim = c.value_dim = 128;
    c.conv_taps = 4;
    c.context = 262144;
    return c;
}

Qwen36MoeConfig moe_config(bool tiny) {
    Qwen36MoeConfig c = base_config(tiny ? 4 : 40);
    c.width = tiny ? 256 : 2048;
    c.vocab_rows = tiny ? 4096 : 248320;
    c.heads = tiny ? 4 : 16;
    c.kv_heads = 2;
    c.key_heads = tiny ? 2 : 16;
    c.value_heads = tiny ? 4 : 32;
    c.experts = tiny ? 16 : 256;
    c.experts_used = tiny ? 4 : 8;
    c.expert_width = c.shared_width = tiny ? 128 : 512;
    return c;
}

Qwen36MoeConfig dense_config(bool tiny) {
    Qwen36MoeConfig c = base_config(tiny ? 4 : 64);
    c.width = tiny ? 256 : 5120;
    c.vocab_rows = tiny ? 4096 : 248320;
    c.heads = tiny ? 6 : 24;
    c.kv_heads = tiny ? 1 : 4;
    c.key_heads = tiny ? 2 : 16;
    c.value_heads = tiny ? 6 : 48;
    c.dense_width = tiny ? 512 : 17408;
    return c;
}

constexpr std::string_view kWithVision = "+vision";

Qwen36MoeConfig text_config(const std::string& name) {
    if (name == "qwen3.6-35b-a3b" || name == "tiny") return moe_config(name == "tiny");
    if (name == "qwen3.6-27b-shape" || name == "tiny-dense") return dense_config(name == "tiny-dense");
    FAIL(usage,
         "--synthetic {}: expected qwen3.6-35b-a3b, qwen3.6-27b-shape, tiny or tiny-dense, each also with {}",
         name, kWithVision);
}

}  // namespace

Qwen36MoeConfig synthetic_config(const std::string& name) {
    if (!name.ends_with(kWithVision)) return text_config(name);
    Qwen36MoeConfig c = text_config(name.substr(0, name.size() - kWithVision.size()));
    c.row_pairs = 11, c.column_pairs = 10;
    return c;
}

std::optional<Qwen36VisionConfig> synthetic_vision(const std::string& name) {
    if (!name.ends_with(kWithVision)) return {};
    const Qwen36MoeConfig text = synthetic_config(name);
    const bool tiny = name.starts_with("tiny");
    const auto token = static_cast<int32_t>(tiny ? text.vocab_rows - 4 : 248056);
    Qwen36VisionConfig v;
    v.width = tiny ? 64 : 1152;
    v.blocks = tiny ? 2 : 27;
    v.heads = tiny ? 2 : 16;
    v.mlp_width = tiny ? 96 : 4304;
    v.patch = 16, v.frames = 2, v.merge = 2;
    v.side = tiny ? 8 : 48;
    v.out_width = text.width;
    v.image_token = token, v.video_token = token + 1;
    return v;
}

Qwen36MoeWeights synthetic_weights(const Qwen36MoeConfig& config, const std::string& mix, bool mtp,
                                   const std::optional<Qwen36VisionConfig>& vision,
                                   std::vector<std::unique_ptr<float[]>>& floats) {
    Qwen36MoeWeights w = Generator(config, find_mix(mix), floats).make();
    if (mtp) w.mtp = Generator(config, mtp_mix(find_mix(mix)), floats).make_mtp();
    if (vision) w.vision = Generator(config, find_mix(mix), floats).make_vision(*vision);
    return w;
}

}  // namespace quern
