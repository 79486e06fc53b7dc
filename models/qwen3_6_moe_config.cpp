// config.json of Qwen3.6: which keys are read, their defaults (those of the reference class) and their
// limits.
#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "models/config_fields.h"
#include "models/families.h"
#include "models/qwen3_6_moe.h"

namespace quern {
namespace {

using Json = nlohmann::json;
using Fields = ConfigFields;

std::vector<bool> layer_kinds(const Fields& f, int64_t layers) {
    std::vector<bool> full(static_cast<size_t>(layers));
    const Json* types = f.find("layer_types");
    if (types == nullptr) {
        const int64_t interval = f.integer("full_attention_interval", 4, 1, 1 << 20);
        for (int64_t i = 0; i < layers; ++i) full[static_cast<size_t>(i)] = (i + 1) % interval == 0;
        return full;
    }
    if (!types->is_array() || static_cast<int64_t>(types->size()) != layers)
        FAIL(model, "{}: 'layer_types' should list {} layers (num_hidden_layers), but {}", f.file(), layers,
             types->is_array() ? fmt::format("lists {}", types->size()) : "is not a list");
    for (size_t i = 0; i < full.size(); ++i) {
        const Json& kind = (*types)[i];
        if (kind != "full_attention" && kind != "linear_attention")
            f.fail("layer_types", "'linear_attention' or 'full_attention' for each layer", kind);
        full[i] = kind == "full_attention";
    }
    return full;
}

/// The rope settings, under their new or their old key. Only plain rotation is implemented, whichever key
/// asks for more.
const Json& rope_settings(const Fields& f) {
    static const Json kNone = Json::object();
    const Json* found = nullptr;
    for (const char* key : {"rope_parameters", "rope_scaling"}) {
        const Json* rope = f.find(key);
        if (rope == nullptr) continue;
        if (!rope->is_object()) f.fail(key, "an object", *rope);
        const Fields inner(*rope, f.file());
        for (const char* name : {"rope_type", "type"})
            inner.must_be(name, "default", "long-context variants such as yarn are not supported");
        if (found == nullptr) found = rope;
    }
    return found == nullptr ? kNone : *found;
}

/// How many pairs turn by time, by row and by column; more than there are is as many as there are. Interleaved, whether or not
/// the config says so.
void read_sections(const Fields& f, Qwen36MoeConfig& c) {
    const int pairs = c.rotary_dims / 2, third = pairs / 3;
    c.row_pairs = c.column_pairs = pairs == 32 ? 11 : third;
    if (pairs == 32) c.column_pairs = 10;
    const Json* sections = f.find("mrope_section");
    if (sections == nullptr) return;
    constexpr int64_t kMost = 1 << 16;
    const bool three = sections->is_array() && sections->size() == 3 &&
                       std::all_of(sections->begin(), sections->end(), [&](const Json& n) {
                           return n.is_number_integer() && n.get<int64_t>() >= 0 && n.get<int64_t>() <= kMost;
                       });
    if (!three) f.fail("mrope_section", fmt::format("three numbers up to {}", kMost), *sections);
    c.row_pairs = (*sections)[1].get<int>();
    c.column_pairs = (*sections)[2].get<int>();
}

void read_rope(const Fields& f, Qwen36MoeConfig& c) {
    const Fields inner(rope_settings(f), f.file());
    const double theta = inner.number("rope_theta", f.number("rope_theta", 1e4, 1, 1e12), 1, 1e12);
    const double partial =
        inner.number("partial_rotary_factor", f.number("partial_rotary_factor", 0.25, 0, 1), 0, 1);
    c.rope_theta = static_cast<float>(theta);
    c.rotary_dims = static_cast<int>(std::floor(static_cast<double>(c.head_dim) * partial));
    read_sections(inner, c);
    if (c.rotary_dims % 2 != 0)
        FAIL(model,
             "{}: head_dim {} times partial_rotary_factor {} gives {} rotary dimensions; it must be even",
             f.file(), c.head_dim, partial, c.rotary_dims);
}

void must_divide(const Fields& f, const char* big, int64_t whole, const char* small, int64_t part) {
    if (whole % part != 0)
        FAIL(model, "{}: '{}' ({}) should be a multiple of '{}' ({})", f.file(), big, whole, small, part);
}

std::vector<int32_t> read_eos(const Fields& f, int64_t vocab_rows) {
    std::vector<int32_t> ids;
    const Json* eos = f.find("eos_token_id");
    if (eos == nullptr) return ids;
    const Json list = eos->is_array() ? *eos : Json::array({*eos});
    for (const Json& id : list) {
        if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab_rows)
            f.fail("eos_token_id", fmt::format("token ids below vocab_size ({})", vocab_rows), *eos);
        ids.push_back(id.get<int32_t>());
    }
    return ids;
}

/// What both families have; defaults that differ are given.
void read_mixers(const Fields& f, Qwen36MoeConfig& c, bool dense) {
    constexpr int64_t kWide = 1 << 20;
    c.vocab_rows = f.integer("vocab_size", 248320, 1, 1 << 24);
    c.width = f.integer("hidden_size", dense ? 4096 : 2048, 1, kWide);
    c.layers = f.integer("num_hidden_layers", dense ? 32 : 40, 1, 4096);
    c.heads = f.integer("num_attention_heads", 16, 1, 4096);
    c.kv_heads = f.integer("num_key_value_heads", dense ? 4 : 2, 1, 4096);
    c.head_dim = f.integer("head_dim", 256, 1, 4096);
    c.key_heads = static_cast<int>(f.integer("linear_num_key_heads", 16, 1, 4096));
    c.value_heads = static_cast<int>(f.integer("linear_num_value_heads", 32, 1, 4096));
    c.key_dim = static_cast<int>(f.integer("linear_key_head_dim", 128, 1, 4096));
    c.value_dim = static_cast<int>(f.integer("linear_value_head_dim", 128, 1, 4096));
    c.conv_taps = f.integer("linear_conv_kernel_dim", 4, 2, 64);
    c.eps = static_cast<float>(f.number("rms_norm_eps", 1e-6, 0, 1));
    c.context = f.integer("max_position_embeddings", 32768, 1, 1 << 28);
    must_divide(f, "num_attention_heads", c.heads, "num_key_value_heads", c.kv_heads);
    must_divide(f, "linear_num_value_heads", c.value_heads, "linear_num_key_heads", c.key_heads);
    c.full_attention = layer_kinds(f, c.layers);
    read_rope(f, c);
}

void read_experts(const Fields& f, Qwen36MoeConfig& c) {
    constexpr int64_t kWide = 1 << 20;
    f.must_be("norm_topk_prob", true, "expert weights are renormalised");
    f.must_be("mlp_only_layers", Json::array(), "every layer has experts");
    f.must_be("decoder_sparse_step", 1, "every layer has experts");
    c.experts = f.integer("num_experts", 256, 1, 1 << 16);
    c.experts_used = f.integer("num_experts_per_tok", 8, 1, c.experts);
    c.expert_width = f.integer("moe_intermediate_size", 512, 1, kWide);
    c.shared_width = f.integer("shared_expert_intermediate_size", 512, 1, kWide);
}

void read_dense_mlp(const Fields& f, Qwen36MoeConfig& c) {
    if (const Json* experts = f.find("num_experts"); experts != nullptr && *experts != 0)
        f.fail("num_experts", "absent (model_type says that the model is dense)", *experts);
    c.dense_width = f.integer("intermediate_size", 12288, 1, 1 << 20);
}

}  // namespace

Qwen36MoeConfig parse_qwen3_6_moe_config(const Json& root, const std::string& file) {
    const bool dense = family_of(root, file).architecture == std::string_view("qwen3_5");
    const auto text = root.find("text_config");
    if (text != root.end() && !text->is_object()) FAIL(model, "{}: 'text_config' should be an object", file);
    const Fields f(text == root.end() ? root : *text, file);

    f.must_be("hidden_act", "silu", "the only activation of this family");
    f.must_be("attention_bias", false, "projections have no bias");
    f.must_be("attn_output_gate", true, "attention outputs are gated");
    Qwen36MoeConfig c;
    read_mixers(f, c, dense);
    if (dense)
        read_dense_mlp(f, c);
    else
        read_experts(f, c);

    const auto tied = [](const Json& level) {
        const auto it = level.find("tie_word_embeddings");
        return it != level.end() && it->is_boolean() && it->get<bool>();
    };
    // The outermost level decides, as in the reference; older exports wrote it inside only.
    c.tied_head = root.contains("tie_word_embeddings") ? tied(root) : text != root.end() && tied(*text);
    c.eos_ids = read_eos(f, c.vocab_rows);
    return c;
}

}  // namespace quern
