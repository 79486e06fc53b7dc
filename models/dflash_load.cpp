// From a drafter's tensors to weight fields.
#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/content_hash.h"
#include "models/dflash.h"
#include "models/tensor_use.h"
#include "models/weight_format.h"

namespace quern {

/// Fills a Dflash from its checkpoint.
class DflashReader {
  public:
    explicit DflashReader(Dflash& drafter)
        : d_(drafter), c_(drafter.config_), checkpoint_(*drafter.checkpoint_), use_(checkpoint_) {}

    void read() {
        DflashWeights& w = d_.weights_;
        w.fc = Weight("dflash.fc",
                      {matrix(either("fc"), c_.width, static_cast<int64_t>(c_.taps.size()) * c_.width)});
        w.hidden_norm = vector(either("hidden_norm") + ".weight", c_.width);
        w.norm = vector(kText + "norm.weight", c_.width);
        std::vector<WeightSegment> keys, values;
        for (int64_t i = 0; i < c_.layers; ++i) read_layer(i, keys, values);
        keys.insert(keys.end(), values.begin(), values.end());
        w.context = Weight("dflash.context", std::move(keys));
        w.k_norms = stacked_norms();
        require_all_known();
        d_.floats_ = use_.take_floats();
    }

  private:
    inline static const std::string kText = "model.language_model.";

    /// Some exports put "model." before every name.
    std::string either(const std::string& name) const {
        return checkpoint_.find("model." + name + ".weight") == Checkpoint::kNone ? name : "model." + name;
    }
    WeightSegment matrix(const std::string& module, int64_t rows, int64_t cols) {
        return read_linear(checkpoint_, module, rows, cols, use_);
    }
    Tensor vector(const std::string& name, int64_t size) {
        return read_floats(checkpoint_, name, {size}, use_);
    }

    void read_layer(int64_t i, std::vector<WeightSegment>& keys, std::vector<WeightSegment>& values) {
        const std::string prefix = fmt::format("{}layers.{}.", kText, i), attention = prefix + "self_attn.",
                          name = fmt::format("dflash.L{}.", i);
        const int64_t d = c_.width, kv = c_.kv_columns(), m = c_.mlp_width;
        DflashLayer& l = d_.weights_.layers.emplace_back();
        l.input_norm = vector(prefix + "input_layernorm.weight", d);
        l.post_norm = vector(prefix + "post_attention_layernorm.weight", d);
        l.q_norm = vector(attention + "q_norm.weight", c_.head_dim);
        l.k_norm = vector(attention + "k_norm.weight", c_.head_dim);
        const WeightSegment k = matrix(attention + "k_proj", kv, d), v = matrix(attention + "v_proj", kv, d);
        l.in_proj = Weight(name + "in_proj", {matrix(attention + "q_proj", c_.query_columns(), d), k, v});
        l.out_proj = Weight(name + "out_proj", {matrix(attention + "o_proj", d, c_.query_columns())});
        l.gate_up = Weight(name + "gate_up",
                           {matrix(prefix + "mlp.gate_proj", m, d), matrix(prefix + "mlp.up_proj", m, d)});
        l.down = Weight(name + "down", {matrix(prefix + "mlp.down_proj", d, m)});
        keys.push_back(k);
        values.push_back(v);
    }

    Tensor stacked_norms() {
        const auto size = static_cast<size_t>(c_.head_dim);
        Tensor t = make_tensor("dflash.k_norms", DType::F32, Place::weight, {c_.layers, c_.head_dim});
        t.data = use_.new_floats(static_cast<size_t>(c_.layers) * size);
        for (int64_t i = 0; i < c_.layers; ++i)
            std::memcpy(t.row<float>(i), d_.weights_.layers[static_cast<size_t>(i)].k_norm.data,
                        size * sizeof(float));
        return t;
    }

    void require_all_known() {
        const Audit audit = use_.audit();
        std::string problems;
        for (const std::string& p : audit.problems) problems += "\n  " + p;
        if (!problems.empty())
            FAIL(model,
                 "{}: the drafter is not fully understood; DFlash2 and DSpark drafters are not read:{}",
                 checkpoint_.files().directory, problems);
    }

    Dflash& d_;
    const DflashConfig& c_;
    const Checkpoint& checkpoint_;
    TensorUse use_;
};

std::unique_ptr<Dflash> Dflash::open(const std::string& path, const DflashTarget& target, int threads) {
    auto drafter = std::make_unique<Dflash>();
    drafter->checkpoint_.emplace(Checkpoint::open(path, threads));
    const CheckpointFiles& files = drafter->checkpoint_->files();
    drafter->name_ = files.directory;
    drafter->config_ = parse_dflash_config(drafter->checkpoint_->config(), files.config, target);
    DflashReader(*drafter).read();
    return drafter;
}

void Dflash::list(std::vector<WeightUse>& uses, int layer) {
    const auto matrix = [&](Weight& w, int at, bool of_layer, RowOrder order = RowOrder::stacked) {
        uses.push_back({.group = "DFlash",
                        .layer = at,
                        .matrix = &w,
                        .order = order,
                        .draft_layer = of_layer,
                        .draft = true});
    };
    const auto vector = [&](Tensor& t) { uses.push_back({.group = "DFlash", .vector = &t, .draft = true}); };
    DflashWeights& w = weights_;
    matrix(w.fc, layer, false);
    matrix(w.context, layer, false);
    int at = layer;
    for (DflashLayer& l : w.layers) {
        ++at;
        matrix(l.in_proj, at, true);
        matrix(l.out_proj, at, true);
        matrix(l.gate_up, at, true, RowOrder::paired);
        matrix(l.down, at, true);
        for (Tensor* t : {&l.input_norm, &l.post_norm, &l.q_norm, &l.k_norm}) vector(*t);
    }
    for (Tensor* t : {&w.hidden_norm, &w.norm, &w.k_norms}) vector(*t);
}

bool Dflash::has(const Weight& weight) const {
    const DflashWeights& w = weights_;
    return &weight == &w.fc || &weight == &w.context ||
           std::any_of(w.layers.begin(), w.layers.end(), [&](const DflashLayer& l) {
               return &weight == &l.in_proj || &weight == &l.out_proj || &weight == &l.gate_up ||
                      &weight == &l.down;
           });
}

void Dflash::add_to(ContentHash& hash) const {
    constexpr uint64_t kBeginning = 4096;  // a page of the mapping
    if (!checkpoint_) return hash.add(name_);
    hash.add(checkpoint_->config_text());
    for (const CheckpointTensor& t : checkpoint_->tensors()) {
        hash.add(t.name);
        hash.add(t.tensor->data, std::min(t.tensor->bytes(), kBeginning));
    }
}

}  // namespace quern
