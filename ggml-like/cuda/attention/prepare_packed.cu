// What comes before attention over packed caches, for prompts, and for answers where generic: q -> rotated, k and v -> packed
// rows.
//
//   block = one row, or of an answer's row four heads; 4 warps, each a head of q, k or v at a time (prepare.cuh, packed.cuh),
//           with the loads of two more under way
//
// With keys in tq4, q and k are multiplied by the Hadamard matrix. Shared memory: a head a warp (4 KB). Bound: bytes of q, k
// and v; of one row latency. Limits: head_dim a multiple of 8 up to 256 that the formats fit.
#include "ggml-like/cuda/attention/pack_rows.cuh"
#include "ggml-like/cuda/attention/prepare.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

/// Head `head` of q, then of k, then of v.
__device__ __forceinline__ const bf16* source(const AttentionCall& c, int t, int head) {
    if (head < c.heads) return c.q.at(t, head);
    head -= c.heads;
    return head < c.kv_heads ? c.k.at(t, head) : c.v.at(t, head - c.kv_heads);
}

/// What a warp does with a head's eight elements a lane, at `place` of the caches.
struct Preparer {
    const AttentionCall& c;
    const Elements& elements;
    int t, lane;
    int64_t page;
    int place;
    float* shared;

    __device__ __forceinline__ void query(int head, const uint4& raw) const {
        float x[8];
        elements.norm_rope(c, raw, true, lane, shared, x);
        if (c.k_packing == kv::Packing::centroids) packed::hadamard(x, c.head_dim, lane);
        bf16* to = c.rotated + (static_cast<int64_t>(t) * c.heads + head) * c.head_dim;
        if (lane * 8 < c.head_dim) *reinterpret_cast<uint4*>(to + lane * 8) = pack8(x);
    }
    __device__ __forceinline__ void key_or_value(bool is_v, int kv_head, const uint4& raw) const {
        float x[8];
        if (is_v) {
            unpack8(raw, x);
        } else {
            elements.norm_rope(c, raw, false, lane, shared, x);
            if (c.k_packing == kv::Packing::centroids) packed::hadamard(x, c.head_dim, lane);
        }
        const packed::Block layout(is_v ? c.v_layout : c.k_layout);
        char* cache = reinterpret_cast<char*>(is_v ? c.v_cache : c.k_cache);
        const kv::Packing packing = is_v ? c.v_packing : c.k_packing;
        packed::pack_row(packing, x, c.head_dim, (is_v ? c.v_scale : c.k_scale)[kv_head % kScales], lane,
                         packed::RowAt(layout, cache + (page * c.kv_heads + kv_head) * layout.bytes, place,
                                       lane * packed::lane_bytes(packing)));
    }
};

__global__ void __launch_bounds__(kThreads)
    attention_prepare_packed_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ __align__(16) float shared[kWarps][kMaxHeadDim];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t = blockIdx.x, sequence = c.row_sequence[t], position = c.positions[t];
    const int64_t page = sequence < 0 ? 0 : c.pages[sequence * c.page_row + position / kKeysPerPage];
    const Elements elements(c, lane * 8, t, position);
    const Preparer prepare{c, elements, t, lane, page, position % kKeysPerPage, shared[warp]};
    wait_for_predecessor();
    if (sequence < 0) return;
    const int all = c.heads + 2 * c.kv_heads, apart = kWarps * static_cast<int>(gridDim.y);
    const auto load = [&](int head) {
        return lane * 8 < c.head_dim
                   ? *reinterpret_cast<const uint4*>(source(c, t, min(head, all - 1)) + lane * 8)
                   : uint4{};
    };
    int head = blockIdx.y * kWarps + warp + (t >= c.from[sequence] ? 0 : c.heads);
    uint4 raw = load(head), next = load(head + apart);
#pragma unroll 1
    for (; head < all; head += apart) {
        const uint4 after = load(head + 2 * apart);
        if (head < c.heads)
            prepare.query(head, raw);
        else
            prepare.key_or_value(head >= c.heads + c.kv_heads, (head - c.heads) % c.kv_heads, raw);
        raw = next, next = after;
    }
}

}  // namespace

void attention_prepare_packed(const AttentionCall& c, Context& context) {
    // Few rows: a head a warp, so that it takes no longer than one head does.
    const int heads = c.heads + 2 * c.kv_heads, groups = c.answers ? (heads + kWarps - 1) / kWarps : 1;
    launch(context, "gated_attention prepare packed", attention_prepare_packed_kernel, dim3(c.tokens, groups),
           dim3(kThreads), 0, c);
}

}  // namespace quern::cuda::attention
