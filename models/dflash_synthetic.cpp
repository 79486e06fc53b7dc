// Random weights in the shapes of published DFlash drafters.
#include <random>

#include "ggml-like/check.h"
#include "models/dflash.h"

namespace quern {
namespace {

std::vector<int64_t> windows(int64_t layers, int64_t window) {
    std::vector<int64_t> list(static_cast<size_t>(layers), window);
    list.back() = 0;
    return list;
}

/// The drafters of Qwen3.6-35B-A3B (width 2048, April and later), of Qwen3.6-27B (5120), and one in miniature.
DflashConfig synthetic_dflash_config(const std::string& name, const DflashTarget& target) {
    const bool old = name == "old";
    if ((!old && name != "new") || (old && target.width != 2048))
        FAIL(usage, "-md {} with random weights: expected new or, for qwen3.6-35b-a3b, old", name);
    DflashConfig c{.width = target.width, .heads = 32, .kv_heads = old ? 4 : 8, .head_dim = 128, .block = 16};
    c.mask = static_cast<int32_t>(target.vocab_rows - 1);
    c.rotary = plain_rotary(1e7, 128);
    if (old) {
        c.layers = 8, c.mlp_width = 6144;
        c.taps = {1, 10, 19, 28, 37};
        c.windows = std::vector<int64_t>(8, 0);
        c.rotary = yarn_rotary(1e7, 128, {.factor = 64, .original = 4096});
    } else if (target.width == 2048) {
        c.layers = 6, c.mlp_width = 6144;
        c.taps = {1, 6, 11, 16, 22, 27, 32, 37};
        c.windows = windows(6, 4096);
    } else if (target.width == 5120) {
        c.layers = 5, c.mlp_width = 17408;
        c.taps = {1, 16, 31, 46, 61};
        c.windows = windows(5, 2048);
    } else {
        c.layers = 2, c.mlp_width = 2 * target.width, c.heads = 4, c.kv_heads = 2;
        c.taps = {0, target.layers - 2};
        c.windows = windows(2, 64);
    }
    return c;
}

}  // namespace

/// Fills a Dflash of a configuration.
class DflashMaker {
  public:
    explicit DflashMaker(Dflash& drafter) : d_(drafter), c_(drafter.config_) {}

    void make() {
        DflashWeights& w = d_.weights_;
        const int64_t kv = c_.kv_columns(), d = c_.width;
        w.fc = matrix("fc", {d}, static_cast<int64_t>(c_.taps.size()) * d);
        w.hidden_norm = vector("hidden_norm", {d});
        w.norm = vector("norm", {d});
        w.context = matrix("context", std::vector<int64_t>(static_cast<size_t>(2 * c_.layers), kv), d);
        w.k_norms = vector("k_norms", {c_.layers, c_.head_dim});
        for (int64_t i = 0; i < c_.layers; ++i) {
            const std::string name = fmt::format("L{}.", i);
            w.layers.push_back({.input_norm = vector(name + "input_norm", {d}),
                                .post_norm = vector(name + "post_norm", {d}),
                                .q_norm = vector(name + "q_norm", {c_.head_dim}),
                                .k_norm = vector(name + "k_norm", {c_.head_dim}),
                                .in_proj = matrix(name + "in_proj", {c_.query_columns(), kv, kv}, d),
                                .out_proj = matrix(name + "out_proj", {d}, c_.query_columns()),
                                .gate_up = matrix(name + "gate_up", {c_.mlp_width, c_.mlp_width}, d),
                                .down = matrix(name + "down", {d}, c_.mlp_width)});
        }
    }

  private:
    static Weight matrix(const std::string& name, const std::vector<int64_t>& rows, int64_t cols) {
        std::vector<WeightSegment> segments;
        for (const int64_t r : rows)
            segments.push_back(
                {.name = fmt::format("dflash.{}.{}", name, segments.size()), .rows = r, .cols = cols});
        return Weight("dflash." + name, std::move(segments));
    }
    Tensor vector(const std::string& name, const std::vector<int64_t>& shape) {
        Tensor t = shape.size() == 1 ? make_tensor(name, DType::F32, Place::weight, {shape[0]})
                                     : make_tensor(name, DType::F32, Place::weight, {shape[0], shape[1]});
        d_.floats_.push_back(std::make_unique<float[]>(static_cast<size_t>(t.elements())));
        t.data = d_.floats_.back().get();
        std::normal_distribution<float> normal(1.0f, 0.1f);
        for (int64_t i = 0; i < t.elements(); ++i) t.as<float>()[i] = normal(random_);
        return t;
    }

    Dflash& d_;
    const DflashConfig& c_;
    std::mt19937 random_{20261124};
};

std::unique_ptr<Dflash> Dflash::synthetic(const std::string& name, const DflashTarget& target) {
    auto drafter = std::make_unique<Dflash>();
    drafter->name_ = "synthetic " + name;
    drafter->config_ = synthetic_dflash_config(name, target);
    DflashMaker(*drafter).make();
    return drafter;
}

}  // namespace quern
