// What comes before attention over packed caches, for answers and prompts: q -> rotated, k and v -> packed rows.
//
//   block = one row; 4 warps, each a head of q, k or v at a time (prepare.cuh, packed.cuh); loads of five under way
//
// With keys in tq4, q and k are multiplied by the Hadamard matrix. Shared memory: a head a warp (4 KB). Bound: bytes of q, k
// and v; of one row latency. Limits: head_dim a multiple of 8 up to 256 that the formats fit.
#include "ggml-like/cuda/attention/packed.cuh"
#include "ggml-like/cuda/attention/prepare.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kAhead = 5;  // heads of a warp whose loads are under way

/// Head `head` of q, then of k, then of v.
__device__ __forceinline__ const bf16* source(const AttentionCall& c, int t, int head) {
    if (head < c.heads) return c.q.at(t, head);
    head -= c.heads;
    return head < c.kv_heads ? c.k.at(t, head) : c.v.at(t, head - c.kv_heads);
}

__global__ void __launch_bounds__(kThreads)
    attention_prepare_packed_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ __align__(16) float shared[kWarps][kMaxHeadDim];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t = blockIdx.x, sequence = c.row_sequence[t], position = c.positions[t], d = c.head_dim;
    const int64_t page = sequence < 0 ? 0 : c.pages[sequence * c.page_row + position / kKeysPerPage];
    const Elements elements(c, lane * 8, t, position);
    const packed::Block key_block(c.k_layout), value_block(c.v_layout);
    const bool rotates = c.k_packing == kv::Packing::centroids;
    wait_for_predecessor();
    if (sequence < 0) return;
    const int all = c.heads + 2 * c.kv_heads;
    for (int first = warp; first < all; first += kAhead * kWarps) {
        uint4 raw[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            raw[i] = lane * 8 < d ? *reinterpret_cast<const uint4*>(
                                        source(c, t, min(first + i * kWarps, all - 1)) + lane * 8)
                                  : uint4{};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int head = first + i * kWarps;
            if (head >= all) break;
            const int kv_head = (head - c.heads) % c.kv_heads;
            const bool is_q = head < c.heads, is_v = head >= c.heads + c.kv_heads;
            float x[8];
            unpack8(raw[i], x);
            if (!is_v) {
                elements.norm_rope(c, raw[i], is_q, lane, shared[warp], x);
                if (rotates) packed::hadamard(x, d, lane);
            }
            if (is_q) {
                bf16* to = c.rotated + (static_cast<int64_t>(t) * c.heads + head) * d;
                if (lane * 8 < d) *reinterpret_cast<uint4*>(to + lane * 8) = pack8(x);
                continue;
            }
            char* cache = reinterpret_cast<char*>(is_v ? c.v_cache : c.k_cache);
            char* block = cache + (page * c.kv_heads + kv_head) * (is_v ? value_block : key_block).bytes;
            packed::pack_row(is_v ? c.v_packing : c.k_packing, is_v ? value_block : key_block, x, d,
                             (is_v ? c.v_scale : c.k_scale)[kv_head % kScales], lane, block,
                             position % kKeysPerPage);
        }
    }
}

}  // namespace

void attention_prepare_packed(const AttentionCall& c, Context& context) {
    launch(context, "gated_attention prepare packed", attention_prepare_packed_kernel, dim3(c.tokens),
           dim3(kThreads), 0, c);
}

}  // namespace quern::cuda::attention
