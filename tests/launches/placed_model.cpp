#include "launches/placed_model.h"

#include <algorithm>
#include <map>
#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/error.h"
#include "models/weight_placement.h"
#include "tools/engine/kv_types.h"

namespace quern::test {
namespace {

using cuda_stand_in::take_record;

constexpr int64_t kSlots = 64, kPages = 64;  // of the pool: nobody reads them
constexpr int64_t kContextPages = 512;       // of the page table's rows: 32K tokens
constexpr int64_t kArena = 64ll << 30, kInputs = 16 << 20;

/// The node, in a graph of its own, with the memory that its tensors have.
Graph graph_of(const Node& node) {
    Graph graph;
    std::map<const Tensor*, Tensor*> own;
    const auto adopt = [&](std::vector<Tensor*>& tensors) {
        for (Tensor*& t : tensors) {
            Tensor copy = *t;
            copy.place = Place::state;
            copy.base = -1;
            Tensor*& adopted = own[t];
            if (adopted == nullptr) adopted = graph.external(copy);
            t = adopted;
        }
    };
    Node alone = node;
    adopt(alone.inputs);
    adopt(alone.outputs);
    adopt(alone.state);
    graph.add(std::move(alone));
    return graph;
}

void make_all_outputs(Graph& graph) {
    for (const Node& node : graph.nodes())
        for (Tensor* t : node.outputs) graph.output(t);
}

std::unique_ptr<Model> open(const ModelChoice& choice) {
    const OpenOptions options{.tokenizer = false,
                              .dense = choice.dense,
                              .mtp = choice.mtp ? MtpUse::required : MtpUse::none,
                              .draft_format = DenseFormat::fp8,  // as on every GPU
                              .shard = {.rank = 0, .of = choice.ranks},
                              .draft_model = choice.drafter};
    return choice.mix.empty() ? open_model(choice.shape, options)
                              : open_synthetic(choice.shape, choice.mix, options);
}

/// Of a list such as "a, b".
size_t count_names(const std::string& list) {
    return list.empty() ? 0 : static_cast<size_t>(std::ranges::count(list, ',')) + 1;
}

}  // namespace

PlacedModel::PlacedModel(const ModelChoice& choice, int device)
    : choice_(choice),
      device_(device),
      group_(
          make_cuda_backends(std::vector<int>(static_cast<size_t>(choice.ranks), device), {.test = false})),
      backend_(&group_->of_rank(0)),
      model_(open(choice)) {
    take_record();
    place_weights(*model_, *backend_);
    loading_ = take_record().launches;
    const DType type = backend_->activation_dtype();
    pool_ = std::make_unique<StatePool>(*backend_,
                                        model_->state_specs({.kv = parse_kv_types(choice.kv, "", type),
                                                             .conv = type,
                                                             .journal = choice.journal,
                                                             .mtp = choice.mtp,
                                                             .dflash = !choice.drafter.empty()}),
                                        kSlots, kPages);
    workspace_ = std::make_unique<Workspace>(*backend_, kArena, kInputs);
}

std::string PlacedModel::device_name() const {
    return cuda_stand_in::devices()[static_cast<size_t>(device_)].name;
}

BatchShape PlacedModel::answers(int64_t rows, int64_t sequences) const {
    return {.kind = StepKind::answer,
            .tokens = rows,
            .sequences = sequences > 0 ? sequences : rows,
            .logit_rows = rows,
            .pages = kContextPages,
            .vocab = model_->info().vocab};
}

BatchShape PlacedModel::prompt(int64_t rows, int64_t sequences) const {
    BatchShape shape = answers(rows, sequences);
    shape.kind = StepKind::prompt;
    shape.logit_rows = sequences;
    return shape;
}

BatchShape PlacedModel::mtp_drafts(int64_t sequences, int64_t rows, int64_t drafts) const {
    BatchShape shape = answers(rows, sequences);
    shape.pass = Pass::mtp;
    shape.logit_rows = 0;
    shape.drafts = drafts;
    return shape;
}

BatchShape PlacedModel::mtp_catch_up(StepKind kind, int64_t rows) const {
    BatchShape shape = answers(rows, 1);
    shape.kind = kind;
    shape.pass = Pass::mtp;
    shape.logit_rows = 0;
    return shape;
}

BatchShape PlacedModel::blocks(int64_t sequences, int64_t rows) const {
    BatchShape shape = answers(sequences * rows, sequences);
    shape.pass = Pass::dflash;
    shape.logit_rows = sequences * (rows - 1);
    return shape;
}

BatchShape PlacedModel::tapped(int64_t rows) const {
    BatchShape shape = answers(rows, 1);
    shape.pass = Pass::taps;
    return shape;
}

BuiltGraph PlacedModel::build(const BatchShape& shape) const {
    take_record();  // what a step left that was refused
    return model_->build(shape, *pool_, backend_->activation_dtype());
}

std::vector<Launch> PlacedModel::launches(const BatchShape& shape) {
    Plan(build(shape).graph, *backend_, *workspace_, PlanUse::sometimes).run();
    return take_record().launches;
}

Replay PlacedModel::replay(const BatchShape& shape) {
    Plan plan(build(shape).graph, *backend_, *workspace_, PlanUse::repeatedly);
    Replay replay{.kernels = plan.kernels, .first = {}, .second = {}};
    for (std::vector<Launch>* launches : {&replay.first, &replay.second}) {
        plan.run();
        *launches = take_record().launches;
    }
    return replay;
}

std::vector<NodeLaunches> PlacedModel::by_node(const BatchShape& shape) {
    Plan plan(build(shape).graph, *backend_, *workspace_, PlanUse::sometimes);
    return run_by_node(plan);
}

std::vector<NodeLaunches> PlacedModel::by_node_apart(const BatchShape& shape) {
    Graph graph = build(shape).graph;
    make_all_outputs(graph);
    Plan plan(std::move(graph), *backend_, *workspace_, PlanUse::sometimes);
    return run_by_node(plan);
}

std::vector<NodeLaunches> PlacedModel::each_alone(const BatchShape& shape) {
    const Plan whole(build(shape).graph, *backend_, *workspace_, PlanUse::sometimes);
    std::vector<NodeLaunches> nodes;
    for (const Node& node : whole.graph().nodes()) {
        std::string refusal;
        cuda_stand_in::forget_allowed_memory();
        try {
            Plan(graph_of(node), *backend_, *workspace_, PlanUse::sometimes).run();
        } catch (const Error& error) {
            refusal = error.what();
        }
        nodes.push_back({node.name, take_record().launches, refusal});
    }
    return nodes;
}

/// The backend records an event before the first node and after each, and tells what each launched.
std::vector<NodeLaunches> PlacedModel::run_by_node(Plan& plan) {
    std::vector<NodeLaunches> nodes;
    std::vector<std::string> told;
    backend_->after_node = [&](const Node& node, double, const std::string& kernels) {
        nodes.push_back({node.name, {}, {}});
        told.push_back(kernels);
    };
    const std::shared_ptr<void> reset(nullptr, [&](void*) { backend_->after_node = nullptr; });
    plan.run();
    const cuda_stand_in::Record record = take_record();
    CHECK(record.marks.size() == nodes.size() + 1, "{} nodes, but {} marks", nodes.size(),
          record.marks.size());
    const auto at = [&](size_t mark) {
        return record.launches.begin() + static_cast<std::ptrdiff_t>(record.marks[mark]);
    };
    for (size_t i = 0; i < nodes.size(); ++i) {
        nodes[i].launches.assign(at(i), at(i + 1));
        CHECK(count_names(told[i]) == nodes[i].launches.size(), "node '{}': {} launches, told as '{}'",
              nodes[i].node, nodes[i].launches.size(), told[i]);
    }
    return nodes;
}

std::vector<Launch> joined(const std::vector<NodeLaunches>& nodes) {
    std::vector<Launch> all;
    for (const NodeLaunches& node : nodes) all.insert(all.end(), node.launches.begin(), node.launches.end());
    return all;
}

}  // namespace quern::test
