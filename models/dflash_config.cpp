// config.json of DFlash drafters: which keys are read, where they may be, and what must fit the model.
#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "models/config_fields.h"
#include "models/dflash.h"

namespace quern {
namespace {

using Json = nlohmann::json;
using Fields = ConfigFields;

constexpr int64_t kWide = 1 << 20;

/// Keys of DFlash's own are in dflash_config or, in older files, at the top.
class DflashKeys {
  public:
    DflashKeys(const Json& root, const Fields& top, const std::string& file)
        : inner_object_(root.contains("dflash_config") ? root.at("dflash_config") : Json::object()),
          inner_(inner_object_, file),
          top_(top) {
        if (!inner_object_.is_object()) top.fail("dflash_config", "an object", inner_object_);
    }
    const Json* find(const char* key) const {
        const Json* v = inner_.find(key);
        return v != nullptr ? v : top_.find(key);
    }
    const Json& need(const char* key, const char* what) const {
        const Json* v = find(key);
        if (v == nullptr)
            FAIL(model, "{}: '{}' is missing, {}; is it the directory of a DFlash drafter?", top_.file(), key,
                 what);
        return *v;
    }
    int64_t integer(const char* key, const char* what, int64_t low, int64_t high) const {
        need(key, what);
        const Fields& where = inner_.find(key) != nullptr ? inner_ : top_;
        return where.integer(key, low, low, high);
    }

  private:
    const Json inner_object_;
    const Fields inner_;
    const Fields& top_;
};

void refuse_other_kinds(const Json& root, const Fields& f) {
    for (const char* key :
         {"markov_rank", "markov_head_type", "confidence_head_alpha", "enable_confidence_head"})
        if (f.find(key) != nullptr)
            FAIL(model,
                 "{}: '{}' is a part of DSpark drafters, which are not read; expected a DFlash drafter",
                 f.file(), key);
    const auto names = root.find("architectures");
    if (names == root.end() || !names->is_array()) return;
    for (const Json& name : *names)
        if (name.is_string() && name.get<std::string>().find("DFlash2") != std::string::npos)
            FAIL(model, "{}: DFlash2 drafters are not read; expected a DFlash drafter", f.file());
}

std::vector<int64_t> read_taps(const DflashKeys& keys, const Fields& f, const DflashTarget& target) {
    const Json& list = keys.need("target_layer_ids", "the layers of the model that the drafter reads");
    const std::string expected =
        fmt::format("a list of 1 to 16 different layers of the model, 0 to {}", target.layers - 1);
    if (!list.is_array() || list.empty() || list.size() > 16) f.fail("target_layer_ids", expected, list);
    std::vector<int64_t> taps;
    for (const Json& id : list) {
        if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= target.layers ||
            std::count(taps.begin(), taps.end(), id.get<int64_t>()) > 0)
            f.fail("target_layer_ids", expected, list);
        taps.push_back(id.get<int64_t>());
    }
    return taps;
}

std::vector<int64_t> read_windows(const Fields& f, int64_t layers) {
    std::vector<int64_t> windows(static_cast<size_t>(layers), 0);
    const Json* types = f.find("layer_types");
    if (types == nullptr) {
        f.must_be("use_sliding_window", false,
                  "which layers have windows is said by layer_types, which is missing");
        return windows;
    }
    if (!types->is_array() || static_cast<int64_t>(types->size()) != layers)
        f.fail("layer_types", fmt::format("a list of {} layers", layers), *types);
    for (size_t i = 0; i < windows.size(); ++i) {
        const Json& kind = (*types)[i];
        if (kind != "full_attention" && kind != "sliding_attention")
            f.fail("layer_types", "'sliding_attention' or 'full_attention' for each layer", kind);
        if (kind == "full_attention") continue;
        if (f.find("sliding_window") == nullptr)
            FAIL(model, "{}: 'sliding_window' is missing; layer {} is sliding_attention", f.file(), i);
        windows[i] = f.integer("sliding_window", 0, 1, 1 << 28);
    }
    return windows;
}

Rotary read_rotary(const Fields& f, int64_t head_dim) {
    static const Json kNone = Json::object();
    const Json* settings = f.find("rope_parameters");
    if (settings == nullptr) settings = f.find("rope_scaling");
    if (settings == nullptr) settings = &kNone;
    if (!settings->is_object()) f.fail("rope_parameters", "an object", *settings);
    const Fields inner(*settings, f.file());
    const double theta = inner.number("rope_theta", f.number("rope_theta", 1e4, 1, 1e12), 1, 1e12);
    inner.must_be("partial_rotary_factor", 1.0, "whole heads are rotated");
    const Json* type = inner.find("rope_type");
    if (type == nullptr) type = inner.find("type");
    const int dims = static_cast<int>(head_dim);
    if (type == nullptr || *type == "default") return plain_rotary(theta, dims);
    if (*type != "yarn") inner.fail("rope_type", "'default' or 'yarn'", *type);
    const Yarn yarn{
        .factor = inner.number("factor", 0, 1, 1e6),
        .beta_fast = inner.number("beta_fast", 32, 0, 1e6),
        .beta_slow = inner.number("beta_slow", 1, 0, 1e6),
        .attention = inner.number("attention_factor", 0, 0, 1e6),
        .original = inner.integer("original_max_position_embeddings",
                                  f.integer("max_position_embeddings", 0, 0, 1 << 28), 1, 1 << 28)};
    if (yarn.factor < 1 || yarn.original < 1 || yarn.beta_fast <= 0 || yarn.beta_slow <= 0)
        FAIL(model,
             "{}: YaRN needs 'factor' of at least 1, 'original_max_position_embeddings' and positive betas",
             f.file());
    return yarn_rotary(theta, dims, yarn);
}

/// is_causal at the top, else causal beside the other keys of DFlash.
std::optional<bool> read_causal(const DflashKeys& keys, const Fields& f) {
    const Json* v = f.find("is_causal");
    if (v == nullptr) v = keys.find("causal");
    if (v == nullptr) return std::nullopt;
    if (!v->is_boolean()) f.fail("causal", "true or false", *v);
    return v->get<bool>();
}

void must_equal(const Fields& f, const char* key, int64_t model, const char* what) {
    const int64_t own = f.integer(key, model, 0, int64_t{1} << 40);
    if (own != model)
        FAIL(model, "{}: '{}' is {}, but {} {}; the drafter was trained for another model", f.file(), key,
             own, what, model);
}

}  // namespace

bool DflashConfig::has_windows() const {
    return std::any_of(windows.begin(), windows.end(), [](int64_t w) { return w > 0; });
}

bool DflashConfig::causal_layer(size_t layer, bool causal_windows) const {
    return causal.value_or(windows[layer] > 0 && causal_windows);
}

DflashConfig parse_dflash_config(const Json& root, const std::string& file, const DflashTarget& target) {
    if (!root.is_object()) FAIL(model, "{}: should be a JSON object", file);
    const Fields f(root, file);
    const DflashKeys keys(root, f, file);
    refuse_other_kinds(root, f);
    f.must_be("hidden_act", "silu", "the only activation of these drafters");
    f.must_be("attention_bias", false, "projections have no bias");
    DflashConfig c;
    c.taps = read_taps(keys, f, target);
    must_equal(f, "num_target_layers", target.layers, "the model's layers are");
    must_equal(f, "hidden_size", target.width, "the model's width is");
    must_equal(f, "vocab_size", target.vocab_rows, "the model's vocabulary is");
    c.block = keys.integer("block_size", "the rows of a block", 2, 256);
    c.mask = static_cast<int32_t>(
        keys.integer("mask_token_id", "the token that stands for those to come", 0, target.vocab_rows - 1));
    c.width = target.width;
    c.layers = f.integer("num_hidden_layers", 0, 1, 256);
    c.heads = f.integer("num_attention_heads", 0, 1, 4096);
    c.kv_heads = f.integer("num_key_value_heads", c.heads, 1, 4096);
    c.head_dim = f.integer("head_dim", c.heads > 0 ? c.width / c.heads : 0, 2, 4096);
    c.mlp_width = f.integer("intermediate_size", 0, 1, kWide);
    for (const auto& [key, value] :
         {std::pair("num_hidden_layers", c.layers), std::pair("num_attention_heads", c.heads),
          std::pair("intermediate_size", c.mlp_width)})
        if (value == 0) FAIL(model, "{}: '{}' is missing", file, key);
    if (c.heads % c.kv_heads != 0 || c.head_dim % 2 != 0)
        FAIL(model, "{}: {} heads, {} kv heads and a head_dim of {} do not go together", file, c.heads,
             c.kv_heads, c.head_dim);
    c.eps = static_cast<float>(f.number("rms_norm_eps", 1e-6, 0, 1));
    c.windows = read_windows(f, c.layers);
    c.causal = read_causal(keys, f);
    c.rotary = read_rotary(f, c.head_dim);
    return c;
}

}  // namespace quern
