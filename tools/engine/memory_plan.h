// MemoryPlan: how much of a device's memory running a model takes, known before its weights are read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/backend.h"
#include "models/model.h"
#include "tools/engine/engine.h"
#include "tools/engine/scheduler.h"

namespace quern {

/// All sizes in bytes, as the backend stores things.
struct MemoryPlan {
    struct Group {
        std::string name;
        int64_t bytes;
    };
    std::vector<Group> weights;  // without placed ones and without `mapped`
    int64_t mapped = 0;          // weights that the CPU reads in the mapped files

    KvTypes kv_types = DType::BF16;
    std::vector<StateSpec> specs;
    int64_t context = 0, model_context = 0;  // tokens a sequence may hold; the most the model was made for
    bool context_chosen = false;             // because it fits, not by the caller
    int64_t sequences = 0;                   // at the same time
    StepLimits steps{};                      // rows of the steps that fit the scratch
    ImageSizes image_sizes;                  // between which images are read, if the model reads them
    bool mtp = false;                        // the MTP layer drafts: it has state, and passes of its own
    bool dflash = false;                     // the same of a DFlash drafter
    int64_t block_rows = 0;                  // of a DFlash drafter's pass for one sequence
    int64_t token_bytes = 0, kv = 0;         // of one token; of all sequences
    int64_t slot_bytes = 0, recurrent = 0;   // of one sequence; of all
    /// Recurrent states of earlier prompts that a device has room for beside those in host memory (PrefixCache), and their
    /// bytes.
    int64_t kept_states = 0, kept = 0;
    int64_t arena = 0, inputs = 0;  // shared by all steps: scratch and outputs; inputs
    /// The same of passes that draft for one sequence (plan_cache.h), where one device has the whole model.
    int64_t drafting_arena = 0, drafting_inputs = 0;
    int64_t between = 0;   // of the vision tower: what a large image leaves between its steps
    int64_t results = 0;   // of several devices, on the last: logits of steps that are on their way
    int64_t features = 0;  // host memory for images that were read before: a part of the cache's
    int64_t reserve = 0;   // captured graphs, upload buffers, what a driver takes now and then
    std::string device_name;
    MemoryInfo device;  // when this was planned
    /// Of a model that several devices hold by layers: of each device; all else is the sum of these. Else empty.
    std::vector<MemoryPlan> stages;

    const MemoryPlan& of_stage(int stage) const {
        return stages.empty() ? *this : stages[static_cast<size_t>(stage)];
    }
    int64_t pages() const;  // of one sequence
    int64_t weight_bytes() const;
    int64_t state_bytes() const { return kv + recurrent + kept; }
    int64_t scratch_bytes() const {
        return arena + inputs + drafting_arena + drafting_inputs + between + results;
    }
    int64_t needed() const { return weight_bytes() + state_bytes() + scratch_bytes() + reserve; }
};

/// What was really allocated, by the device's count of free memory; only where that is exact.
struct MemoryMeasured {
    int64_t weights = 0, state = 0, scratch = 0, other = 0;
};

/// `weights_placed`: the model's weights are in memory already. `results`: MemoryPlan::results of one of several devices. Throws
/// Error(usage) for options out of range.
MemoryPlan make_memory_plan(const Model& model, const Backend& backend, const EngineOptions& options,
                            bool weights_placed, int64_t results = 0);
/// Throws Error(memory), naming what to lower, if it does not fit into the free memory.
void require_fit(const MemoryPlan& plan);

/// Sequences that one pass of a DFlash drafter drafts for, at most; and the shape of a pass.
int64_t block_sequences(const MemoryPlan& plan);
BatchShape block_shape(const MemoryPlan& plan, int64_t sequences, int64_t vocab);

/// A table with a line for each part.
std::string describe(const MemoryPlan& plan);
/// The table with a column of what was measured, and a warning if they differ by more than 1 %.
std::string describe(const MemoryPlan& plan, const MemoryMeasured& measured);

}  // namespace quern
