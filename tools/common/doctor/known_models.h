// Known models: published checkpoints and what they are known to answer. Built in from known_models.json, which says
// where each number comes from.
//
// A loaded model is of a known kind if its shape is the same and its tokenizer encodes the entry's text the same. That
// says nothing of its weights: a fine-tune is of the same kind. Whether the weights began as the published ones is seen
// in a row of the embedding, which quantizers leave alone.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "models/model.h"

namespace quern {

/// Greedy decoding of `prompt` gives `answer`.
struct KnownAnswer {
    std::vector<int32_t> prompt, answer;
};

/// What a reference computed of one prompt, in float32.
struct KnownNumbers {
    int64_t weight_bytes = 0;  // ModelInfo::weight_bytes of the checkpoint that was read
    std::vector<int32_t> prompt;
    std::vector<double> log_probability;  // of prompt[i + 1] after prompt[0..i]; natural
    std::vector<double> residual_rms;     // after each layer, over the prompt
};

struct KnownModel {
    std::string name;
    std::string agreed;  // which engines gave these answers
    // Its shape.
    std::string architecture;
    int64_t layers = 0, width = 0, experts = 0, experts_used = 0, vocab_rows = 0;
    // Its vocabulary.
    std::string text;
    std::vector<int32_t> text_ids;

    int32_t embedding_token = -1;
    std::vector<double> embedding_row;  // the first values
    double embedding_tolerance = 0;
    std::vector<KnownAnswer> answers;
    std::vector<KnownAnswer> likeliest;  // answer[i]: the likeliest token after prompt[0..i]
    std::optional<KnownNumbers> numbers;
    /// Nats a token that the published checkpoint reaches on the built-in texts, by kind.
    std::map<std::string, double> nats;
    /// Bits a byte that a model of this kind must not exceed, by kind, where nobody has measured `nats`.
    std::map<std::string, double> bits_per_byte;
    int64_t recall_tokens = 0;  // up to this distance it finds what it has read
};

/// All of them. Parsed once.
const std::vector<KnownModel>& known_models();
/// Throws Error(runtime) naming the entry and field if the text is not such a list.
std::vector<KnownModel> parse_known_models(const std::string& json);
/// The entry that the model is of; null if none. The model needs its tokenizer.
const KnownModel* find_known_model(const std::vector<KnownModel>& list, const Model& model);

}  // namespace quern
