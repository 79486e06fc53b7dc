#include "tools/common/inspection.h"

#include <algorithm>
#include <filesystem>

#include "ggml-like/check.h"
#include "models/generation_config.h"
#include "models/tokenizer.h"

namespace quern {

const char* format_name(const WeightSegment& s) {
    switch (s.scale_kind) {
        case ScaleKind::nvfp4:
            return "NVFP4";
        case ScaleKind::per_tensor:
            return "FP8 per tensor";
        case ScaleKind::per_row:
            return "FP8 per channel";
        case ScaleKind::block128:
            return "FP8 block 128";
        case ScaleKind::none:
            break;
    }
    return dtype_name(s.dtype);
}

Inspection::Inspection(const std::string& path, ReadMode mode)
    : checkpoint(Checkpoint::open(path)),
      config(parse_qwen3_6_moe_config(checkpoint.config(), checkpoint.files().config)),
      use(checkpoint, mode) {
    try {
        weights = read_qwen3_6_moe_weights(checkpoint, config, use);
        group(weights);
    } catch (const Error& error) {
        failure = error.what();
    }
    audit = use.audit();
    if (!failure.empty())
        audit.problems = {"reading stopped there; what was not reached is listed as UNKNOWN"};
    check_config(checkpoint, config, audit);
    try {
        const GenerationDefaults defaults =
            read_generation_defaults(checkpoint, config.eos_ids, config.vocab_rows);
        const std::string& directory = checkpoint.files().directory;
        if (mode == ReadMode::values && std::filesystem::exists(directory + "/tokenizer.json"))
            check_token_ids(checkpoint, Tokenizer::load(directory, config.vocab_rows), defaults.eos_ids,
                            audit);
    } catch (const Error& error) {
        audit.problems.emplace_back(error.what());
    }
}

void Inspection::count(const char* what, const Weight& w, double share) {
    for (const WeightSegment& s : w.segments) {
        Group& g = groups[{what, format_name(s)}];
        ++g.matrices;
        g.bytes += s.bytes();
        g.token_bytes += share * static_cast<double>(s.bytes());
    }
}

void Inspection::group(const Qwen36MoeWeights& w) {
    const double used =
        static_cast<double>(config.experts_used) / static_cast<double>(std::max<int64_t>(config.experts, 1));
    count("embedding", w.embedding, 1.0 / static_cast<double>(config.vocab_rows));
    if (w.tied_head)
        groups[{"embedding", format_name(w.head.segments[0])}].token_bytes +=
            static_cast<double>(w.head.bytes());
    else
        count("lm_head", w.head, 1);
    for (const LayerWeights& l : w.layers) {
        if (l.attention.in_proj) {
            count("attention: q, gate, k, v", l.attention.in_proj, 1);
            count("attention: output", l.attention.out_proj, 1);
        } else {
            count("DeltaNet: qkv, z, a, b", l.delta.in_proj, 1);
            count("DeltaNet: output", l.delta.out_proj, 1);
        }
        if (config.dense()) {
            count("MLP: gate, up", l.mlp.gate_up, 1);
            count("MLP: down", l.mlp.down, 1);
            continue;
        }
        count("router and shared gate", l.moe.router, 1);
        for (const Weight& e : l.moe.gate_up.expert) count("experts: gate, up", e, used);
        for (const Weight& e : l.moe.down.expert) count("experts: down", e, used);
        count("shared expert", l.moe.shared_gate_up, 1);
        count("shared expert", l.moe.shared_down, 1);
    }
}

}  // namespace quern
