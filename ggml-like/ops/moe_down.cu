// moe_down on the GPU.
//   answers, NVFP4: cuda/moe/down_fp4.cu
//   answers, other formats, up to 16 rows at a time, as many as fit: block = one tile of 16 output rows, all terms of it; 8 warps split the
//     columns of every expert in turn. Experts come in rising order of id, so a row's sum does not depend on its
//     neighbours. No atomics. The shared expert, which may have another format, comes second, in a launch of its own.
//   prompts, and answers as_prompt (cuda/variants.h): grouped tiled product (cuda/linear/gemm.h; of up to 64 rows NVFP4 through
//     cuda/moe/down_fp4.cu, which adds in the same order) writes the terms in BF16, then one kernel weighs and adds them and does the
//     next norm's part.
//   over ranks, answers: the kernels of down_fp4.cu add up; of other formats a kernel that follows does (cuda/parts_of_ranks.h).
//     Prompts: the kernel that adds the terms sends and adds the ranks' sums, too (cuda/comm/chunks.cuh)
// Traffic of few rows: the weights of each needed expert once.
#include "ggml-like/ops/moe_down.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/linear/rank_rows.cuh"
#include "ggml-like/cuda/moe/down_fp4.cuh"
#include "ggml-like/cuda/moe/expert_rows.cuh"
#include "ggml-like/cuda/moe/gemm_experts.h"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/parts_of_ranks.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;
using namespace moe;

namespace {

constexpr int kDownWarps = 8, kDownThreads = kDownWarps * 32;

static_assert(kDownThreads == 16 * kFewRows, "a thread an output");

/// Row n's weight and pair for each listed expert, at most one a pair; in shared memory.
struct Uses {
    float (*weight)[kFewRows];
    float (*factor)[kTileRows];  // of the block's tile
    short (*pair)[kFewRows];     // -1: the row does not use it

    static constexpr int kBytes = 4 * kFewRows + 4 * kTileRows + 2 * kFewRows;  // of an expert
    __device__ __forceinline__ Uses(void* memory, int pairs)
        : weight(static_cast<float (*)[kFewRows]>(memory)),
          factor(weight + pairs),
          pair(reinterpret_cast<short (*)[kFewRows]>(factor + pairs)) {}
};

/// The block's tile of expert after expert.
template <Kind K>
struct TileSource {
    const Down& a;
    const ExpertList& list;
    int warp, expert = 0, chunk;

    __device__ TileSource(const Down& arguments, const ExpertList& experts, int w)
        : a(arguments), list(experts), warp(w), chunk(w) {}
    __device__ __forceinline__ const uint8_t* next() {
        if (expert >= list.count) return nullptr;
        const uint8_t* from = nullptr;
        if (chunk < a.experts.chunks)
            from = a.experts.data + list.expert[expert] * a.experts.expert_bytes +
                   (static_cast<int64_t>(blockIdx.x) * a.experts.chunks + chunk) * chunk_bytes(K);
        chunk += kDownWarps;
        if (chunk - warp >= a.experts.chunks) chunk = warp, ++expert;
        return from;
    }
};

template <int NT>
__device__ __forceinline__ void add_weighted(float (&sum)[NT][4], const float (&term)[NT][4],
                                             const float* factor, const float* weight, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const float low = factor[g], high = factor[g + 8];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float w = weight[8 * nt + 2 * t + (i & 1)];
            if (w != 0.0f) sum[nt][i] += w * (i < 2 ? low : high) * term[nt][i];
        }
}

__device__ __forceinline__ void fill_uses(const Uses& uses, const ExpertList& list, const Down& a) {
    for (int i = threadIdx.x; i < list.count * kFewRows; i += kDownThreads) {
        uses.weight[i / kFewRows][i % kFewRows] = 0;
        uses.pair[i / kFewRows][i % kFewRows] = -1;
        const int64_t tile = static_cast<int64_t>(list.expert[i / kFewRows]) * a.experts.tiles + blockIdx.x;
        uses.factor[i / kFewRows][i % kFewRows] = a.experts.factor[tile * kTileRows + i % kFewRows];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < list.count; e += kDownThreads)
        for (int i = list.first[e]; i < list.first[e + 1]; ++i) {
            const int pair = list.pair[i];
            uses.weight[e][pair / a.used] = __ldcg(a.weights + pair);
            uses.pair[e][pair / a.used] = static_cast<short>(pair);
        }
}

/// The only expert, which all rows use.
__device__ __forceinline__ void list_shared(ExpertList& list, int rows) {
    if (static_cast<int>(threadIdx.x) < rows) list.pair[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) list.count = 1, list.expert[0] = 0, list.first[0] = 0, list.first[1] = rows;
    __syncthreads();
}

/// Shared memory: a ChunkRing a warp, the rows, Uses.
template <Kind K, int NT>
__global__ void __launch_bounds__(kDownThreads, 2) down_few(Down a, PlainRows<K> routed_rows) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ExpertList list;
    constexpr int kRing = kRingDepth<K, NT> * chunk_bytes(K);
    const int stride = activation_stride(a.experts.chunks);
    bf16* routed = reinterpret_cast<bf16*>(shared + kDownWarps * kRing);
    const Uses uses(routed + a.rows * a.used * stride, a.rows * a.used);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    wait_for_choice(a);
    if (a.groups == nullptr)
        list_shared(list, a.rows);
    else
        list_experts(list, a.groups, a.experts.count, a.first_pair, a.rows * a.used);
    TileSource<K> source(a, list, warp);
    ChunkRing<K, NT> ring(shared, warp);
    ring.fill(source, lane);
    fill_uses(uses, list, a);
    routed_rows.early(routed, stride);
    wait_for_predecessor();
    allow_successor();
    const int out_row = blockIdx.x * kTileRows + threadIdx.x % 16, out_column = threadIdx.x / 16;
    const bool writes = out_column < a.rows && out_row < a.experts.rows;
    const bool defers = a.next.h != nullptr;
    const float residual = writes ? __ldcg(a.residual + out_column * a.ld + out_row) : 0.0f;
    const float norm = writes && defers ? a.next.norm[out_row] : 0.0f;
    routed_rows(routed, stride);
    __syncthreads();

    float sum[NT][4] = {};
    for (int e = 0; e < list.count; ++e) {
        uint32_t x[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
            x[nt] = operand_address(
                routed + max(0, static_cast<int>(uses.pair[e][8 * nt + lane % 8])) * stride, lane);
        float term[NT][4] = {};
        for (int c = warp; c - warp < a.experts.chunks; c += kDownWarps) {
            const uint8_t* chunk = ring.wait();
            if (c < a.experts.chunks) multiply_chunk<K, false>(chunk, x, c * kChunkCols, lane, term);
            ring.release(source, lane);
        }
        add_weighted<NT>(sum, term, uses.factor[e], uses.weight[e], lane);
    }

    __syncthreads();  // activations are done with: their memory takes the sums
    float* sums = reinterpret_cast<float*>(routed);
    store_sums<NT>(sums + warp * 128 * NT, sum, lane);
    __syncthreads();
    if (!writes) return;
    const float* from = sums + out_column * 16 + threadIdx.x % 16;
    const float y = residual + add_splits(kDownWarps, from, 128 * NT);
    a.y[out_column * a.ld + out_row] = y;
    if (defers) defer_column(a.next, out_column, out_row, y, norm);
}

/// Eights of rows that the kernel is for. Other formats than FP8 are rare here: one kernel for any number of rows.
constexpr int eights_of(Kind kind, int rows) { return kind != Kind::fp8 || rows > 8 ? 2 : 1; }

/// Dynamic shared memory.
template <Kind K, int NT>
constexpr int few_bytes(int pairs, int chunks) {
    const int sums = kDownWarps * 256 * static_cast<int>(sizeof(float));
    const int rows = pairs * (activation_stride(chunks) * 2 + Uses::kBytes);
    return kDownWarps * kRingDepth<K, NT> * chunk_bytes(K) + (rows > sums ? rows : sums);
}
bool few_fit(const Context& c, Kind kind, int rows, int used, int chunks) {
    const int pairs = rows * used;
    const bool small = eights_of(kind, rows) == 1;
    const int bytes = kind == Kind::nvfp4  ? few_bytes<Kind::nvfp4, 2>(pairs, chunks)
                      : kind == Kind::bf16 ? few_bytes<Kind::bf16, 2>(pairs, chunks)
                      : small              ? few_bytes<Kind::fp8, 1>(pairs, chunks)
                                           : few_bytes<Kind::fp8, 2>(pairs, chunks);
    return pairs <= kMaxPairs && bytes + static_cast<int>(sizeof(ExpertList)) <= c.shared_bytes;
}

template <Kind K, int NT>
void few(Context& c, const char* what, const Down& a) {
    const int pairs = a.rows * a.used, needed = few_bytes<K, NT>(pairs, a.experts.chunks);
    // As much as all pairs need, where it is there: with less, more blocks meet on an SM, and others idle.
    const int more = needed + (kMaxPairs - pairs) * Uses::kBytes;
    const bool fits = more + static_cast<int>(sizeof(ExpertList)) <= c.shared_bytes;
    launch(c, what, down_few<K, NT>, a.experts.tiles, kDownThreads, fits ? more : needed, a,
           PlainRows<K>{a.routed, a.width, a.width, a.rows * a.used});
}
template <Kind K>
void few(Context& c, const Down& a) {
    if constexpr (K == Kind::fp8)
        if (eights_of(K, a.rows) == 1) return few<K, 1>(c, "moe_down few 8", a);
    few<K, 2>(c, "moe_down few 16", a);
}
void few_of_kind(Context& c, const Down& a) {
    if (a.experts.kind == Kind::bf16) return few<Kind::bf16>(c, a);
    if (a.experts.kind == Kind::fp8) return few<Kind::fp8>(c, a);
    few<Kind::nvfp4>(c, a);
}

/// y = residual + the routed experts' terms; then y += the shared expert's, as the only expert of a mixture.
void few(Context& c, const Down& a) {
    Down routed = a;
    routed.next.h = nullptr;
    few_of_kind(c, routed);
    Down shared = a;
    shared.experts = {.data = a.shared.data,
                      .factor = a.shared.factor,
                      .expert_bytes = 0,
                      .kind = a.shared.kind,
                      .count = 1,
                      .rows = a.experts.rows,
                      .cols = a.shared_width,
                      .tiles = a.experts.tiles,
                      .chunks = a.shared_chunks};
    shared.routed = a.shared_in;
    shared.width = a.shared_width;
    shared.weights = a.shared_gate;
    shared.used = 1;
    shared.groups = nullptr;
    shared.ready = nullptr;
    shared.residual = a.y;
    few_of_kind(c, shared);
}

constexpr int kAddThreads = 512;

/// sum + the weighed terms of a row of a prompt, four columns from `column` on; terms, which nobody reads again, leave L2 first (and
/// come by way of L1, as nothing else of them does). kUsed: experts of a row, known beforehand so that all terms are asked for at once; 0:
/// any number.
template <int kUsed>
__device__ __forceinline__ float4 add_terms(const Down& a, int64_t n, int column, float4 sum) {
    const int columns = a.experts.rows, used = kUsed == 0 ? a.used : kUsed;
    const bf16* row = static_cast<const bf16*>(a.terms) + n * (used + 1) * columns + column;
#pragma unroll
    for (int j = 0; j <= used; ++j) {
        const float w = __ldcg(j < used ? a.weights + n * used + j : a.shared_gate + n);
        const uint2 v = __ldcs(reinterpret_cast<const uint2*>(row + static_cast<int64_t>(j) * columns));
        const float2 p = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v.x));
        const float2 q = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v.y));
        sum = make_float4(__fmaf_rn(w, p.x, sum.x), __fmaf_rn(w, p.y, sum.y), __fmaf_rn(w, q.x, sum.z),
                          __fmaf_rn(w, q.y, sum.w));
    }
    return sum;
}

/// Weighs and adds the terms of one row of a prompt, a thread 4 columns at a time; then h and squares of it.
template <int kUsed>
__global__ void __launch_bounds__(kAddThreads) add_prompt_terms(Down a) {
    allow_successor();
    wait_for_predecessor();
    const int64_t n = blockIdx.x;
    const int columns = a.experts.rows;
    float squares = 0;
    for (int k = threadIdx.x * 4; k < columns; k += kAddThreads * 4) {
        const float4 sum =
            add_terms<kUsed>(a, n, k, __ldcg(reinterpret_cast<const float4*>(a.residual + n * a.ld + k)));
        *reinterpret_cast<float4*>(a.y + n * a.ld + k) = sum;
        const float4 norm = *reinterpret_cast<const float4*>(a.next.norm + k);
        *reinterpret_cast<uint2*>(a.next.h + n * columns + k) =
            make_uint2(pack_bf16(sum.x * norm.x, sum.y * norm.y), pack_bf16(sum.z * norm.z, sum.w * norm.w));
        squares += sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w;
    }
    write_squares<kAddThreads>(a.next, n, squares);
}

constexpr int kAnswerThreads = 128;

/// The same of an answer, a thread four columns.
template <int kUsed>
__global__ void __launch_bounds__(kAnswerThreads) add_answer_terms(Down a) {
    allow_successor();
    const int n = blockIdx.y, k = (blockIdx.x * kAnswerThreads + threadIdx.x) * 4;
    const bool there = k < a.experts.rows;
    const float4 norm = there ? *reinterpret_cast<const float4*>(a.next.norm + k) : float4{};
    wait_for_predecessor();
    if (!there) return;
    const float* residual = a.residual + n * a.ld + k;
    const float4 sum = add_terms<kUsed>(a, n, k, __ldcg(reinterpret_cast<const float4*>(residual)));
    *reinterpret_cast<float4*>(a.y + n * a.ld + k) = sum;
    defer_four(a.next, n, k, sum, norm);
}

/// Rows of which each rank has terms of its own.
template <bool kWhole, int kUsed>
struct TermRows : RankRows<kWhole> {
    static constexpr int kPartsAtOnce = 2, kRowsAtOnce = 2;  // each with all its terms

    Down a;

    __device__ __forceinline__ uint2 part(int64_t row, int column) const {
        return this->round(add_terms<kUsed>(a, row, column, make_float4(0, 0, 0, 0)));
    }
};

template <bool kWhole, int kUsed>
__global__ void __launch_bounds__(kRankRowThreads, 1)
    add_prompt_terms_of_ranks(const __grid_constant__ comm::Peers p,
                              const __grid_constant__ TermRows<kWhole, kUsed> rows,
                              const __grid_constant__ comm::Cut cut) {
    allow_successor();
    wait_for_predecessor();
    comm::Chunks<TermRows<kWhole, kUsed>>(p, cut, rows).run();
}

template <bool kWhole, int kUsed>
void add_terms_of_ranks(Context& c, const Down& a) {
    const comm::Cut cut = cut_rows<kWhole>(c, a.experts.rows, int64_t{a.rows} * a.experts.rows);
    launch(c, "add terms of ranks", add_prompt_terms_of_ranks<kWhole, kUsed>,
           static_cast<unsigned>(cut.blocks), kRankRowThreads, 0, *c.peers,
           TermRows<kWhole, kUsed>{{a.residual, a.y, a.next}, a}, cut);
}

template <int kUsed>
void add_terms(Context& c, const Down& a, Sums sums) {
    if (sums == Sums::none || c.peers == nullptr)
        return launch(c, "add terms", add_prompt_terms<kUsed>, a.rows, kAddThreads, 0, a);
    sums == Sums::whole ? add_terms_of_ranks<true, kUsed>(c, a) : add_terms_of_ranks<false, kUsed>(c, a);
}

/// The terms of all rows, as groups have them, the shared expert's last.
void make_terms(Context& c, const Down& a, const Packed& shared) {
    const int64_t columns = a.experts.rows;
    if (down_streams(c, shape_of(a))) {
        down_fp4_prompt_terms(c, a);
    } else {
        bf16* own = static_cast<bf16*>(a.terms) + a.used * columns;  // the shared expert's terms
        const int64_t ld = (a.used + 1) * columns;
        const bool with_shared = goes_along(c, a.experts, shared, a.rows, a.used);
        Along along;
        if (with_shared) along = {&shared, a.shared_in, own, ld};
        gemm_down(c, a.experts, a.routed, a.groups, a.rows, a.used, a.terms, along);
        if (!with_shared)
            gemm(c, shared, a.shared_in, a.shared_width, a.rows, {.y = own, .ld = ld}, Split::never);
    }
}

void prompt(Context& c, const Down& a, const Packed& shared, Sums sums) {
    make_terms(c, a, shared);
    a.used == 8 ? add_terms<8>(c, a, sums) : add_terms<0>(c, a, sums);
}

/// As a prompt; but the squares are an answer's.
void answer_as_prompt(Context& c, const Down& a, const Packed& shared) {
    make_terms(c, a, shared);
    const dim3 grid((a.experts.rows / 4 + kAnswerThreads - 1) / kAnswerThreads, a.rows);
    launch(c, "add terms", a.used == 8 ? add_answer_terms<8> : add_answer_terms<0>, grid, kAnswerThreads, 0,
           a);
}

/// Rows [first, first + count).
Down slice_of(const Down& a, int first, int count) {
    Down d = a;
    if (!ready_is_flag(a.rows, a.used)) d.ready = nullptr;
    d.rows = count;
    d.first_pair = first * a.used;
    d.routed += static_cast<int64_t>(first) * a.used * a.width;
    d.shared_in += static_cast<int64_t>(first) * a.shared_width;
    d.weights += first * a.used, d.shared_gate += first;
    d.residual += first * a.ld, d.y += first * a.ld;
    d.next = a.next.from_row(first);
    return d;
}

void answer(Context& c, const Down& a, const Packed& shared, bool whole, const comm::Peers* peers) {
    if (whole) return answer_as_prompt(c, a, shared);
    const MixtureProduct product = choose_down(c, shape_of(a));
    if (product != MixtureProduct::slices) return down_fp4(c, product, a, peers);
    int each = kFewRows;
    while (each > 1 && !(few_fit(c, a.experts.kind, min(a.rows, each), a.used, a.experts.chunks) &&
                         few_fit(c, a.shared.kind, min(a.rows, each), 1, a.shared_chunks)))
        each /= 2;
    for (int first = 0; first < a.rows; first += each) few(c, slice_of(a, first, min(a.rows - first, each)));
}

/// What moe_gate_up left for down_fp4_few.cu, or null.
const uint8_t* permuted_rows(const Node& node, const Context& c, int rows, int used) {
    const auto& p = node.params<MoeDownParams>();
    if (!p.permuted) return nullptr;
    const auto& experts = *static_cast<const PackedExperts*>(p.gate_up_experts->placed);
    const auto& shared = *static_cast<const Packed*>(p.gate_up_shared->placed);
    const MixtureShape shape = shape_of(experts, shared.part[0], experts.chunks, rows, used);
    return leaves_permuted(c, shape) ? node.inputs.back()->as<const uint8_t>() : nullptr;
}

}  // namespace

void moe_down(const Node& node, Context& c) {
    const auto& p = node.params<MoeDownParams>();
    const auto& experts = *static_cast<const PackedExperts*>(p.experts->placed);
    const auto& shared = *static_cast<const Packed*>(p.shared->placed);
    const Tensor &routed = *node.inputs[0], &shared_in = *node.inputs[1];
    const Tensor& y = *node.outputs[0];
    Down a{.experts = experts,
           .shared = shared.part[0],
           .shared_chunks = shared.chunks,
           .routed = routed.as<bf16>(),
           .shared_in = shared_in.as<bf16>(),
           .width = static_cast<int>(routed.shape[2]),
           .shared_width = static_cast<int>(shared_in.shape[1]),
           .ids = node.inputs[2]->as<int>(),
           .groups = node.inputs[5]->as<int>(),
           .weights = node.inputs[3]->as<float>(),
           .shared_gate = node.inputs[4]->as<float>(),
           .residual = node.inputs[7]->as<float>(),
           .rows = static_cast<int>(routed.shape[0]),
           .used = static_cast<int>(routed.shape[1]),
           .y = y.as<float>(),
           .ld = y.stride[0],
           .terms = node.outputs[3]->data,
           .ready = p.kind == StepKind::prompt ? nullptr : node.inputs[6]->as<uint64_t>(),
           .next = defer_of(*node.inputs[8], *node.outputs[1], *node.outputs[2])};
    if (p.kind == StepKind::prompt) return prompt(c, a, shared, p.sums);
    a.permuted = permuted_rows(node, c, a.rows, a.used);
    const auto& gate_up = *static_cast<const PackedExperts*>(p.gate_up_experts->placed);
    const bool whole = as_prompt(c, gate_up.kind, gate_up.count);
    if (p.sums == Sums::none || c.peers == nullptr) return answer(c, a, shared, whole, nullptr);
    if (!whole && down_sums(c, shape_of(a))) return answer(c, a, shared, false, c.peers);
    const float* residual = a.residual;
    a.residual = node.inputs[9]->as<float>();
    answer(c, a, shared, whole, nullptr);
    add_parts_of_answer(c, a.y, residual, a.y, a.next, y.elements());
}

}  // namespace quern::cuda
