// A model on one of the stand-in's devices, and what its steps launch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda_stand_in/stand_in.h"
#include "ggml-like/backend.h"
#include "models/model.h"
#include "tools/engine/state_pool.h"

namespace quern::test {

using cuda_stand_in::Launch;

struct NodeLaunches {
    std::string node;
    std::vector<Launch> launches;
    std::string refusal;  // why there are no more launches; empty: these are all
    bool operator==(const NodeLaunches&) const = default;
};

/// A captured step, run twice.
struct Replay {
    int64_t kernels;  // as Plan counts them
    std::vector<Launch> first, second;
};

struct ModelChoice {
    std::string shape;  // of a synthetic model; or a checkpoint's directory
    std::string mix;    // empty: a checkpoint
    DenseFormat dense = DenseFormat::as_stored;
    int journal = 0;  // entries a slot
    bool mtp = false;
    std::string kv = "auto";   // EngineOptions::kv_type
    std::string drafter = {};  // OpenOptions::draft_model
    int ranks = 1;             // of which it is the first
};

class PlacedModel {
  public:
    PlacedModel(const ModelChoice& choice, int device);
    const ModelChoice& choice() const { return choice_; }
    int device() const { return device_; }
    std::string device_name() const;

    /// What placing the weights launched.
    const std::vector<Launch>& loading() const { return loading_; }

    /// An answer step of so many rows, of as many sequences or of fewer.
    BatchShape answers(int64_t rows, int64_t sequences = 0) const;
    /// A prompt step whose sequences want the logits of their last row.
    BatchShape prompt(int64_t rows, int64_t sequences = 1) const;

    /// A pass of the MTP layer that drafts tokens for each of so many sequences, and one that catches up with rows of one.
    BatchShape mtp_drafts(int64_t sequences, int64_t rows, int64_t drafts) const;
    BatchShape mtp_catch_up(StepKind kind, int64_t rows) const;
    /// A pass of the DFlash drafter: blocks of so many rows.
    BatchShape blocks(int64_t sequences, int64_t rows) const;
    /// An answer step of one sequence that also makes the drafter's keys and values.
    BatchShape tapped(int64_t rows) const;

    /// Of the whole step, as steps run that are not captured.
    std::vector<Launch> launches(const BatchShape& shape);
    Replay replay(const BatchShape& shape);
    /// Of each node of the step, in order.
    std::vector<NodeLaunches> by_node(const BatchShape& shape);
    /// The same of a step in which no tensors share memory.
    std::vector<NodeLaunches> by_node_apart(const BatchShape& shape);
    /// The same of graphs of one node each. A node that is refused is no error.
    std::vector<NodeLaunches> each_alone(const BatchShape& shape);

  private:
    BuiltGraph build(const BatchShape& shape) const;
    std::vector<NodeLaunches> run_by_node(Plan& plan);

    ModelChoice choice_;
    int device_;
    std::vector<Launch> loading_;
    std::unique_ptr<Backend> group_;  // of all ranks
    Backend* backend_;                // of the first
    std::unique_ptr<Model> model_;
    std::unique_ptr<StatePool> pool_;
    std::unique_ptr<Workspace> workspace_;
};

/// All launches of all nodes.
std::vector<Launch> joined(const std::vector<NodeLaunches>& nodes);

}  // namespace quern::test
