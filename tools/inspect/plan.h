// What running a checkpoint costs: bytes a token, memory, and the speeds that memory bandwidth allows.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/token_bytes.h"

namespace quern {

struct PlanOptions {
    std::string model;                    // as open_model takes it
    std::string synthetic, mix = "aeon";  // instead: the shapes of this name
    DenseFormat dense = DenseFormat::as_stored;
    EngineOptions engine;
    double bandwidth = 0;             // GB/s of a card that is not in the table; 0: none
    std::vector<std::string> cards;   // find_card; empty: the usual ones
    int ranks = 1;                    // cards that share every layer: -tp
    std::vector<double> shares = {};  // cards that have some layers each: -ts; empty: one has all
};

struct CostPlan {
    struct OnCard {
        std::string name;
        double bandwidth = 0;                    // bytes a second
        MemoryPlan memory;                       // for a card of unknown memory: as if everything fits
        bool known_memory = false, fits = true;  // each device's part its card
        double short_rate = 0, full_rate = 0;    // at most so many tokens a second, all sequences together
    };
    struct Component {
        std::string name;
        double bytes = 0;        // of one token at kShortDepth
        double unquantized = 0;  // of these, in matrices of 16 or 32 bits
    };
    /// What a format of the KV cache makes room for on cards of kCardGigabytes: the longest context of one sequence, and
    /// sequences of kSequenceTokens; 0: the weights do not fit.
    struct OfFormat {
        struct Room {
            int64_t context = 0, sequences = 0;
        };
        std::string name;
        int64_t token_bytes = 0;
        std::vector<Room> rooms;
    };
    static constexpr int64_t kCardGigabytes[] = {16, 24, 32, 48, 80, 96, 141};
    static constexpr int64_t kSequenceTokens = 32768;
    static constexpr double kShortDepth = 1024;  // tokens before the counted one

    ModelInfo info;
    int64_t sequences = 1;
    int ranks = 1, stages = 1;         // of several ranks all else is of each; of several stages the sum
    double as_stored_token_bytes = 0;  // without PlanOptions::dense, if it is given
    int64_t as_stored_weight_bytes = 0;
    std::vector<Component> components;  // largest first
    std::vector<OnCard> cards;
    std::vector<OfFormat> formats;  // none for several stages

    double token_bytes() const;
};

/// Reads headers and the scales that are floats. Throws Error(model), Error(usage).
CostPlan make_cost_plan(const PlanOptions& options);
std::string describe(const CostPlan& plan);
nlohmann::ordered_json to_json(const CostPlan& plan);

}  // namespace quern
