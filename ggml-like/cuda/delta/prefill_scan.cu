// delta_prefill's second kernel: chunk after chunk, the state and the output. See delta_prefill.cu.
#include "ggml-like/cuda/delta/prefill.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kThreads = 128;
constexpr int kSlice = 32;  // v columns of a block

/// Chunks of all sequences before this one.
__device__ int chunks_before(const int* start, int sequence, int lane) {
    int sum = 0;
    for (int s = lane; s < sequence; s += 32) sum += chunks_of(start, s);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
}

/// Warps of the two roles meet here from different places in the code, which __syncthreads does not promise
/// to bear.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

/// All that one round of the loop reads: the state warps' part of chunk c, the output warps' part of chunk c
/// - 1.
struct Stage {
    unsigned char k[kTileBytes];
    unsigned char q[kTileBytes];
    unsigned char v[kChunk * kSlice * 2];
    float factors[4 * kChunk];  // error, write, last of chunk c; read of chunk c - 1
};

/// What a state warp passes to its output warp, as left operands: S before the chunk, and U.
struct Passed {
    uint4 state[kDim / 16][32];
    uint4 u[kChunk / 16][32];
};

template <int kStages>
struct ScanShared {
    Stage stages[kStages];
    Passed passed[2][kSlice / 16];
};

struct ScanBlock {
    const bf16* x;          // the sequence's first row
    const Record* records;  // of the first chunk; the next chunk's is value_heads further
    int channels;
    int value_heads;
    int q_column;
    int k_column;
    int v_column;
    int length;
    int chunks;
};

/// Rows of 16-byte parts, `kParts` a row, by 64 threads; zeros past the sequence's end.
template <int kParts>
__device__ __forceinline__ void load_tile(unsigned char* tile, const ScanBlock& b, int chunk, int column,
                                          int thread) {
    const int part = thread % kParts;
    const int row = thread / kParts;
    constexpr int kStep = 64 / kParts;
    const int rows = b.length - chunk * kChunk;
    const bf16* from = b.x + (int64_t{chunk} * kChunk + row) * b.channels + column + part * 8;
#pragma unroll
    for (int i = 0; i < kChunk / kStep; ++i) {
        const int r = row + i * kStep;
        const bool valid = r < rows;
        copy_async16(tile + (kParts == 16 ? tile_byte(r, part) : slice_byte(r, part)),
                     valid ? from + int64_t{i} * kStep * b.channels : b.x, valid);
    }
}

__device__ __forceinline__ void load_stage(Stage& stage, const ScanBlock& b, int round, int thread) {
    if (round < b.chunks) {
        load_tile<16>(stage.k, b, round, b.k_column, thread);
        load_tile<4>(stage.v, b, round, b.v_column, thread);
        const float* factors = b.records[int64_t{round} * b.value_heads].error;
        if (thread < 33) copy_async16(stage.factors + 4 * thread, factors + 4 * thread);
    }
    if (round > 0 && round <= b.chunks) {
        load_tile<16>(stage.q, b, round - 1, b.q_column, thread);
        const float* factors = b.records[int64_t{round - 1} * b.value_heads].read;
        if (thread < 16) copy_async16(stage.factors + 3 * kChunk + 4 * thread, factors + 4 * thread);
    }
    commit_copies();
}

__device__ __forceinline__ void load_triangle(uint4 (&to)[kTriangle], const uint4 (&from)[kTriangle][32],
                                              int lane) {
#pragma unroll
    for (int i = 0; i < kTriangle; ++i) to[i] = from[i][lane];
}

/// Four sums += (high + low) right.
template <int kSums>
__device__ __forceinline__ void multiply_pair(float (&sum)[kSums][4], int first, const uint32_t (&high)[4],
                                              const uint32_t (&low)[4], const uint32_t (&right)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        mma(sum[first + i], low, right[i / 2][i % 2 * 2], right[i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        mma(sum[first + i], high, right[i / 2][i % 2 * 2], right[i / 2][i % 2 * 2 + 1]);
}

/// sum[row tiles] += left tile^T, over the 128 columns of a tile of 64 rows.
__device__ __forceinline__ void multiply_tile(float (&sum)[8][4], const uint32_t (&left)[4], uint32_t tile,
                                              int d, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t right[4];
        load_matrices(right, tile + tile_byte(16 * i + lane % 8 + 8 * (lane / 16), 2 * d + lane / 8 % 2));
        mma(sum[2 * i], left, right[0], right[1]);
        mma(sum[2 * i + 1], left, right[2], right[3]);
    }
}

/// sum += (high + low) tile^T. Two right operands at a time keep products on the same sum four apart.
__device__ __forceinline__ void multiply_tile(float (&sum)[8][4], const uint32_t (&high)[4],
                                              const uint32_t (&low)[4], uint32_t tile, int d, int lane) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        uint32_t right[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            load_matrices(right[i], tile + tile_byte(32 * pair + 16 * i + lane % 8 + 8 * (lane / 16),
                                                     2 * d + lane / 8 % 2));
        multiply_pair(sum, 4 * pair, high, low, right);
    }
}

/// sum += left M^T for a lower triangle M of 16x16 blocks.
__device__ __forceinline__ void multiply_triangle(float (&sum)[8][4], const uint32_t (&left)[4][4],
                                                  const uint4 (&blocks)[kTriangle]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = j; i < 4; ++i) {
            const uint4 right = blocks[i * (i + 1) / 2 + j];
            mma(sum[2 * i], left[j], right.x, right.y);
            mma(sum[2 * i + 1], left[j], right.z, right.w);
        }
    }
}

/// sum += left M^T, both sums of a high and a low matrix; the product of the low ones is left out.
__device__ __forceinline__ void multiply_triangle(float (&sum)[8][4], const uint32_t (&high)[4][4],
                                                  const uint32_t (&low)[4][4],
                                                  const uint4 (&blocks)[kTriangle],
                                                  const uint4 (&blocks_low)[kTriangle]) {
    multiply_triangle(sum, low, blocks);
    multiply_triangle(sum, high, blocks);
    multiply_triangle(sum, high, blocks_low);  // last: they were asked for last
}

/// high + low = V^T - error (S X_k^T), from the sums in e.
__device__ __forceinline__ void find_errors(uint32_t (&high)[4][4], uint32_t (&low)[4][4],
                                            const float (&e)[8][4], const Stage& stage, int half, int lane) {
    const uint32_t v = shared_address(stage.v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t two[4];
        load_matrices_transposed(
            two, v + slice_byte(16 * i + lane % 8 + 8 * (lane / 16), 2 * half + lane / 8 % 2));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 f =
                *reinterpret_cast<const float2*>(stage.factors + 16 * i + 8 * (t / 2) + 2 * (lane % 4));
            const float* s = e[2 * i + t / 2] + 2 * (t % 2);
            const float2 value = unpack(two[t]);
            split(value.x - f.x * s[0], value.y - f.y * s[1], high[i][t], low[i][t]);
        }
    }
}

/// One chunk of a state warp: S [16 v, 128 k] moves on by up to 64 rows. `solve` becomes the next chunk's;
/// there are no registers left to ask for solve_low as early.
__device__ __forceinline__ void advance_state(float (&s)[16][4], uint4 (&solve)[kTriangle],
                                              const Stage& stage, Passed& passed, const Record& record,
                                              const Record* next, int half, int lane) {
    const uint32_t k = shared_address(stage.k);
    uint4 solve_low[kTriangle];
    load_triangle(solve_low, record.solve_low, lane);
    float sum[8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        uint32_t left[4], left_low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            split(s[2 * d + i / 2][2 * (i % 2)], s[2 * d + i / 2][2 * (i % 2) + 1], left[i], left_low[i]);
        passed.state[d][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        multiply_tile(sum, left, left_low, k, d, lane);
    }
    uint32_t high[4][4], low[4][4];
    find_errors(high, low, sum, stage, half, lane);
    float u[8][4] = {};
    multiply_triangle(u, high, low, solve, solve_low);
    if (next != nullptr) load_triangle(solve, next->solve, lane);

    const float last = stage.factors[2 * kChunk];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][e] *= last;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t plain[4], scaled[4], scaled_low[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 f = *reinterpret_cast<const float2*>(stage.factors + kChunk + 16 * j + 8 * (t / 2) +
                                                              2 * (lane % 4));
            const float* x = u[2 * j + t / 2] + 2 * (t % 2);
            plain[t] = pack_bf16(x[0], x[1]);
            split(f.x * x[0], f.y * x[1], scaled[t], scaled_low[t]);
        }
        passed.u[j][lane] = make_uint4(plain[0], plain[1], plain[2], plain[3]);
#pragma unroll
        for (int d = 0; d < kDim / 32; ++d) {
            uint32_t right[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                load_matrices_transposed(right[i], k + tile_byte(16 * j + lane % 8 + 8 * (lane / 8 % 2),
                                                                 4 * d + 2 * i + lane / 16));
            multiply_pair(s, 4 * d, scaled, scaled_low, right);
        }
    }
}

/// Rows of o, 16 columns: the sums have v along the rows, so 8x8 blocks are transposed and neighbours swap
/// halves for stores of 8 bytes.
__device__ __forceinline__ void store_output(const float (&o)[8][4], bf16* to, int64_t ld, int rows,
                                             int lane) {
    const bool odd = lane % 2 != 0;
    to += (lane / 4) * ld + (odd ? 8 + 2 * (lane % 4 - 1) : 2 * (lane % 4));
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint32_t low = transpose(pack_bf16(o[t][0], o[t][1]));
        const uint32_t high = transpose(pack_bf16(o[t][2], o[t][3]));
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        if (8 * t + lane / 4 < rows)
            *reinterpret_cast<uint2*>(to + 8 * t * ld) = odd ? make_uint2(got, high) : make_uint2(low, got);
    }
}

/// One chunk of an output warp: o [64 rows, 16 v]. `scores` becomes the next chunk's.
__device__ __forceinline__ void find_output(uint4 (&scores)[kTriangle], const Stage& stage,
                                            const Passed& passed, const Record* next, bf16* to, int64_t ld,
                                            int rows, int lane) {
    const uint32_t q = shared_address(stage.q);
    float o[8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        const uint4 s = passed.state[d][lane];
        const uint32_t left[4] = {s.x, s.y, s.z, s.w};
        multiply_tile(o, left, q, d, lane);
    }
    uint32_t u[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint4 v = passed.u[i][lane];
        u[i][0] = v.x, u[i][1] = v.y, u[i][2] = v.z, u[i][3] = v.w;
    }
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const float2 f =
            *reinterpret_cast<const float2*>(stage.factors + 3 * kChunk + 8 * t + 2 * (lane % 4));
        o[t][0] *= f.x, o[t][1] *= f.y, o[t][2] *= f.x, o[t][3] *= f.y;
    }
    multiply_triangle(o, u, scores);
    if (next != nullptr) load_triangle(scores, next->scores, lane);
    store_output(o, to, ld, rows, lane);
}

template <int kStages>
__global__ __launch_bounds__(kThreads) void scan(DeltaStep p) {
    extern __shared__ __align__(128) unsigned char raw[];
    auto& shared = *reinterpret_cast<ScanShared<kStages>*>(raw);
    allow_successor();
    wait_for_predecessor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = static_cast<int>(blockIdx.x) / (kDim / kSlice), slice = blockIdx.x % (kDim / kSlice);
    const int sequence = static_cast<int>(blockIdx.y);
    const int begin = p.start[sequence];
    ScanBlock b;
    b.length = p.start[sequence + 1] - begin;
    if (b.length == 0) return;
    b.chunks = (b.length + kChunk - 1) / kChunk;
    b.value_heads = p.value_heads;
    b.channels = (2 * p.key_heads + p.value_heads) * kDim;
    b.x = static_cast<const bf16*>(p.x) + int64_t{begin} * b.channels;
    b.records = static_cast<const Record*>(p.work) +
                int64_t{chunks_before(p.start, sequence, lane)} * p.value_heads + head;
    const int key_head = head / (p.value_heads / p.key_heads);
    b.q_column = key_head * kDim;
    b.k_column = (p.key_heads + key_head) * kDim;
    b.v_column = (2 * p.key_heads + head) * kDim + slice * kSlice;

    const int half = warp % 2;  // which 16 columns of the slice
    const int v = slice * kSlice + 16 * half;
    if (warp < 2) {
        float* delta = p.delta +
                       ((int64_t{p.slots[sequence]} * p.value_heads + head) * kDim + v + lane / 4) * kDim +
                       2 * (lane % 4);
        const bool fresh = p.positions[begin] == 0;
        float s[16][4];
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            const float2 zero = make_float2(0.0f, 0.0f);
            const float2 lo = fresh ? zero : *reinterpret_cast<const float2*>(delta + 8 * t);
            const float2 hi = fresh ? zero : *reinterpret_cast<const float2*>(delta + 8 * kDim + 8 * t);
            s[t][0] = lo.x, s[t][1] = lo.y, s[t][2] = hi.x, s[t][3] = hi.y;
        }
        uint4 solve[kTriangle];
        load_triangle(solve, b.records->solve, lane);
        for (int round = 0; round <= b.chunks; ++round) {
            meet();
            if (round == b.chunks) break;
            const Record* record = b.records + int64_t{round} * b.value_heads;
            const Record* next = round + 1 < b.chunks ? record + b.value_heads : nullptr;
            advance_state(s, solve, shared.stages[round % kStages], shared.passed[round % 2][half], *record,
                          next, half, lane);
        }
#pragma unroll
        for (int t = 0; t < 16; ++t) {
            *reinterpret_cast<float2*>(delta + 8 * t) = make_float2(s[t][0], s[t][1]);
            *reinterpret_cast<float2*>(delta + 8 * kDim + 8 * t) = make_float2(s[t][2], s[t][3]);
        }
    } else {
        const int thread = threadIdx.x - 64;
        const int64_t ld = int64_t{p.value_heads} * kDim;
        bf16* to = static_cast<bf16*>(p.o) + begin * ld + head * kDim + v;
        uint4 scores[kTriangle];
        load_triangle(scores, b.records->scores, lane);
#pragma unroll
        for (int round = 0; round < kStages - 1; ++round) load_stage(shared.stages[round], b, round, thread);
        for (int round = 0; round <= b.chunks; ++round) {
            wait_copies<kStages - 2>();
            meet();
            load_stage(shared.stages[(round + kStages - 1) % kStages], b, round + kStages - 1, thread);
            if (round == 0) continue;
            const Record* next = round < b.chunks ? b.records + int64_t{round} * b.value_heads : nullptr;
            find_output(scores, shared.stages[round % kStages], shared.passed[(round - 1) % 2][half], next,
                        to + (round - 1) * kChunk * ld, ld, b.length - (round - 1) * kChunk, lane);
        }
        wait_copies<0>();
    }
}

template <int kStages>
void launch_staged(Context& context, const DeltaStep& p, dim3 grid) {
    launch(context, "delta_prefill: scan", scan<kStages>, grid, dim3(kThreads), sizeof(ScanShared<kStages>),
           p);
}

}  // namespace

void launch_scan(Context& context, const DeltaStep& p) {
    const dim3 grid(static_cast<unsigned>(p.value_heads * (kDim / kSlice)),
                    static_cast<unsigned>(p.sequences));
    // Deeper prefetch where blocks do not compete for an SM's shared memory.
    const bool alone = static_cast<int>(grid.x * grid.y) <= context.sms;
    if (alone && context.shared_bytes >= static_cast<int>(sizeof(ScanShared<4>))) {
        launch_staged<4>(context, p, grid);
    } else {
        launch_staged<2>(context, p, grid);
    }
}

}  // namespace quern::cuda::delta
