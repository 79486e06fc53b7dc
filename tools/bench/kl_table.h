// How far settings move a model's predictions on a text of the user's: `bench --kl`.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ggml-like/json.h"
#include "models/model.h"
#include "tools/engine/dense_cost.h"

namespace quern {

class Backend;

/// Each against the model as it is stored with the KV cache that the backend computes in.
struct KlTable {
    struct Row {
        std::string dense, kv;
        DenseCost cost;
    };
    int64_t tokens = 0;  // of the text
    std::vector<Row> rows;
};

/// The text of a file; of one that ends in ".jsonl" its questions with their expected answers (quality.h), as the model's
/// conversations. At most what the model's context holds. Throws Error(usage) if there is none.
std::vector<int32_t> kl_tokens(const Model& model, const std::string& path);

/// `model`: with weights and a tokenizer. `kv`: pairs of EngineOptions::kv_type and kv_type_v. If it was opened with
/// OpenOptions::dense, it is requantized, and all is measured once more. Throws Error(memory).
KlTable measure_kl(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
                   const std::vector<std::pair<std::string, std::string>>& kv);
std::string describe(const KlTable& table);
nlohmann::ordered_json to_json(const KlTable& table);

}  // namespace quern
