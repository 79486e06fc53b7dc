// moe_down with NVFP4 weights and few rows. Block = one tile of 16 output rows, all terms of it.
//   one row: 16 warps share the parts of all terms; the block's weights are all under way before it waits for gate and
//     up, because ids and weights were complete when the predecessor started its work (gate_up_fp4.cu)
//   more rows: a warp takes a group of up to 4 rows of an expert at a time
// A term's bits depend on its row only, and a row's terms are added in the order of its choices. No atomics.
// Traffic: the weights of each needed expert once; every block converts all rows of routed for itself.
#include "ggml-like/cuda/expert_groups.cuh"
#include "ggml-like/cuda/few_rows.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe.h"

namespace quern::cuda {
namespace {

constexpr int kMostTerms = 33;  // of a row

struct Shape {
    ChunkParts routed, shared;
    int piece_parts;  // parts a piece
    int piece_bytes;
    int depth;

    __device__ __forceinline__ const ChunkParts& parts(bool of_shared) const { return of_shared ? shared : routed; }
};

/// The block's tile of an expert (-1: the shared one).
__device__ __forceinline__ const uint8_t* tile_data(const Down& a, int expert) {
    if (expert < 0) return a.shared.data + static_cast<int64_t>(blockIdx.x) * a.shared_chunks * kFp4Chunk;
    return a.experts.data + expert * a.experts.expert_bytes + static_cast<int64_t>(blockIdx.x) * a.experts.chunks * kFp4Chunk;
}
__device__ __forceinline__ const float* tile_factor(const Down& a, int expert) {
    return expert < 0 ? a.shared.factor + blockIdx.x * kTileRows
                      : a.experts.factor + (static_cast<int64_t>(expert) * a.experts.tiles + blockIdx.x) * kTileRows;
}

/// y of the block's rows for row n of the step, from its terms [used + 1][16].
__device__ __forceinline__ void add_terms(const Down& a, const float* terms, int n, int r, float residual) {
    const int row = blockIdx.x * kTileRows + r;
    if (row >= a.experts.rows) return;
    float sum = residual;
    for (int j = 0; j <= a.used; ++j) sum += terms[j * kTileRows + r];
    a.y[n * a.ld + row] = sum;
}
__device__ __forceinline__ float load_residual(const Down& a, int n, int r) {
    const int row = blockIdx.x * kTileRows + r;
    return row < a.experts.rows ? __ldcg(a.residual + n * a.ld + row) : 0.0f;
}

// ---- one row ----

/// Unit u: part `part` of term `term`; the shared expert's is the last term.
struct Unit {
    int term, part;

    __device__ __forceinline__ Unit(const Down& a, const Shape& s, int u) {
        term = min(u / s.routed.count, a.used);
        part = u - term * s.routed.count;
    }
};

__global__ void __launch_bounds__(kThreads, 1) down_one(Down a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ float scales[kMostTerms], terms[kMostTerms * kTileRows];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int routed_bytes = fp4_row_bytes(a.experts.chunks);
    uint8_t* rows = shared + kWarps * s.depth * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(rows + a.used * routed_bytes + fp4_row_bytes(a.shared_chunks));  // [unit][16][4]
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    const int units = a.used * s.routed.count + s.shared.count;
    const int id = lane < a.used ? __ldcg(a.ids + lane) : -1;  // of choice `lane`
    int ahead = warp;
    const auto request = [&] {
        if (ahead >= units) return;
        const Unit u(a, s, ahead);
        const ChunkParts& parts = s.parts(u.term == a.used);
        ring.request(tile_data(a, __shfl_sync(0xffffffffu, id, u.term)) + parts.begin(u.part) * kFp4Chunk,
                     (parts.end(u.part) - parts.begin(u.part)) * kFp4Chunk);
        ahead += kWarps;
    };
    for (int i = 0; i < s.depth; ++i) request();
    // A warp a term in the end: lane 4r + i has number i of rows r and r + 8.
    float low_factor = 0, high_factor = 0, weight = 0;
    if (warp <= a.used) {
        const float* factor = tile_factor(a, __shfl_sync(0xffffffffu, id, warp));
        low_factor = factor[lane >> 2], high_factor = factor[(lane >> 2) + 8];
        weight = __ldcg(warp < a.used ? a.weights + warp : a.shared_gate);
    }
    const float residual = threadIdx.x < kTileRows ? load_residual(a, 0, threadIdx.x) : 0.0f;
    wait_for_predecessor();
    allow_successor();
    for (int term = warp; term <= a.used; term += kWarps) {
        const bool is_shared = term == a.used;
        const float scale = load_fp4_row(rows + term * routed_bytes, is_shared ? a.shared_in : a.routed + term * a.width,
                                         is_shared ? a.shared_width : a.width,
                                         is_shared ? a.shared_chunks : a.experts.chunks, lane);
        if (lane == 0) scales[term] = scale;
    }
    __syncthreads();
    for (int u = warp; u < units; u += kWarps) {
        const Unit unit(a, s, u);
        const ChunkParts& parts = s.parts(unit.term == a.used);
        const Fp4Columns x(lane, [&](int) { return rows + unit.term * routed_bytes; });
        const uint8_t* chunk = ring.wait();
        float acc[2][4] = {};
        for (int c = parts.begin(unit.part); c < parts.end(unit.part); ++c, chunk += kFp4Chunk)
            multiply_fp4<false>(chunk, x, c, lane, acc);
        ring.release();
        request();
        if ((lane & 3) < 2) {
            const Fp4Raw raw(acc, lane);
            float2* to = reinterpret_cast<float2*>(sums + u * 64 + (lane >> 2) * 4) + (lane & 1);
            to[0] = raw.low;
            to[16] = raw.high;
        }
    }
    __syncthreads();
    for (int term = warp; term <= a.used; term += kWarps) {
        if (term != warp) {
            const float* factor = tile_factor(a, __shfl_sync(0xffffffffu, id, term));
            low_factor = factor[lane >> 2], high_factor = factor[(lane >> 2) + 8];
            weight = __ldcg(term < a.used ? a.weights + term : a.shared_gate);
        }
        const float* from = sums + term * s.routed.count * 64 + lane;
        const int parts = s.parts(term == a.used).count;
        const float by = kFp4Lift * scales[term];
        const float low = join_fp4(add_parts(parts, [&](int p) { return from[p * 64]; }), lane);
        const float high = join_fp4(add_parts(parts, [&](int p) { return from[p * 64 + 32]; }), lane);
        if ((lane & 3) == 0) {
            terms[term * kTileRows + (lane >> 2)] = weight * (low * (low_factor * by));
            terms[term * kTileRows + (lane >> 2) + 8] = weight * (high * (high_factor * by));
        }
    }
    __syncthreads();
    if (threadIdx.x < kTileRows) add_terms(a, terms, 0, threadIdx.x, residual);
}

// ---- more rows ----

__global__ void __launch_bounds__(kThreads, 1) down_few(Down a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ ExpertGroups list;
    __shared__ float scales[kGroupPairs + kFewRows];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2;
    const int routed_bytes = fp4_row_bytes(a.experts.chunks), shared_bytes = fp4_row_bytes(a.shared_chunks);
    const int pairs = a.rows * a.used;
    uint8_t* rows = shared + kWarps * s.depth * s.piece_bytes;
    uint8_t* shared_rows = rows + pairs * routed_bytes;
    float* terms = reinterpret_cast<float*>(shared_rows + a.rows * shared_bytes);  // [rows][used + 1][16]
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    list_groups(list, a.groups, a.experts.count, pairs, a.rows);

    int ahead = warp, part = 0;
    const uint8_t* from = nullptr;
    const auto request = [&] {
        if (ahead >= list.count) return;
        const int expert = list.group[ahead].expert;
        if (part == 0) from = tile_data(a, expert);
        const ChunkParts& parts = s.parts(expert < 0);
        const int end = min(part + s.piece_parts, parts.count);
        const int bytes = (parts.end(end - 1) - parts.begin(part)) * kFp4Chunk;
        ring.request(from, bytes);
        from += bytes;
        part = end;
        if (part == parts.count) part = 0, ahead += kWarps;
    };
    for (int i = 0; i < s.depth; ++i) request();
    const int r = threadIdx.x % kTileRows, n = threadIdx.x / kTileRows;  // of the output
    const float residual = n < a.rows ? load_residual(a, n, r) : 0.0f;
    wait_for_predecessor();
    allow_successor();
    for (int i = warp; i < pairs + a.rows; i += kWarps) {
        const float scale = i < pairs ? load_fp4_row(rows + i * routed_bytes, a.routed + static_cast<int64_t>(i) * a.width,
                                                     a.width, a.experts.chunks, lane)
                                      : load_fp4_row(shared_rows + (i - pairs) * shared_bytes,
                                                     a.shared_in + static_cast<int64_t>(i - pairs) * a.shared_width,
                                                     a.shared_width, a.shared_chunks, lane);
        if (lane == 0) scales[i] = scale;
    }
    __syncthreads();
    for (int index = warp; index < list.count; index += kWarps) {
        const ExpertGroup group = list.group[index];
        const bool is_shared = group.expert < 0;
        // Of the group's row i: its pair, or its row of the step for the shared expert.
        const auto pair_of = [&](int i) {
            const int at = group.first + min(i, group.count - 1);
            return is_shared ? at : static_cast<int>(list.pair[at]);
        };
        const float* factor = tile_factor(a, group.expert);
        const float low_factor = factor[g] * kFp4Lift, high_factor = factor[g + 8] * kFp4Lift;
        const Fp4Columns x(lane, [&](int i) {
            return is_shared ? shared_rows + pair_of(i) * shared_bytes : rows + pair_of(i) * routed_bytes;
        });
        float acc[2][4] = {};
        if (group.count > 2)
            sum_tile<true>(ring, s.parts(is_shared), s.piece_parts, x, lane, request, acc);
        else
            sum_tile<false>(ring, s.parts(is_shared), s.piece_parts, x, lane, request, acc);
        const Fp4Sums sum(acc);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = Fp4Sums::row(lane, i);
            if (at >= group.count) continue;
            const int pair = pair_of(at);
            const float weight = __ldcg(is_shared ? a.shared_gate + pair : a.weights + pair);
            const float scale = scales[is_shared ? pairs + pair : pair];
            float* to = terms + (is_shared ? pair * (a.used + 1) + a.used : pair + pair / a.used) * kTileRows + g;
            to[0] = weight * (sum.low[i] * (low_factor * scale));
            to[8] = weight * (sum.high[i] * (high_factor * scale));
        }
    }
    __syncthreads();
    if (n < a.rows) add_terms(a, terms + n * (a.used + 1) * kTileRows, n, r, residual);
}

static_assert(kThreads >= kTileRows * kFewRows, "a thread an output of down_few");

}  // namespace

bool down_fp4(Context& c, const Down& a) {
    Shape s{.routed = ChunkParts(a.experts.chunks), .shared = ChunkParts(a.shared_chunks), .piece_parts = 1};
    const int routed_bytes = fp4_row_bytes(a.experts.chunks), shared_bytes = fp4_row_bytes(a.shared_chunks);
    const int each = max(s.routed.each, s.shared.each), limit = c.shared_bytes - 8 * 1024;  // static shared memory
    const int rows_bytes = a.rows * (a.used * routed_bytes + shared_bytes);
    const auto bytes = [&](int rest) { return kWarps * s.depth * s.piece_bytes + rest; };
    if (a.used >= kMostTerms - 1) return false;
    if (a.rows == 1) {
        const int units = a.used * s.routed.count + s.shared.count;
        const int rest = rows_bytes + units * 64 * static_cast<int>(sizeof(float));
        s.piece_bytes = each * kFp4Chunk;
        for (s.depth = min((units + kWarps - 1) / kWarps, kMostPieces); s.depth > 1 && bytes(rest) > limit; --s.depth) {}
        if (bytes(rest) > limit) return false;
        launch(c, "moe_down", down_one, a.experts.tiles, kThreads, bytes(rest), a, s);
        return true;
    }
    const int rest = rows_bytes + a.rows * (a.used + 1) * kTileRows * static_cast<int>(sizeof(float));
    s.depth = 2;
    for (s.piece_parts = 4;; s.piece_parts /= 2) {
        s.piece_bytes = s.piece_parts * each * kFp4Chunk;
        if (bytes(rest) <= limit) break;
        if (s.piece_parts == 1) return false;
    }
    launch(c, "moe_down", down_few, a.experts.tiles, kThreads, bytes(rest), a, s);
    return true;
}

}  // namespace quern::cuda
