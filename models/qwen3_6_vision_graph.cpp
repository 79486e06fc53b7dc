// The vision tower: patches and their positions; per block norm, attention, residual, norm, MLP, residual; then four patches
// become one row of the text model's width.
#include "ggml-like/check.h"
#include "ggml-like/ops/grid_attention.h"
#include "ggml-like/ops/layer_norm.h"
#include "ggml-like/ops/linear_bias.h"
#include "ggml-like/ops/patches.h"
#include "models/qwen3_6_vision.h"

namespace quern {
namespace {

class Builder {
  public:
    Builder(const Qwen36VisionConfig& config, const Qwen36VisionWeights& weights, DType activations)
        : c_(config), w_(weights), act_(activations) {}

    VisionGraph build(int64_t patches, int64_t images) {
        VisionGraph v;
        v.patches = g_.input("patches", DType::U8, {patches, c_.info().patch_bytes});
        v.place = g_.input("place", DType::I32, {patches, 4});
        v.start = g_.input("start", DType::I32, {images + 1});
        Tensor* positions = grid_embedding(g_, "vision.positions", v.place, g_.external(w_.positions));
        Tensor* x = linear("vision.patches", patch_values(g_, "vision.values", v.patches, act_), w_.patches,
                           Activation::none, positions, DType::F32);
        for (size_t i = 0; i < w_.blocks.size(); ++i) {
            const VisionBlockWeights& b = w_.blocks[i];
            const auto name = [&](const char* part) { return fmt::format("V{}.{}", i, part); };
            Tensor* qkv =
                linear(name("qkv"), norm(name("norm1"), x, b.norm1), b.qkv, Activation::none, nullptr, act_);
            Tensor* a = grid_attention(g_, name("attn"), qkv, v.place, v.start,
                                       {.heads = static_cast<int>(c_.heads), .theta = c_.theta});
            x = linear(name("proj"), a, b.proj, Activation::none, x, DType::F32);
            Tensor* y = linear(name("fc1"), norm(name("norm2"), x, b.norm2), b.fc1, Activation::gelu_tanh,
                               nullptr, act_);
            x = linear(name("fc2"), y, b.fc2, Activation::none, x, DType::F32);
        }
        v.features = merge(x);
        g_.output(v.features);
        v.graph = std::move(g_);
        return v;
    }

  private:
    Tensor* norm(const std::string& name, Tensor* x, const LayerNormWeights& w) {
        return layer_norm(g_, name, x, g_.external(w.weight), g_.external(w.bias), c_.eps, act_);
    }

    Tensor* linear(const std::string& name, Tensor* x, const BiasedWeight& w, Activation activation,
                   Tensor* add, DType output) {
        return linear_bias(g_, name, x, w.weight, g_.external(w.bias), activation, add, output);
    }

    /// The patches of a square lie one behind the other.
    Tensor* merge(Tensor* x) {
        Tensor* y = norm("vision.merger_norm", x, w_.merger_norm);
        const int64_t patches = c_.merge * c_.merge, width = patches * c_.width;
        CHECK(x->shape[0] % patches == 0, "[vision] {} patches do not make whole tokens", x->shape[0]);
        Tensor* squares = g_.view("vision.squares", y, 0, {x->shape[0] / patches, width}, {width, 1});
        Tensor* z = linear("vision.merger_fc1", squares, w_.merger_fc1, Activation::gelu_erf, nullptr, act_);
        return linear("vision.features", z, w_.merger_fc2, Activation::none, nullptr, DType::F32);
    }

    const Qwen36VisionConfig& c_;
    const Qwen36VisionWeights& w_;
    const DType act_;
    Graph g_;
};

}  // namespace

VisionGraph build_qwen3_6_vision(const Qwen36VisionConfig& config, const Qwen36VisionWeights& weights,
                                 int64_t patches, int64_t images, DType activations) {
    return Builder(config, weights, activations).build(patches, images);
}

}  // namespace quern
