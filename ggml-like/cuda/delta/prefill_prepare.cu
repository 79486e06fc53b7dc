// The chunked delta rule's first kernel: convolution, gates, A and P of each chunk (prefill.cu has the formulas).
//
//   unit = (key head, chunk), of a block of 8 warps, which takes another if there are more than blocks. With few chunks a key head has
//   more units, each of which convolves two heads; if there are no more than SMs, blocks have 16 warps, of which 8 to 15 do the same
//   products for the second value head of a pair.
//
//   Units come chunk by chunk, and counts tell the scan which are done. Where it leaves SMs free, blocks on others end early to make room
//   for it, so that it runs beside the rest of this:
//
//     SM 0     unit | unit | scan of a head's 64 columns ............
//     SM 1     unit | unit | unit | unit | unit | unit | unit |
//
//     convolve        x of q, k and the key head's value heads; x_q and x_k also as tiles in shared memory; 8 rows a warp, or 4
//     find_products   x_k x_k^T and x_q x_k^T, in registers for all value heads:   warps 0 and 4 | x
//                                                                                  warps 1 and 5 | x x
//     then, two value heads at a time                                              warps 2 and 6 | x x x
//     find_gates      G and beta, by warps 4 and 5, while 0 to 3 find norms         warps 3 and 7 | x x x x
//     find_scores     L to shared memory by warps 0 to 3, P to the record by 4 to 7
//     solve           the inverse of I + L (prefill_solve.cuh), A to the record; a warp a column of blocks
//     save_windows    at last, the inputs that later steps see
//
// Shared memory: tiles of x_q and x_k (32 KB), and in their place L of two value heads (24 KB); gates and norms; inputs on their way (44
// KB, or 56). Two blocks of 8 warps an SM, or, also where there is no room for two, one of 16.
#include "ggml-like/cuda/delta/prefill.cuh"
#include "ggml-like/cuda/delta/prefill_convolve.cuh"
#include "ggml-like/cuda/delta/prefill_solve.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/told.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr float kEps = 1e-6f;
constexpr int kWarpsPerSm = 16;  // in one block, or in two

/// Chunk number `wanted` of the step, found by each warp for itself. False: there are fewer.
__device__ bool find_chunk(const int* start, int sequences, int wanted, int lane, Chunk& chunk) {
    int before = 0;
    for (int first = 0; first < sequences; first += 32) {
        const int own = first + lane < sequences ? chunks_of(start, first + lane) : 0;
        int sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        const unsigned past = __ballot_sync(0xffffffffu, before + sum > wanted);
        if (past != 0) {
            const int at = __ffs(past) - 1;
            chunk.sequence = first + at;
            chunk.index = wanted - before - __shfl_sync(0xffffffffu, sum - own, at);
            chunk.begin = start[chunk.sequence];
            chunk.length = start[chunk.sequence + 1] - chunk.begin;
            chunk.row = chunk.begin + chunk.index * kChunk;
            chunk.rows = min(kChunk, chunk.length - chunk.index * kChunk);
            return true;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return false;
}

struct PrepareShared {
    union {
        unsigned char tiles[2][kTileBytes];  // x_q, x_k: done with when L is written
        Lower lower[2];                      // of two value heads
    };
    float norm_q[kChunk];
    float norm_k[kChunk];
    float gates[2][kChunk];  // G
    float beta[2][kChunk];
    Unit unit[kWarpsPerSm][3];  // each warp's copies of this one, the next, and that after it
};

/// 1 / |row|.
__device__ float row_norm(const unsigned char* tile, int row) {
    float sum = kEps;
#pragma unroll 4
    for (int part = 0; part < 16; ++part) {
        const uint4 v = *reinterpret_cast<const uint4*>(tile + tile_byte(row, part));
        const float2 a = unpack(v.x), b = unpack(v.y), c = unpack(v.z), d = unpack(v.w);
        sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
        sum += c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
    }
    return rsqrtf(sum);
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(__expf(x)); }

/// One warp: what find_gates will load.
__device__ __forceinline__ void prefetch_gates(const DeltaStep& p, const Chunk& chunk, int head, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int64_t at = (chunk.row + min(2 * lane + i, chunk.rows - 1)) * p.ab_ld + head;
        prefetch_line(static_cast<const bf16*>(p.a) + at);
        prefetch_line(static_cast<const bf16*>(p.b) + at);
    }
    if (lane == 0) prefetch_line(p.decay_rate + head), prefetch_line(p.dt_bias + head);
}

/// One warp: G and beta of a value head, two rows a lane. Rows past the end have gate and beta 0.
__device__ void find_gates(const DeltaStep& p, const Chunk& chunk, int head, int lane, float* gates,
                           float* beta) {
    float g[2], s[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = 2 * lane + i;
        const bool valid = row < chunk.rows;
        const int64_t at = valid ? (chunk.row + row) * p.ab_ld + head : 0;
        const float a = valid ? __bfloat162float(static_cast<const bf16*>(p.a)[at]) : 0.0f;
        const float b = valid ? __bfloat162float(static_cast<const bf16*>(p.b)[at]) : 0.0f;
        g[i] = valid ? p.decay_rate[head] * softplus(a + p.dt_bias[head]) : 0.0f;
        s[i] = valid ? 1.0f / (1.0f + __expf(-b)) : 0.0f;
    }
    float sum = g[0] + g[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    const float before = __shfl_up_sync(0xffffffffu, sum, 1);
    gates[2 * lane] = lane > 0 ? before + g[0] : g[0];  // not sum - g[1]: no later row may show
    gates[2 * lane + 1] = sum;
    beta[2 * lane] = s[0];
    beta[2 * lane + 1] = s[1];
}

/// x_k x_k^T, or x_q x_k^T: of row block `block` the columns up to the diagonal block.
__device__ __forceinline__ void find_products(const PrepareShared& shared, bool of_q, int block, int lane,
                                              float (&sum)[8][4]) {
    const uint32_t left_tile = shared_address(shared.tiles[of_q ? 0 : 1]),
                   k = shared_address(shared.tiles[1]);
    const int row = lane % 8, odd = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        uint32_t left[4];
        load_matrices(left, left_tile + tile_byte(16 * block + row + 8 * odd, 2 * d + high));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j > block) continue;
            uint32_t right[4];
            load_matrices(right, k + tile_byte(16 * j + row + 8 * high, 2 * d + odd));
            mma(sum[2 * j], left, right[0], right[1]);
            mma(sum[2 * j + 1], left, right[2], right[3]);
        }
    }
}

/// Block (i, j) of P to the record, or of L to shared memory. score[2 r + t] of lane l: of row l / 4 + 8 r columns 8 t + 2 (l % 4) and
/// the next.
__device__ __forceinline__ void put_scores(Lower& lower, bool of_q, int i, int j, int lane,
                                           const float2 (&score)[4], Record& record) {
    uint32_t high[4], low[4];
    if (of_q) {
#pragma unroll
        for (int n = 0; n < 4; ++n) high[n] = pack_bf16(score[n].x, score[n].y);
        store_block(record.scores, i, j, lane, high);
    } else if (j < i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) split(score[n].x, score[n].y, high[n], low[n]);
        lower.high[below(i, j)][lane] = make_uint4(high[0], high[1], high[2], high[3]);
        lower.low[below(i, j)][lane] = make_uint4(low[0], low[1], low[2], low[3]);
    } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int row = lane / 4 + 8 * (n / 2), column = 8 * (n % 2) + 2 * (lane % 4);
            *reinterpret_cast<float2*>(lower.diagonal[i] + row * kPitch + column) =
                make_float2(column < row ? score[n].x : 0.0f, column + 1 < row ? score[n].y : 0.0f);
        }
    }
}

/// One value head, row block `block`: P to its record from x_q x_k^T (of_q), or L to shared memory from x_k x_k^T.
__device__ __forceinline__ void find_scores(PrepareShared& shared, int half, bool of_q, int block, int lane,
                                            const float (&product)[8][4], Record& record) {
    const float* gates = shared.gates[half];
    const int i0 = 16 * block + lane / 4;
    const float gate[2] = {gates[i0], gates[i0 + 8]};
    float left[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = i0 + 8 * r;
        left[r] = of_q ? shared.norm_q[i] : shared.norm_k[i] * shared.beta[half][i];
    }
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        if (b > block) continue;
        float2 score[4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int j = 16 * b + 8 * t + 2 * (lane % 4), c = 2 * b + t;
            const float2 gate_j = *reinterpret_cast<const float2*>(gates + j);
            const float2 norm_j = *reinterpret_cast<const float2*>(shared.norm_k + j);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = i0 + 8 * r;
                const float x = j <= i ? __expf(gate[r] - gate_j.x) * norm_j.x : 0.0f;
                const float y = j + 1 <= i ? __expf(gate[r] - gate_j.y) * norm_j.y : 0.0f;
                score[2 * r + t] = {x * left[r] * product[c][2 * r], y * left[r] * product[c][2 * r + 1]};
            }
        }
        put_scores(shared.lower[half], of_q, block, b, lane, score, record);
    }
}

__device__ __forceinline__ void write_factors(const PrepareShared& shared, int half, int row,
                                              Record& record) {
    const float gate = shared.gates[half][row], last = shared.gates[half][kChunk - 1];
    record.error[row] = __expf(gate) * shared.norm_k[row];
    record.write[row] = __expf(last - gate) * shared.norm_k[row];
    record.last[row] = __expf(last);
    record.read[row] = __expf(gate) * shared.norm_q[row];
}

/// Who does which units: block b number b first, then whichever nobody has taken.
struct Units {
    int of_chunk, count;
    int rounds;      // units of a block where the scan will be, at most
    int sms, scans;  // SMs, and how many of them the scan will have

    __device__ __forceinline__ int rounds_of_block() const {
        int sm;
        asm("mov.u32 %0, %%smid;" : "=r"(sm));
        return sm * scans / sms != (sm + 1) * scans / sms ? rounds : count;  // every so many-th
    }
};

/// Of unit number `number`.
__device__ __forceinline__ int chunk_of(const Units& units, int number) {
    return quotient(number, units.of_chunk);
}
__device__ __forceinline__ BlockHeads heads_of(const DeltaStep& p, const Units& units, int number) {
    return BlockHeads(p, number - chunk_of(units, number) * units.of_chunk, units.of_chunk);
}

/// One warp: another unit, after the one at `now` of a warp's three; to `next` of all. Blocks leave early only if others stay.
__device__ __noinline__ void take_unit(const DeltaStep& p, const Units& units, Unit (&unit)[kWarpsPerSm][3],
                                       int now, int next) {
    const int lane = threadIdx.x % 32;
    int left = unit[threadIdx.x / 32][now].left - 1, number = units.count;
    if (left == 0 && __shfl_sync(0xffffffffu, told_by_now(p.told + kStayingBlocks), 0) == 0) left = 1;
    if (left > 0) {
        if (lane == 0) number = static_cast<int>(gridDim.x) + atomicAdd(p.told + kTakenUnits, 1);
        number = __shfl_sync(0xffffffffu, number, 0);
    }
    Chunk chunk{};
    const bool there =
        number < units.count && find_chunk(p.start, p.sequences, chunk_of(units, number), lane, chunk);
    if (lane < kWarpsPerSm)
        unit[lane][next] = {there ? left : 0, chunk_of(units, number), heads_of(p, units, number), chunk};
}

/// One unit; its first heads' inputs have been asked for, and the next one's will be.
template <int kWarps>
__device__ __forceinline__ void prepare_unit(const DeltaStep& p, PrepareShared& shared,
                                             Staged<kWarps>& staged, const Unit& unit, const Unit& next) {
    const BlockHeads& heads = unit.heads;
    const Chunk& chunk = unit.chunk;
    int thread = static_cast<int>(threadIdx.x);
    // What depends on it is not kept from unit to unit: short prompts, which have one, were some 0.5 % slower.
    asm volatile("" : "+r"(thread));
    const int warp = thread / 32, lane = thread % 32;
    const int key_head = heads.key_head, ratio = heads.count - 2;
    if (heads.has_keys() && warp < min(2, ratio)) prefetch_gates(p, chunk, key_head * ratio + warp, lane);
    convolve<kWarps>(p, unit, next, warp, lane, staged, shared.tiles);
    const auto save = [&](int by) {
        if (warp == by && chunk.index == 0) save_windows(p, chunk, heads, lane);
    };
    if (!heads.has_keys()) return save(0);  // whose lanes have loaded the windows of the same channels
    __syncthreads();
    const bool of_q = warp % 8 >= 4;
    float product[8][4] = {};
    find_products(shared, of_q, warp % 4, lane, product);
    const int row = thread % kChunk, half = thread / kChunk;
    if (half == 0)
        shared.norm_q[row] = row_norm(shared.tiles[0], row) * 0.08838834764831845f;  // 1 / sqrt(128)
    else if (half == 1)
        shared.norm_k[row] = row_norm(shared.tiles[1], row);
    Record* records =
        static_cast<Record*>(p.work) + int64_t{unit.chunk_of_step} * p.value_heads + key_head * ratio;
    for (int pair = 0; pair < ratio; pair += 2) {
        const int in_pair = min(2, ratio - pair);
        if (const int h = warp - 4; h >= 0 && h < in_pair)
            find_gates(p, chunk, key_head * ratio + pair + h, lane, shared.gates[h], shared.beta[h]);
        __syncthreads();
        for (int h = warp / 8; h < in_pair; h += kWarps / 8)
            find_scores(shared, h, of_q, warp % 4, lane, product, records[pair + h]);
        __syncthreads();
        if (half < in_pair) {
            write_factors(shared, half, row, records[pair + half]);
            invert_column(shared.lower[half].diagonal[row / 16], row % 16);
        }
        __syncthreads();
        const int h = warp / 4;
        if (h < in_pair) solve_column(shared.lower[h], shared.beta[h], warp % 4, lane, records[pair + h]);
        if (pair + 2 < ratio) __syncthreads();
    }
    save(kWarps - 1);  // which has little to solve; barriers lie between this and the windows' use
}

template <int kWarps>
__global__ __launch_bounds__(32 * kWarps,
                             kWarpsPerSm / kWarps) void prepare(const __grid_constant__ DeltaStep p,
                                                                const __grid_constant__ Units units) {
    __shared__ __align__(16) PrepareShared shared;
    extern __shared__ __align__(16) uint8_t dynamic[];
    auto& staged = *reinterpret_cast<Staged<kWarps>*>(dynamic);
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = static_cast<int>(blockIdx.x);
    const BlockHeads heads = heads_of(p, units, first);
    prefetch_taps(p, heads, lane);
    const bool takes = static_cast<int>(gridDim.x) < units.count;
    wait_for_predecessor();
    Chunk chunk;
    if (!find_chunk(p.start, p.sequences, chunk_of(units, first), lane, chunk)) {
        // no row at all: the scan, which waits for the first chunk, has nothing to do
        if (takes && threadIdx.x == 0 && chunk_of(units, first) == 0) tell(told_of(p, 0, heads.key_head));
        return;
    }
    ask_heads<kWarps>(p, chunk, heads, heads.first, warp, lane, staged);
    commit_copies();
    Unit(&own)[3] = shared.unit[warp];
    if (lane == 0) {
        const int rounds = takes ? units.rounds_of_block() : 1;
        if (threadIdx.x == 0 && rounds == units.count) atomicAdd(p.told + kStayingBlocks, 1);
        own[0] = {rounds, chunk_of(units, first), heads, chunk};
        if (!takes) own[1].left = 0;
    }
    __syncwarp();
    if (takes) {
        if (warp == 0) take_unit(p, units, shared.unit, 0, 1);
        __syncthreads();
    }
#pragma unroll 1
    for (int at = 0; own[at].left > 0;) {
        const int next = at < 2 ? at + 1 : 0, second = next < 2 ? next + 1 : 0;
        prepare_unit<kWarps>(p, shared, staged, own[at], own[next]);
        if (!takes) return;
        if (warp == kWarps - 1) take_unit(p, units, shared.unit, next, second);
        __syncthreads();
        if (threadIdx.x == 0) tell(told_of(p, own[at].chunk_of_step, own[at].heads.key_head));
        at = next;
    }
}

/// SMs that the scan will need are given up when the others can do the rest meanwhile.
Units divide(const Context& context, const DeltaStep& p, int64_t of_chunk, int64_t chunks, int64_t blocks) {
    constexpr int64_t kScanChunks = 12;  // of a sequence, while a block does a unit
    const int64_t count = of_chunk * chunks, scans = scan_blocks(p);
    Units units{.of_chunk = static_cast<int>(of_chunk), .count = static_cast<int>(count), .sms = context.sms};
    if (choose_scan(context) != ScanProduct::warpgroups || scans >= context.sms) return units;
    const int64_t others = blocks * (context.sms - scans) / context.sms,
                  meanwhile = others * (chunks / p.sequences) / kScanChunks;
    units.scans = static_cast<int>(scans);
    units.rounds = static_cast<int>(max(int64_t{1}, (count - meanwhile + blocks / 2) / blocks));
    return units;
}

template <int kWarps>
bool launch_prepare(Context& context, const DeltaStep& p, int64_t of_chunk, int64_t chunks) {
    const int64_t blocks = int64_t{kWarpsPerSm / kWarps} * context.sms;
    launch(context, "delta_prefill: prepare", prepare<kWarps>,
           static_cast<unsigned>(min(of_chunk * chunks, blocks)), dim3(32 * kWarps),
           static_cast<int>(sizeof(Staged<kWarps>)), p, divide(context, p, of_chunk, chunks, blocks));
    return of_chunk * chunks > blocks;
}

}  // namespace

bool launch_prepare(Context& context, const DeltaStep& p, int64_t chunks) {
    const int64_t pairs = 1 + (p.value_heads / p.key_heads + 1) / 2;  // of heads
    const int64_t apart = p.key_heads * pairs;
    if (apart * chunks <= context.sms) return launch_prepare<16>(context, p, apart, chunks);
    constexpr int kTwo = 2 * static_cast<int>(sizeof(PrepareShared) + sizeof(Staged<8>) + 1024);
    if (context.shared_bytes < kTwo) return launch_prepare<16>(context, p, p.key_heads, chunks);
    return launch_prepare<8>(context, p,
                             apart * chunks <= kWarpsPerSm / 8 * context.sms ? apart : p.key_heads, chunks);
}

}  // namespace quern::cuda::delta
