#include "ggml-like/ops/gated_delta_net.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

constexpr float kL2Eps = 1e-6f;

enum Input { kQkv, kA, kB, kDecayRate, kDtBias, kStart, kSlots, kPositions, kCommitted, kJournal };
enum State { kState, kJournalK, kJournalU, kJournalG };

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
          p_(node.params<GatedDeltaNetParams>()),
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

    void run() {
        const Tensor& state = *node_.state[kState];
        float* committed = state.as<float>() + slot_ * state.stride[0] + head_ * state.stride[1];
        if (i32(kPositions, begin_) == 0) std::fill(committed, committed + p_.value_dim * p_.key_dim, 0.0f);
        for (int32_t entry = 0; entry < committed_; ++entry) replay(committed, entry);
        std::vector<float> private_copy;  // journaling: the rows run on a copy, the committed state stays
        float* s = committed;
        if (journal_) {
            private_copy.assign(committed, committed + p_.value_dim * p_.key_dim);
            s = private_copy.data();
        }
        for (int32_t t = begin_; t < end_; ++t) step(s, t);
    }

  private:
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
        const Tensor &qkv = *node_.inputs[kQkv], &a = *node_.inputs[kA], &b = *node_.inputs[kB];
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
        const Tensor& o = *node_.outputs[0];
        store_floats(o, t * o.stride[0] + head_ * o.stride[1], p_.value_dim, v_.data());
    }

    const Node& node_;
    const cpu::DotKernels& dot_;
    const GatedDeltaNetParams& p_;
    int64_t head_, key_head_, slot_;
    int32_t begin_, end_, committed_;
    bool journal_;
    std::vector<float> q_, k_, v_;
};

void run(const Node& node, cpu::Context& context) {
    const auto& p = node.params<GatedDeltaNetParams>();
    const int64_t sequences = node.inputs[kSlots]->shape[0];
    const int64_t capacity = node.state.size() > 1 ? node.state[kJournalK]->shape[1] : 0;
    for (int64_t s = 0; s < sequences; ++s) {
        const int32_t* start = node.inputs[kStart]->as<int32_t>() + s;
        const int32_t committed = node.inputs[kCommitted]->as<int32_t>()[s];
        CHECK(committed >= 0 && committed <= capacity &&
                  (node.inputs[kJournal]->as<int32_t>()[s] == 0 || start[1] - start[0] <= capacity),
              "[gated_delta_net] {}: {} committed, {} rows, journal holds {}", node.name, committed,
              start[1] - start[0], capacity);
    }
    // Value heads that share a key head write the same journal_k; one worker runs them all.
    const int64_t group = p.value_heads / p.key_heads, units = sequences * p.key_heads;
    context.pool.parallel_for(units, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t s = unit / p.key_heads;
            const int32_t* start = node.inputs[kStart]->as<int32_t>() + s;
            if (start[0] == start[1]) continue;
            for (int64_t i = 0; i < group; ++i)
                Head(node, context.dot, s, unit % p.key_heads * group + i).run();
        }
    });
}

Cost cost(const Node& node) {
    const auto& p = node.params<GatedDeltaNetParams>();
    const double state = static_cast<double>(p.value_heads) * p.value_dim * p.key_dim;
    const Tensor& qkv = *node.inputs[kQkv];
    return {.state_bytes = 2 * 4 * state * static_cast<double>(node.inputs[kSlots]->shape[0]),
            .activation_bytes = cpu::dense_bytes(qkv) + cpu::dense_bytes(*node.outputs[0]),
            .flops = 7 * state * static_cast<double>(qkv.shape[0])};
}

}  // namespace

const Op kGatedDeltaNet{"gated_delta_net", run, cost};

Tensor* gated_delta_net(Graph& g, std::string_view name, Tensor* qkv, Tensor* a, Tensor* b,
                        Tensor* decay_rate, Tensor* dt_bias, const DeltaState& state, const Batch& batch,
                        const GatedDeltaNetParams& params) {
    const int64_t nv = params.value_heads;
    CHECK(params.key_heads > 0 && nv % params.key_heads == 0,
          "[gated_delta_net] {}: {} value heads over {} key heads", name, nv, params.key_heads);
    const int64_t width = 2 * params.key_heads * params.key_dim + nv * params.value_dim;
    CHECK(qkv->rank == 2 && qkv->stride[1] == 1 && qkv->shape[1] == width,
          "[gated_delta_net] {}: qkv {} should have {} columns", name, describe(*qkv), width);
    for (const Tensor* t : {a, b})
        CHECK(t->rank == 2 && t->stride[1] == 1 && t->shape[0] == qkv->shape[0] && t->shape[1] == nv,
              "[gated_delta_net] {}: gate {} should be [{}, {}]", name, describe(*t), qkv->shape[0], nv);
    for (const Tensor* t : {decay_rate, dt_bias})
        CHECK(t->rank == 1 && t->dtype == DType::F32 && t->shape[0] == nv,
              "[gated_delta_net] {}: {} should be F32 [{}]", name, describe(*t), nv);
    const Tensor& s = *state.state;
    CHECK(s.dtype == DType::F32 && s.rank == 4 && s.shape[1] == nv && s.shape[2] == params.value_dim &&
              s.shape[3] == params.key_dim && s.contiguous(),
          "[gated_delta_net] {}: state {} should be F32 [slots, {}, {}, {}]", name, describe(s), nv,
          params.value_dim, params.key_dim);
    Tensor* o = g.scratch(name, qkv->dtype, {qkv->shape[0], nv, params.value_dim});
    std::vector<Tensor*> states = {state.state};
    if (state.journal_k != nullptr)
        states.insert(states.end(), {state.journal_k, state.journal_u, state.journal_g});
    g.add({.op = &kGatedDeltaNet,
           .name = std::string(name),
           .inputs = {qkv, a, b, decay_rate, dt_bias, batch.start, batch.slots, batch.positions,
                      batch.committed, batch.journal},
           .outputs = {o},
           .state = std::move(states),
           .parameters = params});
    return o;
}

}  // namespace quern
