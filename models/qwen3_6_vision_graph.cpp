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

    VisionGraph build(const VisionShape& shape) {
        const int64_t end = shape.end < 0 ? c_.blocks : shape.end;
        check(shape, end);
        v_.place = g_.input("place", DType::I32, {shape.patches, 4});
        v_.start = g_.input("start", DType::I32, {shape.images + 1});
        Tensor* to = shape.to.data != nullptr ? g_.external(own_rows(shape.to, shape)) : nullptr;
        Tensor* x = shape.from.data != nullptr ? g_.external(shape.from)
                                               : embed(shape.patches, shape.begin == end ? to : nullptr);
        for (int64_t i = shape.begin; i < end; ++i) x = block(i, x, i + 1 == end ? to : nullptr, shape);
        if (to == nullptr) {
            v_.features = merge(x);
            g_.output(v_.features);
        }
        v_.graph = std::move(g_);
        return std::move(v_);
    }

  private:
    void check(const VisionShape& shape, int64_t end) const {
        CHECK(0 <= shape.begin && shape.begin <= end && end <= c_.blocks, "[vision] blocks {} to {} of {}",
              shape.begin, end, c_.blocks);
        CHECK(end == c_.blocks || shape.to.data != nullptr, "[vision] block {} leaves nothing", end);
        for (const Tensor* t : {&shape.from, &shape.to})
            CHECK(t->data == nullptr ||
                      (t->dtype == DType::F32 && t->shape[0] == shape.patches && t->shape[1] == c_.width),
                  "[vision] between parts {}", describe(*t));
        CHECK(shape.rows == 0 ||
                  (end == shape.begin + 1 && shape.images == 1 && shape.from.data != nullptr &&
                   shape.from.data != shape.to.data && shape.first + shape.rows <= shape.patches),
              "[vision] rows {} to {} of {}", shape.first, shape.first + shape.rows, shape.patches);
    }

    /// Those of all patches' rows that this part computes.
    static Tensor own_rows(Tensor t, const VisionShape& shape) {
        if (shape.rows == 0) return t;
        t.data = static_cast<std::byte*>(t.data) + dtype_bytes(t.dtype, shape.first * t.stride[0]);
        t.shape[0] = shape.rows;
        return t;
    }

    Tensor* embed(int64_t patches, Tensor* to) {
        v_.patches = g_.input("patches", DType::U8, {patches, c_.info().patch_bytes});
        Tensor* positions = grid_embedding(g_, "vision.positions", v_.place, g_.external(w_.positions));
        return linear("vision.patches", patch_values(g_, "vision.values", v_.patches, act_), w_.patches,
                      Activation::none, positions, DType::F32, to);
    }

    /// `to`: where its result goes; null: to scratch.
    Tensor* block(int64_t i, Tensor* x, Tensor* to, const VisionShape& shape) {
        const VisionBlockWeights& b = w_.blocks[static_cast<size_t>(i)];
        const auto name = [&](const char* part) { return fmt::format("V{}.{}", i, part); };
        Tensor* qkv =
            linear(name("qkv"), norm(name("norm1"), x, b.norm1), b.qkv, Activation::none, nullptr, act_);
        Tensor* a = grid_attention(g_, name("attn"), qkv, v_.place, v_.start,
                                   {.heads = static_cast<int>(c_.heads),
                                    .theta = c_.theta,
                                    .first = shape.first,
                                    .rows = shape.rows});
        if (shape.rows > 0) x = g_.external(own_rows(shape.from, shape));
        x = linear(name("proj"), a, b.proj, Activation::none, x, DType::F32);
        Tensor* y =
            linear(name("fc1"), norm(name("norm2"), x, b.norm2), b.fc1, Activation::gelu_tanh, nullptr, act_);
        return linear(name("fc2"), y, b.fc2, Activation::none, x, DType::F32, to);
    }

    Tensor* norm(const std::string& name, Tensor* x, const LayerNormWeights& w) {
        return layer_norm(g_, name, x, g_.external(w.weight), g_.external(w.bias), c_.eps, act_);
    }

    Tensor* linear(const std::string& name, Tensor* x, const BiasedWeight& w, Activation activation,
                   Tensor* add, DType output, Tensor* to = nullptr) {
        return linear_bias(g_, name, x, w.weight, g_.external(w.bias), activation, add, output, to);
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
    VisionGraph v_;
};

}  // namespace

VisionGraph build_qwen3_6_vision(const Qwen36VisionConfig& config, const Qwen36VisionWeights& weights,
                                 const VisionShape& shape, DType activations) {
    return Builder(config, weights, activations).build(shape);
}

}  // namespace quern
