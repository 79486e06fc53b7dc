// What Qwen3.6 keeps of a sequence: keys and values of attention, of DeltaNet layers the last inputs of the convolution, the state and
// its journal, and of an MTP layer hidden states and drafts.
#include <algorithm>
#include <utility>

#include "models/qwen3_6_moe.h"

namespace quern {

std::vector<StateSpec> qwen3_6_moe_state(const Qwen36MoeConfig& c, const Qwen36MoeConfig& whole,
                                         const StateOptions& options) {
    std::vector<StateSpec> specs;
    const int mtp = static_cast<int>(c.layers);  // the MTP layer's number
    const LayerRange own = c.own_layers();
    const int end = options.mtp && c.is_last() ? mtp + 1 : own.end;
    for (int layer = own.begin; layer < end; ++layer) {
        const auto add = [&](StateRole role, DType dtype, bool paged, std::vector<int64_t> shape) {
            specs.push_back({layer, role, dtype, paged, std::move(shape)});
        };
        if (layer == mtp) {
            add(StateRole::hidden, DType::F32, false, {kHiddenRing, c.width});
            for (StateSpec& spec : draft_specs(mtp)) specs.push_back(std::move(spec));
        }
        if (layer == mtp || c.full_attention[static_cast<size_t>(layer)]) {
            const int64_t heads = layer == mtp ? whole.kv_heads : c.kv_heads;
            add(StateRole::key, options.kv.k, true, {heads, kPageTokens, c.head_dim});
            add(StateRole::value, options.kv.v, true, {heads, kPageTokens, c.head_dim});
            continue;
        }
        const int64_t journal = options.journal;
        add(StateRole::conv, options.conv, false,
            {c.conv_taps - 1 + std::max<int64_t>(1, journal), c.qkv_columns()});
        add(StateRole::delta, DType::F32, false, {c.value_heads, c.value_dim, c.key_dim});
        if (journal > 0) {
            add(StateRole::journal_k, DType::F32, false, {journal, c.key_heads, c.key_dim});
            add(StateRole::journal_u, DType::F32, false, {journal, c.value_heads, c.value_dim});
            add(StateRole::journal_g, DType::F32, false, {journal, c.value_heads, 1});
        }
    }
    return specs;
}

}  // namespace quern
