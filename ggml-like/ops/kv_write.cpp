#include "ggml-like/ops/kv_write.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

enum Input { kK, kV, kKNorm, kPositions, kRowSequence, kPages };

void write_row(const Node& node, int64_t t) {
    const auto& p = node.params<KvWriteParams>();
    const int32_t position = node.inputs[kPositions]->as<int32_t>()[t];
    const Tensor &pages = *node.inputs[kPages], &norms = *node.inputs[kKNorm];
    CHECK(position / kPageTokens < pages.shape[1],
          "[kv_write] {}: position {} is beyond the page table of {}", node.name, position, pages.shape[1]);
    const int64_t page =
        pages.row<int32_t>(node.inputs[kRowSequence]->as<int32_t>()[t])[position / kPageTokens];
    const cpu::HeadRotation rotation(p.rotary, position);
    for (size_t part = 0; part < 2; ++part) {
        const Tensor &x = *node.inputs[kK + part], &cache = *node.state[part];
        CHECK(page >= 0 && page < cache.shape[0], "[kv_write] {}: page {} of {}", node.name, page,
              describe(cache));
        const int64_t shared = x.shape[1] / norms.shape[0];
        std::vector<float> row(static_cast<size_t>(x.shape[2]));
        for (int64_t h = 0; h < x.shape[1]; ++h) {
            load_floats(x, t * x.stride[0] + h * x.stride[1], x.shape[2], row.data());
            if (part == 0) rotation.apply(norms.row<float>(h / shared), p.eps, row);
            store_floats(
                cache,
                page * cache.stride[0] + h * cache.stride[1] + position % kPageTokens * cache.stride[2],
                x.shape[2], row.data());
        }
    }
}

void run(const Node& node, cpu::Context& context) {
    const int32_t* sequence = node.inputs[kRowSequence]->as<int32_t>();
    context.pool.parallel_for(node.inputs[kK]->shape[0], 2, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t)
            if (sequence[t] >= 0) write_row(node, t);
    });
}

Cost cost(const Node& node) {
    const Tensor& k = *node.inputs[kK];
    return {.state_bytes = 2.0 * static_cast<double>(dtype_bytes(node.state[0]->dtype, k.elements())),
            .activation_bytes = 2 * cpu::dense_bytes(k)};
}

}  // namespace

const Op kKvWrite{"kv_write", run, cost};

void kv_write(Graph& g, std::string_view name, Tensor* k, Tensor* v, Tensor* k_norm, Tensor* k_cache,
              Tensor* v_cache, const Batch& batch, const KvWriteParams& params) {
    for (const Tensor* x : {k, v})
        CHECK(x->rank == 3 && x->stride[2] == 1 && x->shape[0] == k->shape[0] && x->shape[1] == k->shape[1] &&
                  x->shape[2] == k->shape[2],
              "[kv_write] {}: {} beside {}", name, describe(*x), describe(*k));
    const int64_t heads = k->shape[1], d = k->shape[2];
    CHECK(k_norm->rank == 2 && k_norm->dtype == DType::F32 && k_norm->contiguous() && k_norm->shape[1] == d &&
              heads % k_norm->shape[0] == 0,
          "[kv_write] {}: norms {} do not fit k {}", name, describe(*k_norm), describe(*k));
    for (const Tensor* cache : {k_cache, v_cache})
        CHECK(cache->rank == 4 && cache->shape[1] == heads && cache->shape[2] == kPageTokens &&
                  cache->shape[3] == d,
              "[kv_write] {}: cache {} does not fit k {}", name, describe(*cache), describe(*k));
    CHECK(params.rotary.dims() <= d, "[kv_write] {}: {} rotary dimensions of {}", name, params.rotary.dims(),
          d);
    g.add({.op = &kKvWrite,
           .name = std::string(name),
           .inputs = {k, v, k_norm, batch.positions, batch.row_sequence, batch.pages},
           .outputs = {},
           .state = {k_cache, v_cache},
           .parameters = params});
}

}  // namespace quern
