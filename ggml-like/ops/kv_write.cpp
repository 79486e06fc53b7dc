#include "ggml-like/ops/kv_write.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context&) {
    const Tensor& positions = *node.inputs[2];
    const Tensor& row_sequence = *node.inputs[3];
    const Tensor& pages = *node.inputs[4];
    const int64_t heads = node.inputs[0]->shape[1], width = node.inputs[0]->shape[2];
    std::vector<float> row(static_cast<size_t>(width));
    for (int64_t t = 0; t < node.inputs[0]->shape[0]; ++t) {
        const int32_t sequence = row_sequence.as<int32_t>()[t];
        if (sequence < 0) continue;
        const int32_t position = positions.as<int32_t>()[t];
        CHECK(position / kPageTokens < pages.shape[1],
              "[kv_write] {}: position {} is beyond the page table of {}", node.name, position,
              pages.shape[1]);
        const int64_t page = pages.row<int32_t>(sequence)[position / kPageTokens];
        for (size_t part = 0; part < 2; ++part) {  // k, then v
            const Tensor &x = *node.inputs[part], &cache = *node.state[part];
            CHECK(page >= 0 && page < cache.shape[0], "[kv_write] {}: page {} of {}", node.name, page,
                  describe(cache));
            for (int64_t h = 0; h < heads; ++h) {
                load_floats(x, t * x.stride[0] + h * x.stride[1], width, row.data());
                store_floats(
                    cache,
                    page * cache.stride[0] + h * cache.stride[1] + position % kPageTokens * cache.stride[2],
                    width, row.data());
            }
        }
    }
}

Cost cost(const Node& node) {
    const Tensor& k = *node.inputs[0];
    return {.state_bytes = 2.0 * static_cast<double>(dtype_bytes(node.state[0]->dtype, k.elements())),
            .activation_bytes = 2 * cpu::dense_bytes(k)};
}

}  // namespace

const Op kKvWrite{"kv_write", run, cost};

void kv_write(Graph& g, std::string_view name, Tensor* k, Tensor* v, Tensor* k_cache, Tensor* v_cache,
              const Batch& batch) {
    CHECK(k->rank == 3 && v->rank == 3 && k->stride[2] == 1 && v->stride[2] == 1 &&
              k->shape[0] == v->shape[0] && k->shape[1] == v->shape[1] && k->shape[2] == v->shape[2],
          "[kv_write] {}: k {} and v {} differ", name, describe(*k), describe(*v));
    for (const Tensor* cache : {k_cache, v_cache})
        CHECK(cache->rank == 4 && cache->shape[1] == k->shape[1] && cache->shape[2] == kPageTokens &&
                  cache->shape[3] == k->shape[2],
              "[kv_write] {}: cache {} does not fit k {}", name, describe(*cache), describe(*k));
    g.add({.op = &kKvWrite,
           .name = std::string(name),
           .inputs = {k, v, batch.positions, batch.row_sequence, batch.pages},
           .state = {k_cache, v_cache}});
}

}  // namespace quern
