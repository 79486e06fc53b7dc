// ModelTrace: what one prompt leaves inside a model: the residual stream after every layer, how large activations
// become, and which experts each token chose.
//
// The prompt runs as one step of a graph of its own, in which the traced tensors are outputs: plans of requests are
// neither changed nor slowed down.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/model.h"

namespace quern {

class Backend;

struct LayerTrace {
    std::vector<float> residual;   // [tokens, width] after the layer
    float largest = 0;             // absolute value of all activations between its ops; numbers only
    std::string largest_in;        // the node that wrote it: "L3.attn.in_proj"
    int64_t not_finite = 0;        // activations that are NaN or infinite
    std::vector<int32_t> experts;  // [tokens, experts used] ids in falling order of weight; empty: dense
};

struct ModelTrace {
    int64_t tokens = 0;
    std::vector<float> embedding;  // [tokens, width]
    std::vector<LayerTrace> layers;
    std::vector<float> logits;  // [tokens, vocab rows] if asked for
    DType activation = DType::F32;

    /// Root mean square of the residual stream after a layer.
    double rms(size_t layer) const;
};

/// The longest prompt that trace_prompt takes: one step, without cuts.
inline constexpr int64_t kMaxTraceTokens = 512;

/// Runs `tokens` (1 to kMaxTraceTokens) from an empty state, on all devices or ranks of the backend. Needs memory for the traced tensors: on a GPU some 1.4 GB
/// for 512 tokens of a 35B. `logits`: also those of all tokens. Throws Error(memory), Error(device).
ModelTrace trace_prompt(const Model& model, Backend& backend, std::span<const int32_t> tokens,
                        bool logits = false);

}  // namespace quern
