// moe_gate_up on the GPU: the choice of experts, then their products and the shared expert's.
//   answers, NVFP4: cuda/moe/gate_up_fp4.cu, which also chooses experts: of up to 256, 8 used
//   answers, other formats, up to 16 rows at a time: a tile of 16 packed rows holds 8 rows of gate and the same 8 of up;
//     tiles of all needed experts and of the shared one form one list. One row of x: 16 warps share a tile and meet in
//     shared memory. More rows, so more experts: a warp has a tile of its own and nobody waits. Both add partial sums in
//     the same order.
//   prompts, and answers as_prompt (cuda/variants.h): products grouped by expert (cuda/moe/gemm_experts.h), on sm_90a of rows that
//     cuda/moe/group_rows.cu lays out; of up to 64 rows NVFP4 experts through cuda/moe/gate_up_fp4.cu, which adds in the same order
// Traffic of few rows: the weights of each needed expert once.
#include "ggml-like/ops/moe_gate_up.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/moe/expert_rows.cuh"
#include "ggml-like/cuda/moe/gemm_experts.h"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;
using namespace moe;

namespace {

static_assert(kToldRows == kFewStepRows);
static_assert(permuted_row_bytes(3 * kChunkCols) == fp4_row_bytes(3));

/// One tile of the list: the shared expert's come first. Moves on without divisions.
struct ListedTile {
    int expert;  // in the list; -1: the shared expert
    int tile;

    __device__ __forceinline__ ListedTile(const GateUp& a, int index) : expert(-1), tile(index) { settle(a); }
    __device__ __forceinline__ void advance(const GateUp& a, int by) {
        tile += by;
        settle(a);
    }
    __device__ __forceinline__ bool valid(const ExpertList& list) const { return expert < list.count; }
    __device__ __forceinline__ const uint8_t* data(const GateUp& a, const ExpertList& list, int chunk) const {
        const uint8_t* base =
            expert < 0 ? a.shared.data : a.experts.data + list.expert[expert] * a.experts.expert_bytes;
        return base + (tile * a.chunks + chunk) * chunk_bytes(a.experts.kind);
    }
    /// Of the tile's 16 rows.
    __device__ __forceinline__ const float* factor(const GateUp& a, const ExpertList& list) const {
        if (expert < 0) return a.shared.factor + tile * kTileRows;
        return a.experts.factor + (list.expert[expert] * a.experts.tiles + tile) * kTileRows;
    }
    __device__ __forceinline__ int columns(const GateUp& a, const ExpertList& list) const {
        return expert < 0 ? a.rows : list.first[expert + 1] - list.first[expert];
    }
    /// Row of h that column n is, and where its result goes.
    __device__ __forceinline__ int row(const GateUp& a, const ExpertList& list, int n) const {
        return expert < 0 ? n : list.pair[list.first[expert] + n] / a.used;
    }
    __device__ __forceinline__ bf16* out(const GateUp& a, const ExpertList& list, int n) const {
        if (expert < 0) return a.shared_out + n * (a.shared.rows / 2) + tile * 8;
        return a.routed + list.pair[list.first[expert] + n] * (a.experts.rows / 2) + tile * 8;
    }
    __device__ __forceinline__ int height(const GateUp& a) const {
        return (expert < 0 ? a.shared.rows : a.experts.rows) / 2 - tile * 8;
    }

  private:
    __device__ __forceinline__ void settle(const GateUp& a) {
        if (expert < 0) {
            if (tile < a.shared.tiles) return;
            tile -= a.shared.tiles;
            expert = 0;
        }
        while (a.experts.tiles > 0 && tile >= a.experts.tiles) tile -= a.experts.tiles, ++expert;
        if (a.experts.tiles == 0) expert = 1 << 20;  // beyond any list
    }
};

/// Chunks of one warp, listed tile after listed tile: of ranks first_rank to first_rank + ranks - 1, of each rank r chunks
/// r, r + split, ...
struct ListedSource {
    const GateUp& a;
    const ExpertList& list;
    ListedTile listed;
    const uint8_t* base;  // of the listed tile; null: no more
    int stride, split, first_rank, ranks, steps, rank = 0, step = 0;

    __device__ ListedSource(const GateUp& arguments, const ExpertList& experts, int index, int by, int s,
                            int first, int n)
        : a(arguments),
          list(experts),
          listed(arguments, index),
          stride(by),
          split(s),
          first_rank(first),
          ranks(n),
          steps((arguments.chunks + s - 1) / s) {
        base = listed.valid(list) ? listed.data(a, list, 0) : nullptr;
    }
    __device__ __forceinline__ const uint8_t* next() {
        const int chunk = first_rank + rank + step * split;
        const uint8_t* from =
            base != nullptr && chunk < a.chunks ? base + chunk * chunk_bytes(a.experts.kind) : nullptr;
        if (++step == steps) {
            step = 0;
            if (++rank == ranks) {
                rank = 0;
                listed.advance(a, stride);
                base = listed.valid(list) ? listed.data(a, list, 0) : nullptr;
            }
        }
        return from;
    }
};

template <Kind K, int NT>
__device__ __forceinline__ void columns_of(const ListedTile& listed, const GateUp& a, const ExpertList& list,
                                           const bf16* h, int stride, int lane, uint32_t (&x)[NT]) {
    const int last = listed.columns(a, list) - 1;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
        x[nt] = operand_address(h + listed.row(a, list, min(8 * nt + lane % 8, last)) * stride, lane);
}

/// One row: `split` warps a tile.
template <Kind K>
__global__ void __launch_bounds__(kThreads, 2) gate_up_one(GateUp a, PlainRows<K> prologue) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ExpertList list;
    const int stride = activation_stride(a.chunks), split = warps_per_tile(a.chunks), group = kWarps / split;
    bf16* h = reinterpret_cast<bf16*>(shared + ring_bytes<K, 1>());
    float* sums = reinterpret_cast<float*>(h + stride);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = warp & (split - 1);
    prologue.early(h, stride);
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own
                        // wait
    prologue(h, stride);
    list_experts(list, a.groups, a.experts.count, a.first_pair, a.experts.tiles > 0 ? a.used : 0);
    ListedSource source(a, list, blockIdx.x * group + warp / split, gridDim.x * group, split, rank, 1);
    const int steps = source.steps;
    ChunkRing<K, 1> ring(shared, warp);
    ring.fill(source, lane);

    const uint32_t x[1] = {operand_address(h, lane)};
    ListedTile listed(a, blockIdx.x * group + warp / split), finished(a, blockIdx.x * group);
    for (int round = 0; finished.valid(list); ++round) {
        const int thread = (threadIdx.x - 32 * round) & (kThreads - 1);
        ListedTile mine = finished;
        if (group > 1) mine.advance(a, thread / 8);
        const int row = thread % 8;
        const bool writes = thread < group * 8 && mine.valid(list) && row < mine.height(a);
        float gate_factor = 0, up_factor = 0;
        if (writes) {
            const float* factor = mine.factor(a, list);
            gate_factor = factor[row];
            up_factor = factor[row + 8];
        }
        float sum[1][4] = {};
        for (int i = 0; i < steps; ++i) {
            const uint8_t* chunk = ring.wait();
            const int c = rank + i * split;
            if (c < a.chunks && listed.valid(list))
                multiply_chunk<K, false>(chunk, x, c * kChunkCols, lane, sum);
            ring.release(source, lane);
        }
        float* now = sums + (round & 1) * kWarps * 16;
        if (lane % 4 == 0) {  // column 0 only
            now[warp * 16 + lane / 4] = sum[0][0];
            now[warp * 16 + lane / 4 + 8] = sum[0][2];
        }
        __syncthreads();
        if (writes) {
            const float* from = now + thread / 8 * split * 16 + row;
            const float scale = __ldcg(a.factor);
            const float gate = add_splits(split, from, 16) * gate_factor * scale;
            const float up = add_splits(split, from + 8, 16) * up_factor * scale;
            mine.out(a, list, 0)[row] = gated(gate, up);
        }
        listed.advance(a, gridDim.x * group);
        finished.advance(a, gridDim.x * group);
    }
}

/// 1 to 16 rows: a warp a tile.
template <Kind K, int NT>
__global__ void __launch_bounds__(kThreads, 3 - NT) gate_up_few(GateUp a, PlainRows<K> prologue) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ExpertList list;
    const int stride = activation_stride(a.chunks), split = warps_per_tile(a.chunks);
    bf16* h = reinterpret_cast<bf16*>(shared + ring_bytes<K, NT>());
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    prologue.early(h, stride);
    wait_for_predecessor();
    allow_successor();
    prologue(h, stride);
    list_experts(list, a.groups, a.experts.count, a.first_pair, a.experts.tiles > 0 ? a.rows * a.used : 0);
    // neighbouring tiles go to different blocks: work is even when there is little
    const int first = warp * gridDim.x + blockIdx.x, by = gridDim.x * kWarps;
    ListedSource source(a, list, first, by, split, 0, split);
    const int steps = source.steps;
    ChunkRing<K, NT> ring(shared, warp);
    ring.fill(source, lane);
    for (ListedTile listed(a, first); listed.valid(list); listed.advance(a, by)) {
        uint32_t x[NT];
        columns_of<K, NT>(listed, a, list, h, stride, lane, x);
        const float* factor = listed.factor(a, list);
        const float gate_factor = factor[g], up_factor = factor[g + 8];
        float total[NT][4] = {};
        for (int q = 0; q < split; q += 4) {
            float four[NT][4] = {};
            for (int p = q; p < min(q + 4, split); ++p) {
                float sum[NT][4] = {};
                for (int i = 0; i < steps; ++i) {
                    const uint8_t* chunk = ring.wait();
                    const int c = p + i * split;
                    if (c < a.chunks) multiply_chunk<K, false>(chunk, x, c * kChunkCols, lane, sum);
                    ring.release(source, lane);
                }
#pragma unroll
                for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) four[nt][i] += sum[nt][i];
            }
#pragma unroll
            for (int nt = 0; nt < NT; ++nt)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[nt][i] += four[nt][i];
        }
        const int columns = listed.columns(a, list);
        if (g >= listed.height(a)) continue;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int n = 8 * nt + 2 * t + i;
                if (n >= columns) continue;
                const float scale = __ldcg(a.factor + listed.row(a, list, n));
                listed.out(a, list, n)[g] =
                    gated(total[nt][i] * gate_factor * scale, total[nt][i + 2] * up_factor * scale);
            }
    }
}

constexpr int kListBytes = 4 * 1024;  // static shared memory at most
static_assert(sizeof(ExpertList) < kListBytes);

/// Whether shared memory has room for a ring and the rows of x.
template <Kind K, int NT>
bool few_fit(const Context& c, int rows, int chunks) {
    const int bytes = ring_bytes<K, NT>() + rows * activation_stride(chunks) * 2;
    return rows <= 8 * NT && bytes + kListBytes <= c.shared_bytes;
}
bool few_fit(const Context& c, Kind kind, int rows, int chunks) {
    if (kind == Kind::bf16) return few_fit<Kind::bf16, 2>(c, rows, chunks);
    if (kind == Kind::fp8)
        return few_fit<Kind::fp8, 1>(c, rows, chunks) || few_fit<Kind::fp8, 2>(c, rows, chunks);
    return few_fit<Kind::nvfp4, 2>(c, rows, chunks);
}

/// False: too little shared memory.
template <Kind K>
bool one(Context& c, const GateUp& a, const PlainRows<K>& prologue, int activations, int items) {
    const int bytes = ring_bytes<K, 1>() + activations + 2 * kWarps * 16 * static_cast<int>(sizeof(float));
    if (bytes + kListBytes > c.shared_bytes) return false;
    launch(c, "moe_gate_up one", gate_up_one<K>, min(c.sms, tile_groups(items, a.chunks)), kThreads, bytes, a,
           prologue);
    return true;
}
template <Kind K, int NT>
bool few(Context& c, const GateUp& a, const PlainRows<K>& prologue, int activations, int items) {
    if (!few_fit<K, NT>(c, a.rows, a.chunks)) return false;
    const int bytes = ring_bytes<K, NT>() + activations;
    launch(c, NT == 1 ? "moe_gate_up few 8" : "moe_gate_up few 16", gate_up_few<K, NT>, min(c.sms, items),
           kThreads, bytes, a, prologue);
    return true;
}

template <Kind K>
void few(Context& c, const GateUp& a) {
    const PlainRows<K> prologue{a.h, a.columns, a.columns, a.rows};
    const int activations = a.rows * activation_stride(a.chunks) * 2;
    const int items = a.shared.tiles + min(a.rows * a.used, a.experts.count) * a.experts.tiles;
    if constexpr (K != Kind::nvfp4)  // NVFP4 and BF16 are rare here: fewer kernels
        if (a.rows == 1 && one<K>(c, a, prologue, activations, items)) return;
    if constexpr (K == Kind::fp8)
        if (few<K, 1>(c, a, prologue, activations, items)) return;
    if (!few<K, 2>(c, a, prologue, activations, items))
        unsupported("moe_gate_up", "a card with so little shared memory");
}

/// Parts of `a` that are stored as `kind`.
void few(Context& c, Kind kind, GateUp a) {
    if (a.experts.kind != kind) a.experts.tiles = 0;
    if (a.shared.kind != kind) a.shared.tiles = 0;
    if (a.experts.tiles == 0 && a.shared.tiles == 0) return;
    a.experts.kind = kind;
    if (kind == Kind::bf16) return few<Kind::bf16>(c, a);
    if (kind == Kind::fp8) return few<Kind::fp8>(c, a);
    few<Kind::nvfp4>(c, a);
}

/// whole: a prompt, or as_prompt.
GateUp arguments_of(const Node& node, bool whole) {
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &logits = *node.inputs[2];
    const auto& p = node.params<MoeGateUpParams>();
    const auto& experts = *static_cast<const PackedExperts*>(p.experts->placed);
    const auto& shared = *static_cast<const Packed*>(p.shared->placed);
    const int rows = static_cast<int>(h.shape[0]);
    const bool fixed = logits.dtype == DType::I64;
    if (fixed != (p.kind == StepKind::answer)) unsupported("moe_gate_up", "logits of the other kind of step");
    const Choice choice{
        .logits = {fixed ? nullptr : logits.as<float>(), fixed ? logits.as<int64_t>() : nullptr,
                   static_cast<int>(logits.stride[0])},
        .scale = scale_of(h, squares, p.eps),
        .rows = rows,
        .experts = experts.count,
        .used = p.used,
        .ids = node.outputs[2]->as<int>(),
        .weights = node.outputs[3]->as<float>(),
        .shared_gate = node.outputs[4]->as<float>(),
        .groups = node.outputs[5]->as<int>(),
        .places = whole ? node.outputs[9]->as<int>() : nullptr,
        .ready = fixed && !whole ? node.outputs[6]->as<uint64_t>() : nullptr,
        .factor = node.outputs[7]->as<float>(),
        .counts = node.outputs[0]->as<uint32_t>(),  // routed, which nobody has written yet
        .counts_bytes = node.outputs[0]->bytes()};
    return {.experts = experts,
            .shared = shared.part[0],
            .chunks = experts.chunks,
            .h = h.as<bf16>(),
            .columns = static_cast<int>(h.shape[1]),
            .ids = choice.ids,
            .groups = choice.groups,
            .rows = rows,
            .used = p.used,
            .routed = node.outputs[0]->as<bf16>(),
            .shared_out = node.outputs[1]->as<bf16>(),
            .factor = choice.factor,
            .choice = choice,
            .permuted = nullptr};
}

/// Formats that the NVFP4 kernels do not take: one of them, or both.
void answer_slices(Context& c, const GateUp& a) {
    choose_experts(c, a.choice);
    int each = kFewRows;
    while (each > 1 && !(few_fit(c, a.experts.kind, min(a.rows, each), a.chunks) &&
                         few_fit(c, a.shared.kind, min(a.rows, each), a.chunks) &&
                         min(a.rows, each) * a.used <= kMaxPairs))
        each /= 2;
    for (int first = 0; first < a.rows; first += each) {
        GateUp slice = a;
        slice.rows = min(a.rows - first, each);
        slice.first_pair = first * a.used;
        slice.h += static_cast<int64_t>(first) * a.columns;
        slice.factor += first;
        slice.routed += static_cast<int64_t>(first) * a.used * (a.experts.rows / 2);
        slice.shared_out += static_cast<int64_t>(first) * (a.shared.rows / 2);
        for (const Kind kind : {Kind::bf16, Kind::fp8, Kind::nvfp4}) few(c, kind, slice);
    }
}

/// grouped: scratch [rows * used, columns].
void prompt(Context& c, const GateUp& a, const Packed& shared, bf16* grouped) {
    choose_experts(c, a.choice);
    const RowScale scale = scale_of_factors(a.factor);  // which the choice has made
    GateUp few_rows = a;
    const bool fp4 = gate_up_streams(c, shape_of(a)),
               groups_rows = !fp4 && takes_grouped(c, a.experts, a.rows, a.used);
    const bool with_shared =
        fp4 ? a.shared.kind == Kind::nvfp4 : goes_along(c, a.experts, shared, a.rows, a.used);
    if (!with_shared) few_rows.shared.tiles = 0;
    Along along;
    if (with_shared) along = {&shared, a.h, a.shared_out, a.shared.rows / 2};
    if (groups_rows) group_rows(c, a.h, a.columns, a.rows, a.used, a.choice.places, grouped);
    if (fp4)
        gate_up_fp4_prompt(c, few_rows);
    else
        gemm_gate_up(c, a.experts, groups_rows ? grouped : a.h, scale, a.groups, a.rows, a.used, a.routed,
                     along);
    if (!with_shared)
        gemm_paired(c, shared, a.h, a.columns, a.rows, {a.shared_out, a.shared.rows / 2, scale});
}

}  // namespace

void moe_gate_up(const Node& node, Context& c) {
    const auto& p = node.params<MoeGateUpParams>();
    const auto& experts = *static_cast<const PackedExperts*>(p.experts->placed);
    const bool whole = p.kind == StepKind::prompt || as_prompt(c, experts.kind, experts.count);
    GateUp a = arguments_of(node, whole);
    if (whole)
        return prompt(c, a, *static_cast<const Packed*>(p.shared->placed), node.outputs[8]->as<bf16>());
    const MixtureProduct product = choose_gate_up(c, shape_of(a));
    if (product == MixtureProduct::slices) return answer_slices(c, a);
    if (product == MixtureProduct::stream) choose_experts(c, a.choice);
    if (leaves_permuted(c, shape_of(a)) && node.outputs.size() > 8)
        a.permuted = node.outputs.back()->as<uint8_t>();
    gate_up_fp4(c, product, a);
}

}  // namespace quern::cuda
