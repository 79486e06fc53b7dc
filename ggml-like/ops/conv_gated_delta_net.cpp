#include "ggml-like/ops/conv_gated_delta_net.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

constexpr float kL2Eps = 1e-6f;

enum Input {
    kU,
    kA,
    kB,
    kConv,
    kDecayRate,
    kDtBias,
    kPositions,
    kStart,
    kSlots,
    kCommitted,
    kJournal,
    kZ,
    kNorm
};
enum Output { kY, kO, kX, kWork };
enum State { kConvState, kState, kJournalK, kJournalU, kJournalG };

/// Runs one sequence over channels [begin, end). The window holds the last W-1 inputs, then the step's own.
void convolve(const Node& node, int64_t s, int64_t begin, int64_t end) {
    const Tensor &u = *node.inputs[kU], &w = *node.inputs[kConv], &ring = *node.state[kConvState],
                 &x = *node.outputs[kX];
    const int32_t* start = node.inputs[kStart]->as<int32_t>();
    const int64_t taps = w.shape[1], kept = taps - 1, rows = start[s + 1] - start[s], channels = end - begin;
    const int64_t slot = node.inputs[kSlots]->as<int32_t>()[s],
                  position = node.inputs[kPositions]->as<int32_t>()[start[s]];
    const auto ring_at = [&](int64_t p) {
        return slot * ring.stride[0] + p % ring.shape[1] * ring.stride[1] + begin;
    };
    std::vector<float> window(static_cast<size_t>((kept + rows) * channels), 0.0f);
    const auto line = [&](int64_t row) { return window.data() + row * channels; };
    for (int64_t r = 0; r < kept; ++r)
        if (const int64_t p = position - kept + r; p >= 0) load_floats(ring, ring_at(p), channels, line(r));
    for (int64_t r = 0; r < rows; ++r)
        load_floats(u, (start[s] + r) * u.stride[0] + begin, channels, line(kept + r));

    std::vector<float> out(static_cast<size_t>(channels));
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < channels; ++c) {
            float sum = 0;
            for (int64_t j = 0; j < taps; ++j) sum += w.as<float>()[(begin + c) * taps + j] * line(r + j)[c];
            out[static_cast<size_t>(c)] = cpu::silu(sum);
        }
        store_floats(x, (start[s] + r) * x.stride[0] + begin, channels, out.data());
    }
    for (int64_t r = std::max<int64_t>(0, rows - ring.shape[1]); r < rows; ++r)
        store_floats(ring, ring_at(position + r), channels, line(kept + r));
}

void run_convolution(const Node& node, cpu::Context& context) {
    const Tensor& starts = *node.inputs[kStart];
    for (int64_t s = 0; s + 1 < starts.shape[0]; ++s) {
        if (starts.as<int32_t>()[s + 1] == starts.as<int32_t>()[s]) continue;
        context.pool.parallel_for(node.inputs[kU]->shape[1], 256,
                                  [&](int64_t begin, int64_t end, int) { convolve(node, s, begin, end); });
    }
}

void normalize(float* x, int64_t n, float scale) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
    const float r = scale / std::sqrt(sum + kL2Eps);
    for (int64_t i = 0; i < n; ++i) x[i] *= r;
}

/// One value head of one sequence: its state, its journal, its rows.
class Head {
  public:
    Head(const Node& node, const cpu::DotKernels& dot, int64_t sequence, int64_t head)
        : node_(node),
          dot_(dot),
          p_(node.params<ConvGatedDeltaNetParams>()),
          head_(head),
          key_head_(head / (p_.value_heads / p_.key_heads)),
          slot_(i32(kSlots, sequence)),
          begin_(i32(kStart, sequence)),
          end_(i32(kStart, sequence + 1)),
          committed_(i32(kCommitted, sequence)),
          journal_(i32(kJournal, sequence) != 0),
          q_(static_cast<size_t>(p_.key_dim)),
          k_(q_.size()),
          v_(static_cast<size_t>(p_.value_dim)) {}

    /// All heads of a key head commit before one of them runs: they share its journal entries.
    void commit() {
        float* s = state();
        if (i32(kPositions, begin_) == 0) std::fill(s, s + p_.value_dim * p_.key_dim, 0.0f);
        for (int32_t entry = 0; entry < committed_; ++entry) replay(s, entry);
    }

    void run() {
        std::vector<float> private_copy;  // journaling: the rows run on a copy, the committed state stays
        float* s = state();
        if (journal_) {
            private_copy.assign(s, s + p_.value_dim * p_.key_dim);
            s = private_copy.data();
        }
        for (int32_t t = begin_; t < end_; ++t) step(s, t);
    }

  private:
    float* state() const {
        const Tensor& t = *node_.state[kState];
        return t.as<float>() + slot_ * t.stride[0] + head_ * t.stride[1];
    }

    int32_t i32(Input input, int64_t i) const { return node_.inputs[input]->as<int32_t>()[i]; }

    float* journal_at(State which, int64_t entry, int64_t head) const {
        const Tensor& t = *node_.state[which];
        return t.as<float>() + slot_ * t.stride[0] + entry * t.stride[1] + head * t.stride[2];
    }

    void replay(float* s, int32_t entry) {
        const float* k = journal_at(kJournalK, entry, key_head_);
        const float* u = journal_at(kJournalU, entry, head_);
        const float decay = std::exp(*journal_at(kJournalG, entry, head_));
        for (int v = 0; v < p_.value_dim; ++v) {
            float* row = s + v * p_.key_dim;
            for (int i = 0; i < p_.key_dim; ++i) row[i] *= decay;
            dot_.axpy(u[v], k, row, p_.key_dim);
        }
    }

    void step(float* s, int32_t t) {
        const Tensor &qkv = *node_.outputs[kX], &a = *node_.inputs[kA], &b = *node_.inputs[kB];
        const int64_t row = t * qkv.stride[0], keys = static_cast<int64_t>(p_.key_heads) * p_.key_dim;
        load_floats(qkv, row + key_head_ * p_.key_dim, p_.key_dim, q_.data());
        load_floats(qkv, row + keys + key_head_ * p_.key_dim, p_.key_dim, k_.data());
        load_floats(qkv, row + 2 * keys + head_ * p_.value_dim, p_.value_dim, v_.data());
        normalize(q_.data(), p_.key_dim, 1.0f / std::sqrt(static_cast<float>(p_.key_dim)));
        normalize(k_.data(), p_.key_dim, 1.0f);

        float a_t, b_t;
        load_floats(a, t * a.stride[0] + head_, 1, &a_t);
        load_floats(b, t * b.stride[0] + head_, 1, &b_t);
        const float g = node_.inputs[kDecayRate]->as<float>()[head_] *
                        cpu::softplus(a_t + node_.inputs[kDtBias]->as<float>()[head_]);
        const float decay = std::exp(g), beta = cpu::sigmoid(b_t);

        if (journal_) {
            std::copy(k_.begin(), k_.end(), journal_at(kJournalK, t - begin_, key_head_));
            *journal_at(kJournalG, t - begin_, head_) = g;
        }
        for (int v = 0; v < p_.value_dim; ++v) {
            float* r = s + v * p_.key_dim;
            for (int i = 0; i < p_.key_dim; ++i) r[i] *= decay;
            const float u = beta * (v_[static_cast<size_t>(v)] - dot_.dot_f32(r, k_.data(), p_.key_dim));
            dot_.axpy(u, k_.data(), r, p_.key_dim);
            if (journal_) journal_at(kJournalU, t - begin_, head_)[v] = u;
            v_[static_cast<size_t>(v)] = dot_.dot_f32(r, q_.data(), p_.key_dim);  // v is spent: it becomes o
        }
        const Tensor& o = *node_.outputs[kO];
        store_floats(o, t * o.stride[0] + head_ * o.stride[1], p_.value_dim, v_.data());
    }

    const Node& node_;
    const cpu::DotKernels& dot_;
    const ConvGatedDeltaNetParams& p_;
    int64_t head_, key_head_, slot_;
    int32_t begin_, end_, committed_;
    bool journal_;
    std::vector<float> q_, k_, v_;
};

void run_heads(const Node& node, cpu::Context& context) {
    const auto& p = node.params<ConvGatedDeltaNetParams>();
    const int64_t sequences = node.inputs[kSlots]->shape[0];
    const int64_t capacity = node.state.size() > 2 ? node.state[kJournalK]->shape[1] : 0;
    for (int64_t s = 0; s < sequences; ++s) {
        const int32_t* start = node.inputs[kStart]->as<int32_t>() + s;
        const int32_t committed = node.inputs[kCommitted]->as<int32_t>()[s];
        const bool journals = node.inputs[kJournal]->as<int32_t>()[s] != 0;
        CHECK(committed >= 0 && committed <= capacity && (!journals || start[1] - start[0] <= capacity),
              "[conv_gated_delta_net] {}: {} committed, {} rows, journal holds {}", node.name, committed,
              start[1] - start[0], capacity);
        CHECK(!journals || p.drafts, "[conv_gated_delta_net] {}: drafts in a step without", node.name);
    }
    // Value heads that share a key head write the same journal_k; one worker runs them all.
    const int64_t group = p.value_heads / p.key_heads, units = sequences * p.key_heads;
    context.pool.parallel_for(units, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t s = unit / p.key_heads;
            const int32_t* start = node.inputs[kStart]->as<int32_t>() + s;
            if (start[0] == start[1]) continue;
            const auto head = [&](int64_t i) {
                return Head(node, context.dot, s, unit % p.key_heads * group + i);
            };
            for (int64_t i = 0; i < group; ++i) head(i).commit();
            for (int64_t i = 0; i < group; ++i) head(i).run();
        }
    });
}

void run(const Node& node, cpu::Context& context) {
    run_convolution(node, context);
    run_heads(node, context);
    const Tensor &starts = *node.inputs[kStart], &o = *node.outputs[kO];
    const int64_t rows = starts.as<int32_t>()[starts.shape[0] - 1];
    std::memset(o.as<std::byte>() + dtype_bytes(o.dtype, rows * o.stride[0]), 0,
                static_cast<size_t>(dtype_bytes(o.dtype, (o.shape[0] - rows) * o.stride[0])));
    cpu::gated_rms_norm(o, *node.inputs[kZ], *node.inputs[kNorm], node.params<ConvGatedDeltaNetParams>().eps,
                        *node.outputs[kY], context);
}

Cost cost(const Node& node) {
    const auto& p = node.params<ConvGatedDeltaNetParams>();
    const Tensor &u = *node.inputs[kU], &ring = *node.state[kConvState];
    const double state = static_cast<double>(p.value_heads) * p.value_dim * p.key_dim;
    const double sequences = static_cast<double>(node.inputs[kSlots]->shape[0]);
    const double window =
        static_cast<double>(dtype_bytes(ring.dtype, node.inputs[kConv]->shape[1] * ring.shape[2]));
    return {.weight_bytes = cpu::dense_bytes(*node.inputs[kConv]),
            .state_bytes = sequences * (2 * 4 * state + window),
            .activation_bytes = cpu::dense_bytes(u) + 2 * cpu::dense_bytes(*node.outputs[kY]),
            .flops = (7 * state + 2.0 * static_cast<double>(node.inputs[kConv]->elements())) *
                     static_cast<double>(u.shape[0])};
}

void check_inputs(std::string_view name, const DeltaInputs& in, const ConvGatedDeltaNetParams& p) {
    const int64_t nv = p.value_heads;
    CHECK(p.key_heads > 0 && nv % p.key_heads == 0,
          "[conv_gated_delta_net] {}: {} value heads over {} key heads", name, nv, p.key_heads);
    const Tensor &u = *in.u, &conv = *in.conv;
    const int64_t width = 2 * p.key_heads * p.key_dim + nv * p.value_dim;
    CHECK(u.rank == 2 && u.stride[1] == 1 && u.shape[1] == width,
          "[conv_gated_delta_net] {}: u {} should have {} columns", name, describe(u), width);
    CHECK(conv.rank == 2 && conv.dtype == DType::F32 && conv.shape[0] == width,
          "[conv_gated_delta_net] {}: convolution {} does not fit u {}", name, describe(conv), describe(u));
    for (const Tensor* t : {in.a, in.b})
        CHECK(t->rank == 2 && t->stride[1] == 1 && t->shape[0] == u.shape[0] && t->shape[1] == nv &&
                  t->stride[0] == in.a->stride[0],
              "[conv_gated_delta_net] {}: gate {} should be [{}, {}]", name, describe(*t), u.shape[0], nv);
    for (const Tensor* t : {in.decay_rate, in.dt_bias})
        CHECK(t->rank == 1 && t->dtype == DType::F32 && t->shape[0] == nv,
              "[conv_gated_delta_net] {}: {} should be F32 [{}]", name, describe(*t), nv);
    const Tensor &z = *in.z, &norm = *in.norm;
    CHECK(z.rank == 3 && z.dtype == u.dtype && z.shape[0] == u.shape[0] && z.shape[1] == nv &&
              z.shape[2] == p.value_dim && z.stride[2] == 1 && z.stride[1] == p.value_dim,
          "[conv_gated_delta_net] {}: gate {} should be [{}, {}, {}]", name, describe(z), u.shape[0], nv,
          p.value_dim);
    CHECK(norm.rank == 1 && norm.dtype == DType::F32 && norm.shape[0] == p.value_dim,
          "[conv_gated_delta_net] {}: norm {} should be F32 [{}]", name, describe(norm), p.value_dim);
}

void check_state(std::string_view name, const DeltaInputs& in, const DeltaState& state,
                 const ConvGatedDeltaNetParams& p) {
    const Tensor &ring = *state.conv, &s = *state.delta;
    const int64_t drafted = state.journal_k != nullptr ? std::max<int64_t>(1, state.journal_k->shape[1]) : 1;
    CHECK(ring.rank == 3 && ring.contiguous() && ring.shape[1] >= in.conv->shape[1] - 1 + drafted &&
              ring.shape[2] == in.u->shape[1],
          "[conv_gated_delta_net] {}: state {} does not fit u {}, {} taps and a journal of {}", name,
          describe(ring), describe(*in.u), in.conv->shape[1], drafted);
    CHECK(s.dtype == DType::F32 && s.rank == 4 && s.shape[1] == p.value_heads && s.shape[2] == p.value_dim &&
              s.shape[3] == p.key_dim && s.contiguous(),
          "[conv_gated_delta_net] {}: state {} should be F32 [slots, {}, {}, {}]", name, describe(s),
          p.value_heads, p.value_dim, p.key_dim);
}

}  // namespace

const Op kConvGatedDeltaNet{"conv_gated_delta_net", run, cost};

Tensor* conv_gated_delta_net(Graph& g, std::string_view name, const DeltaInputs& in, const DeltaState& state,
                             const Batch& batch, const ConvGatedDeltaNetParams& params) {
    check_inputs(name, in, params);
    check_state(name, in, state, params);
    const int64_t tokens = in.u->shape[0], nv = params.value_heads;
    Tensor* y = g.scratch(name, in.u->dtype, {tokens, nv * params.value_dim});
    Tensor* o = g.scratch(fmt::format("{}.o", name), in.u->dtype, {tokens, nv, params.value_dim});
    Tensor* x = g.scratch(fmt::format("{}.x", name), in.u->dtype, {tokens, in.u->shape[1]});
    const int64_t bytes = delta_work_bytes(batch.kind, tokens, batch.slots->shape[0], params);
    Tensor* work = g.scratch(fmt::format("{}.work", name), DType::U8, {std::max<int64_t>(1, bytes)});
    ConvGatedDeltaNetParams own = params;
    own.kind = batch.kind;
    std::vector<Tensor*> states = {state.conv, state.delta};
    if (state.journal_k != nullptr)
        states.insert(states.end(), {state.journal_k, state.journal_u, state.journal_g});
    Node node{.op = &kConvGatedDeltaNet,
              .name = std::string(name),
              .inputs = {in.u, in.a, in.b, in.conv, in.decay_rate, in.dt_bias, batch.positions, batch.start,
                         batch.slots, batch.committed, batch.journal, in.z, in.norm},
              .outputs = {y, o, x, work},
              .state = std::move(states),
              .parameters = own};
    if (const int64_t counts = delta_told_counts(tokens, batch.slots->shape[0], own); counts > 0)
        node.outputs.push_back(g.zeros(fmt::format("{}.told", name), DType::I32, {counts}));
    g.add(std::move(node));
    return y;
}

}  // namespace quern
