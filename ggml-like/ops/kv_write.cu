// kv_write on the GPU: a warp a head of a row, four in a block.
#include "ggml-like/ops/kv_write.h"

#include "ggml-like/cuda/attention/rotate_heads.cuh"
#include "ggml-like/cuda/drafter_ops.h"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda {

using namespace ptx;
using namespace attention;

namespace {

constexpr const char* kName = "kv_write";
constexpr int kWarps = 4;

struct KvCall {
    HeadRows k, v;
    const float* norms;
    const int *positions, *row_sequence, *pages;
    int64_t page_row;
    bf16 *k_cache, *v_cache;
    int heads, shared, head_dim;  // `shared`: heads of one norm
    float eps;
    HeadTurns turns;
};

__global__ void __launch_bounds__(32 * kWarps) kv_write_kernel(const __grid_constant__ KvCall c) {
    allow_successor();
    const int t = blockIdx.x, head = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int sequence = c.row_sequence[t], position = c.positions[t], d = c.head_dim;
    wait_for_predecessor();
    if (sequence < 0 || head >= c.heads) return;
    const int64_t page = c.pages[sequence * c.page_row + position / kKeysPerPage];
    const int64_t to = ((page * c.heads + head) * kKeysPerPage + position % kKeysPerPage) * d;
    rotate_head(c.turns, position, d, c.eps, c.norms + head / c.shared * d, c.k.at(t, head), c.k_cache + to,
                lane);
    const bf16* v = c.v.at(t, head);
    for (int i = lane; i < d; i += 32) c.v_cache[to + i] = v[i];
}

}  // namespace

void kv_write(const Node& node, Context& context) {
    const auto& in = node.inputs;
    const auto& p = node.params<KvWriteParams>();
    const Tensor &k = *in[0], &v = *in[1], &norms = *in[2];
    if (k.dtype != DType::BF16 || v.dtype != DType::BF16) unsupported(kName, "activations other than BF16");
    for (const Tensor* cache : node.state)
        if (cache->dtype != DType::BF16 || !cache->contiguous())
            unsupported(kName, "a cache that is not BF16 [pages, N, 64, d]");
    KvCall c{};
    c.k = {k.as<const bf16>(), k.stride[0], k.stride[1]},
    c.v = {v.as<const bf16>(), v.stride[0], v.stride[1]};
    c.norms = norms.as<const float>();
    c.positions = in[3]->as<const int>(), c.row_sequence = in[4]->as<const int>();
    c.pages = in[5]->as<const int>(), c.page_row = in[5]->stride[0];
    c.k_cache = node.state[0]->as<bf16>(), c.v_cache = node.state[1]->as<bf16>();
    c.heads = static_cast<int>(k.shape[1]), c.head_dim = static_cast<int>(k.shape[2]);
    c.shared = static_cast<int>(k.shape[1] / norms.shape[0]), c.eps = p.eps;
    if (p.rotary.dims() != c.head_dim || c.head_dim > kMaxHeadDim)
        unsupported(kName, "heads that are rotated in part, or a head_dim beyond 256");
    set_head_turns(c.turns, p.rotary.frequency.data(), c.head_dim / 2, p.rotary.scale);
    launch(context, kName, kv_write_kernel,
           dim3(static_cast<unsigned>(k.shape[0]), static_cast<unsigned>((c.heads + kWarps - 1) / kWarps)),
           dim3(32 * kWarps), 0, c);
}

}  // namespace quern::cuda
