#include "tools/engine/model_trace.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ggml-like/parallel.h"
#include "tools/engine/state_pool.h"
#include "tools/engine/step_inputs.h"

namespace quern {
namespace {

constexpr size_t kIds = 2;  // of moe_gate_up's outputs (MoeGateUpResult)

/// Values that a thread looks at in one go: a long prompt of a large model has some hundred million of them.
constexpr size_t kPart = 1 << 18;

size_t parts_of(size_t values) { return (values + kPart - 1) / kPart; }

bool writes_residual(const Node& node) {
    return node.op == &kEmbed || node.op == &kLinearAdd || node.op == &kMoeDown;
}

/// Outputs of a node that the next one reads as activations. Ops that write the residual stream also write its
/// normed form, moe_gate_up both the routed experts' and the shared one's.
std::vector<Tensor*> activations(const Node& node) {
    const bool two = writes_residual(node) || node.op == &kMoeGateUp;
    return {node.outputs.begin(), node.outputs.begin() + (two ? 2 : 1)};
}

void keep_outputs(Graph& graph) {
    for (const Node& node : graph.nodes()) {
        if (node.layer < 0 && node.op != &kEmbed) continue;
        for (Tensor* t : activations(node)) graph.output(t);
        if (node.op == &kMoeGateUp) graph.output(node.outputs[kIds]);
    }
}

std::vector<float> read_floats(Backend& backend, const Tensor& t) {
    std::vector<std::byte> bytes(static_cast<size_t>(t.bytes()));
    backend.download(bytes.data(), t.data, t.bytes());
    Tensor here = t;
    here.data = bytes.data();
    std::vector<float> values(static_cast<size_t>(t.elements()));
    for_each_parallel(backend.threads(), parts_of(values.size()), [&](size_t i) {
        const size_t begin = i * kPart;
        load_floats(here, static_cast<int64_t>(begin),
                    static_cast<int64_t>(std::min(kPart, values.size() - begin)), values.data() + begin);
    });
    return values;
}

std::vector<int32_t> read_ids(Backend& backend, const Tensor& t) {
    std::vector<int32_t> ids(static_cast<size_t>(t.elements()));
    backend.download(ids.data(), t.data, t.bytes());
    return ids;
}

void measure(LayerTrace& layer, const std::string& node, const std::vector<float>& values, int threads) {
    struct Found {
        float largest = 0;
        int64_t not_finite = 0;
    };
    std::vector<Found> parts(parts_of(values.size()));
    for_each_parallel(threads, parts.size(), [&](size_t i) {
        const size_t end = std::min(values.size(), (i + 1) * kPart);
        for (size_t k = i * kPart; k < end; ++k) {
            if (!std::isfinite(values[k]))
                ++parts[i].not_finite;
            else
                parts[i].largest = std::max(parts[i].largest, std::fabs(values[k]));
        }
    });
    for (const Found& f : parts) {
        layer.not_finite += f.not_finite;
        if (f.largest <= layer.largest) continue;
        layer.largest = f.largest;
        layer.largest_in = node;
    }
}

void read_node(Backend& backend, const Node& node, ModelTrace& trace) {
    if (node.op == &kEmbed) {
        trace.embedding = read_floats(backend, *node.outputs[0]);
        return;
    }
    if (node.layer < 0) return;
    LayerTrace& layer = trace.layers[static_cast<size_t>(node.layer)];
    const std::vector<Tensor*> list = activations(node);
    for (size_t i = 0; i < list.size(); ++i) {
        std::vector<float> values = read_floats(backend, *list[i]);
        measure(layer, node.name, values, backend.threads());
        // The layer's last node comes last.
        if (i == 0 && writes_residual(node)) layer.residual = std::move(values);
    }
    if (node.op == &kMoeGateUp) layer.experts = read_ids(backend, *node.outputs[kIds]);
}

}  // namespace

double ModelTrace::rms(size_t layer) const {
    double sum = 0;
    for (const float v : layers[layer].residual) sum += static_cast<double>(v) * static_cast<double>(v);
    return std::sqrt(sum / static_cast<double>(layers[layer].residual.size()));
}

ModelTrace trace_prompt(const Model& model, Backend& backend, std::span<const int32_t> tokens, bool logits) {
    const auto count = static_cast<int64_t>(tokens.size());
    CHECK(count >= 1 && count <= kMaxTraceTokens, "[trace_prompt] {} tokens, expected 1 to {}", count,
          kMaxTraceTokens);
    const DType activation = backend.activation_dtype();
    const int64_t pages = (count + kPageTokens - 1) / kPageTokens;
    StatePool pool(backend, model.state_specs({.kv = activation, .conv = activation}), 1, pages);
    Sequence sequence;
    sequence.tokens.assign(tokens.begin(), tokens.end());
    sequence.state = pool.acquire();
    pool.grow(sequence.state, count);
    StepPlan step{.shape = {.kind = StepKind::prompt,
                            .tokens = count,
                            .sequences = 1,
                            .logit_rows = logits ? count : 1,
                            .pages = pages,
                            .vocab = model.info().vocab}};
    BuiltGraph built = model.build(step.shape, pool, activation);
    keep_outputs(built.graph);
    step.batch = built.batch;
    step.plan = std::make_unique<Plan>(std::move(built.graph), backend);
    fill_inputs(step, {{.sequence = &sequence,
                        .begin = 0,
                        .count = count,
                        .logit_rows = step.shape.logit_rows,
                        .last = true}});
    step.plan->run();
    backend.synchronize();
    ModelTrace trace{.tokens = count, .activation = activation};
    trace.layers.resize(static_cast<size_t>(model.info().layers));
    for (const Node& node : step.plan->graph().nodes()) read_node(backend, node, trace);
    if (logits) trace.logits = read_floats(backend, *built.logits);
    return trace;
}

}  // namespace quern
