// moe_gate_up on the GPU.
//   few rows: a tile of 16 packed rows holds 8 rows of gate and the same 8 of up; tiles of all needed experts and of the
//     shared one form one list that the blocks walk (few_rows.cuh); SiLU and product at the end of a tile
//   many rows: grouped tiled product (cuda/gemm.h)
// Traffic of few rows: the weights of each needed expert once.
#include "ggml-like/ops/moe_gate_up.h"

#include "ggml-like/cuda/expert_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"

namespace quern::cuda {
namespace {

struct GateUp {
    PackedExperts experts;  // tiles = 0: none in this launch
    Part shared;            // tiles = 0: none in this launch
    int chunks;
    const int *ids, *groups;
    int rows, used, expert_count;
    bf16 *routed, *shared_out;  // [rows * used, F], [rows, Fs]
};

/// The chunks of one warp: items are the shared tiles, then the tiles of expert after expert.
struct ItemSource {
    const GateUp& a;
    const ExpertList& list;
    int split, part, steps, item, stride, items, step = 0;

    __device__ ItemSource(const GateUp& arguments, const ExpertList& experts, int warp)
        : a(arguments), list(experts) {
        split = warps_per_tile(a.chunks);
        part = warp & (split - 1);
        steps = (a.chunks + split - 1) / split;
        const int group = kWarps / split;
        item = blockIdx.x * group + warp / split;
        stride = gridDim.x * group;
        items = a.shared.tiles + list.count * a.experts.tiles;
    }
    __device__ __forceinline__ const uint8_t* next() {
        const int chunk = part + step * split;
        const uint8_t* from = nullptr;
        if (item < items && chunk < a.chunks) {
            if (item < a.shared.tiles) {
                from = a.shared.data + (static_cast<int64_t>(item) * a.chunks + chunk) * chunk_bytes(a.shared.kind);
            } else {
                const int i = item - a.shared.tiles, expert = list.expert[i / a.experts.tiles];
                from = a.experts.data + expert * a.experts.expert_bytes +
                       (static_cast<int64_t>(i % a.experts.tiles) * a.chunks + chunk) * chunk_bytes(a.experts.kind);
            }
        }
        if (++step == steps) {
            step = 0;
            item += stride;
        }
        return from;
    }
};

/// Where an item's columns come from and its results go.
struct Item {
    const int* pair;  // null: the shared expert, column n is row n
    int columns, tile;
    const float* factor;  // of the tile's 16 rows
    bf16* out;
    int width;

    __device__ __forceinline__ Item(const GateUp& a, const ExpertList& list, int item) {
        if (item < a.shared.tiles) {
            pair = nullptr, columns = a.rows, tile = item;
            factor = a.shared.factor + tile * kTileRows;
            out = a.shared_out, width = a.shared.rows / 2;
            return;
        }
        const int i = item - a.shared.tiles, e = i / a.experts.tiles;
        tile = i % a.experts.tiles;
        pair = list.pair + list.first[e], columns = list.first[e + 1] - list.first[e];
        factor = a.experts.factor + (static_cast<int64_t>(list.expert[e]) * a.experts.tiles + tile) * kTileRows;
        out = a.routed, width = a.experts.rows / 2;
    }
    __device__ __forceinline__ int row(int n, int used) const { return pair == nullptr ? n : pair[n] / used; }
    __device__ __forceinline__ int place(int n) const { return pair == nullptr ? n : pair[n]; }
};

template <Kind K, int NT>
__global__ void __launch_bounds__(kThreads, 3 - NT) gate_up_few(GateUp a, PlainRows<K> prologue) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ ExpertList list;
    const int stride = activation_stride(a.chunks);
    bf16* h = reinterpret_cast<bf16*>(shared + ring_bytes<K>());
    float* sums = reinterpret_cast<float*>(shared + ring_bytes<K>() + a.rows * stride * 2);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own wait
    list_experts(list, a.ids, a.groups, a.expert_count, a.experts.tiles > 0 ? a.rows * a.used : 0);
    ItemSource source(a, list, warp);
    const int split = source.split, part = source.part, steps = source.steps, group = kWarps / split;
    const int items = source.items;
    Ring<K> ring(shared, warp);
    ring.fill(source, lane);
    prologue(h, stride);
    __syncthreads();

    int turn = 0;
    for (int at = blockIdx.x; at * group < items; at += gridDim.x, ++turn) {
        const int own = at * group + warp / split;
        float sum[NT][4] = {};
        if (own < items) {
            const Item item(a, list, own);
            const bf16* x[NT];
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
                x[nt] = h + item.row(min(8 * nt + (lane >> 2), item.columns - 1), a.used) * stride;
            for (int i = 0; i < steps; ++i) {
                const uint8_t* chunk = ring.wait();
                const int c = part + i * split;
                if (c < a.chunks) multiply_chunk<K, NT>(chunk, x, c * kChunkCols, lane, sum);
                ring.release(source, lane);
            }
        }
        float* now = sums + (turn & 1) * kWarps * 128 * NT;
        store_sums<NT>(now + warp * 128 * NT, sum, lane);
        __syncthreads();
        const int thread = (threadIdx.x - 32 * turn) & (kThreads - 1);
        for (int i = thread; i < group * 64 * NT; i += kThreads) {
            const int sub = i / (64 * NT), row = i % 8, n = i / 8 % (8 * NT);
            if (at * group + sub >= items) break;
            const Item item(a, list, at * group + sub);
            const int f = item.tile * 8 + row;
            if (n >= item.columns || f >= item.width) continue;
            const float* from = now + sub * split * 128 * NT + n * 16 + row;
            float gate = 0, up = 0;
            for (int p = 0; p < split; ++p) {
                gate += from[p * 128 * NT];
                up += from[p * 128 * NT + 8];
            }
            gate *= item.factor[row];
            up *= item.factor[row + 8];
            item.out[static_cast<int64_t>(item.place(n)) * item.width + f] =
                __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
        }
    }
}

template <Kind K>
void few(Context& c, const GateUp& a, const Tensor& h) {
    const PlainRows<K> prologue{h.as<bf16>(), h.stride[0], static_cast<int>(h.shape[1]), a.rows};
    const bool one = a.rows <= 8;
    const int bytes = ring_bytes<K>() + a.rows * activation_stride(a.chunks) * 2 +
                      (one ? sums_bytes<1>() : sums_bytes<2>());
    const int items = a.shared.tiles + min(a.rows * a.used, a.expert_count) * a.experts.tiles;
    launch(c, "moe_gate_up", one ? gate_up_few<K, 1> : gate_up_few<K, 2>, min(c.sms, tile_groups(items, a.chunks)),
           kThreads, bytes, a, prologue);
}

void few_of_kind(Context& c, Kind kind, const GateUp& a, const Tensor& h) {
    if (kind == Kind::bf16) few<Kind::bf16>(c, a, h);
    if (kind == Kind::fp8) few<Kind::fp8>(c, a, h);
    if (kind == Kind::nvfp4) few<Kind::nvfp4>(c, a, h);
}

}  // namespace

void moe_gate_up(const Node& node, Context& c) {
    const Tensor &h = *node.inputs[0], &ids = *node.inputs[1], &groups = *node.inputs[2];
    const Tensor &routed = *node.outputs[0], &shared_out = *node.outputs[1];
    const auto& p = node.params<MoeGateUpParams>();
    const auto& experts = *static_cast<const PackedExperts*>(p.experts->placed);
    const auto& shared = *static_cast<const Packed*>(p.shared->placed);
    const int rows = static_cast<int>(h.shape[0]), used = static_cast<int>(ids.shape[1]);
    if (rows > kFewRows || rows * used > kMostPairs) {
        gemm_gate_up(c, experts, h.data, groups.as<int>(), rows, used, routed.data);
        return gemm_paired(c, shared, h.data, h.stride[0], rows, shared_out.data, shared_out.stride[0]);
    }
    GateUp a{experts, shared.part[0], experts.chunks, ids.as<int>(), groups.as<int>(), rows, used, experts.count,
             routed.as<bf16>(), shared_out.as<bf16>()};
    if (experts.kind == a.shared.kind) return few_of_kind(c, experts.kind, a, h);
    GateUp only_shared = a;
    only_shared.experts.tiles = 0;
    few_of_kind(c, a.shared.kind, only_shared, h);
    a.shared.tiles = 0;
    few_of_kind(c, experts.kind, a, h);
}

}  // namespace quern::cuda
