// The tensors of the vision tower: names to fields.
#include <algorithm>

#include "ggml-like/check.h"
#include "models/checkpoint.h"
#include "models/qwen3_6_vision.h"
#include "models/scale_rules.h"
#include "models/tensor_use.h"
#include "models/weight_format.h"

namespace quern {
namespace {

class Reader {
  public:
    Reader(const Checkpoint& checkpoint, const Qwen36VisionConfig& config, TensorUse& use)
        : checkpoint_(checkpoint), c_(config), use_(use) {}

    Qwen36VisionWeights read() {
        const int64_t d = c_.width, square = c_.merge * c_.merge * d;
        Qwen36VisionWeights w;
        w.patches = {patch_kernel(), vector("patch_embed.proj.bias", d)};
        w.positions = read_floats(checkpoint_, kTower + "pos_embed.weight", {c_.side * c_.side, d}, use_);
        for (int64_t i = 0; i < c_.blocks; ++i) w.blocks.push_back(block(fmt::format("blocks.{}.", i)));
        w.merger_norm = norm("merger.norm");
        w.merger_fc1 = biased("merger.linear_fc1", square, square);
        w.merger_fc2 = biased("merger.linear_fc2", c_.out_width, square);
        return w;
    }

  private:
    inline static const std::string kTower = "model.visual.";

    VisionBlockWeights block(const std::string& prefix) {
        const int64_t d = c_.width, f = c_.mlp_width;
        return {.norm1 = norm(prefix + "norm1"),
                .norm2 = norm(prefix + "norm2"),
                .qkv = biased(prefix + "attn.qkv", 3 * d, d),
                .proj = biased(prefix + "attn.proj", d, d),
                .fc1 = biased(prefix + "mlp.linear_fc1", f, d),
                .fc2 = biased(prefix + "mlp.linear_fc2", d, f)};
    }

    Tensor vector(const std::string& name, int64_t width) {
        return read_floats(checkpoint_, kTower + name, {width}, use_);
    }

    LayerNormWeights norm(const std::string& name) {
        return {vector(name + ".weight", c_.width), vector(name + ".bias", c_.width)};
    }

    BiasedWeight biased(const std::string& module, int64_t rows, int64_t cols) {
        return {Weight("vision." + module, {read_linear(checkpoint_, kTower + module, rows, cols, use_)}),
                vector(module + ".bias", rows)};
    }

    /// [D, channel, frame, row, column], as a matrix. Other orders, as MLX writes them, are not read.
    Weight patch_kernel() {
        const std::string module = kTower + "patch_embed.proj", name = module + ".weight";
        const int64_t shape[] = {c_.width, 3, c_.frames, c_.patch, c_.patch};
        const uint32_t i = checkpoint_.find(name);
        if (i == Checkpoint::kNone)
            FAIL(model, "{}: tensor '{}': expected {}, found none; is the download complete?",
                 checkpoint_.files().directory, name, shape_text(shape));
        const SafeTensor& t = *checkpoint_.tensors()[i].tensor;
        WeightSegment s{
            .name = module, .rows = c_.width, .cols = 3 * c_.frames * c_.patch * c_.patch, .data = t.data};
        if (!plain_dtype(t.dtype, s.dtype) ||
            !std::equal(t.dims().begin(), t.dims().end(), std::begin(shape), std::end(shape)))
            FAIL(model, "{}: expected {} in BF16, F16 or F32, found {}", checkpoint_.where(i),
                 shape_text(shape), describe(t));
        use_.use(i, "values");
        return Weight("vision.patch_embed", {s});
    }

    const Checkpoint& checkpoint_;
    const Qwen36VisionConfig& c_;
    TensorUse& use_;
};

}  // namespace

Qwen36VisionWeights read_qwen3_6_vision(const Checkpoint& checkpoint, const Qwen36VisionConfig& config,
                                        TensorUse& use) {
    return Reader(checkpoint, config, use).read();
}

void list_vision(std::vector<WeightUse>& uses, Qwen36VisionWeights& w) {
    const auto vector = [&](Tensor& t) {
        if (t.data != nullptr) uses.push_back({.group = "vision", .vector = &t, .vision = true});
    };
    const auto norm = [&](LayerNormWeights& n) {
        vector(n.weight);
        vector(n.bias);
    };
    const auto biased = [&](BiasedWeight& b) {
        uses.push_back({.group = "vision", .matrix = &b.weight, .vision = true});
        vector(b.bias);
    };
    biased(w.patches);
    vector(w.positions);
    for (VisionBlockWeights& b : w.blocks) {
        norm(b.norm1);
        biased(b.qkv);
        biased(b.proj);
        norm(b.norm2);
        biased(b.fc1);
        biased(b.fc2);
    }
    norm(w.merger_norm);
    biased(w.merger_fc1);
    biased(w.merger_fc2);
}

}  // namespace quern
