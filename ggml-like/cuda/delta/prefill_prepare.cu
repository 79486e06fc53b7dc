// The chunked delta rule's first kernel: convolution, gates, A and P of each chunk (prefill.cu has the formulas).
//
//   block = (key head, chunk), 4 warps of 16 rows each
//
//     convolve        x of q, k and the key head's value heads; x_q and x_k also as tiles in shared memory
//     find_products   x_k x_k^T and x_q x_k^T, in registers for all value heads:   warp 0 | x
//                                                                                  warp 1 | x x
//     then, two value heads at a time                                              warp 2 | x x x
//     find_gates      G and beta, a warp a head                                    warp 3 | x x x x
//     find_scores     P to the record, L to shared memory
//     solve           the inverse of I + L (prefill_solve.cuh), A to the record
//
// Shared memory: tiles of x_q and x_k (32 KB), and in their place L of two value heads (36 KB); gates and norms. Four
// blocks an SM.
#include "ggml-like/cuda/delta/prefill.cuh"
#include "ggml-like/cuda/delta/prefill_convolve.cuh"
#include "ggml-like/cuda/delta/prefill_solve.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kThreads = 128;
constexpr float kEps = 1e-6f;

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
        float lower[2][kChunk *
                       kPitch];  // L of two value heads; later its diagonal blocks are inverted in place
    };
    float norm_q[kChunk];
    float norm_k[kChunk];
    float gates[2][kChunk];  // G
    float beta[2][kChunk];
};

/// 1 / |row|.
__device__ float row_norm(const unsigned char* tile, int row) {
    float sum = kEps;
#pragma unroll
    for (int part = 0; part < 16; ++part) {
        const uint4 v = *reinterpret_cast<const uint4*>(tile + tile_byte(row, part));
        const float2 a = unpack(v.x), b = unpack(v.y), c = unpack(v.z), d = unpack(v.w);
        sum += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
        sum += c.x * c.x + c.y * c.y + d.x * d.x + d.y * d.y;
    }
    return rsqrtf(sum);
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(__expf(x)); }

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

/// kk = x_k x_k^T and qk = x_q x_k^T: the warp's 16 rows, columns up to the diagonal block.
__device__ __forceinline__ void find_products(const PrepareShared& shared, int warp, int lane,
                                              float (&kk)[8][4], float (&qk)[8][4]) {
    const uint32_t q = shared_address(shared.tiles[0]), k = shared_address(shared.tiles[1]);
    const int row = lane % 8, odd = lane / 8 % 2, high = lane / 16;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        uint32_t left_q[4], left_k[4];
        const int left = tile_byte(16 * warp + row + 8 * odd, 2 * d + high);
        load_matrices(left_q, q + left);
        load_matrices(left_k, k + left);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j > warp) continue;
            uint32_t right[4];
            load_matrices(right, k + tile_byte(16 * j + row + 8 * high, 2 * d + odd));
            mma(kk[2 * j], left_k, right[0], right[1]);
            mma(kk[2 * j + 1], left_k, right[2], right[3]);
            mma(qk[2 * j], left_q, right[0], right[1]);
            mma(qk[2 * j + 1], left_q, right[2], right[3]);
        }
    }
}

/// One value head: P to its record, L to shared memory.
__device__ __forceinline__ void find_scores(PrepareShared& shared, int half, int warp, int lane,
                                            const float (&kk)[8][4], const float (&qk)[8][4],
                                            Record& record) {
    const float* gates = shared.gates[half];
    const int i0 = 16 * warp + lane / 4;
    const float gate[2] = {gates[i0], gates[i0 + 8]};
    const float q[2] = {shared.norm_q[i0], shared.norm_q[i0 + 8]};
    const float k[2] = {shared.norm_k[i0] * shared.beta[half][i0],
                        shared.norm_k[i0 + 8] * shared.beta[half][i0 + 8]};
#pragma unroll
    for (int block = 0; block < 4; ++block) {
        if (block > warp) continue;
        uint32_t scores[4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int j = 16 * block + 8 * t + 2 * (lane % 4);
            const float2 gate_j = *reinterpret_cast<const float2*>(gates + j);
            const float2 norm_j = *reinterpret_cast<const float2*>(shared.norm_k + j);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = i0 + 8 * r;
                const float x = j <= i ? __expf(gate[r] - gate_j.x) * norm_j.x : 0.0f;
                const float y = j + 1 <= i ? __expf(gate[r] - gate_j.y) * norm_j.y : 0.0f;
                const int c = 2 * block + t;
                scores[2 * r + t] = pack_bf16(x * q[r] * qk[c][2 * r], y * q[r] * qk[c][2 * r + 1]);
                *reinterpret_cast<float2*>(shared.lower[half] + i * kPitch + j) = make_float2(
                    j < i ? x * k[r] * kk[c][2 * r] : 0.0f, j + 1 < i ? y * k[r] * kk[c][2 * r + 1] : 0.0f);
            }
        }
        record.scores[warp * (warp + 1) / 2 + block][lane] =
            make_uint4(scores[0], scores[1], scores[2], scores[3]);
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

__global__ __launch_bounds__(kThreads, 4) void prepare(DeltaStep p) {
    __shared__ __align__(16) PrepareShared shared;
    allow_successor();
    wait_for_predecessor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int key_head = static_cast<int>(blockIdx.x), number = static_cast<int>(blockIdx.y);
    Chunk chunk;
    if (!find_chunk(p.start, p.sequences, number, lane, chunk)) return;

    const int ratio = p.value_heads / p.key_heads;
    convolve(p, chunk, key_head, 0, warp, lane, shared.tiles[0]);
    for (int head = 2; head < 2 + ratio; head += 2) convolve(p, chunk, key_head, head, warp, lane, nullptr);
    __syncthreads();
    float kk[8][4] = {}, qk[8][4] = {};
    find_products(shared, warp, lane, kk, qk);
    const int row = threadIdx.x % kChunk, half = threadIdx.x / kChunk;
    if (half == 0) {
        shared.norm_q[row] = row_norm(shared.tiles[0], row) * 0.08838834764831845f;  // 1 / sqrt(128)
    } else {
        shared.norm_k[row] = row_norm(shared.tiles[1], row);
    }
    Record* records = static_cast<Record*>(p.work) + int64_t{number} * p.value_heads + key_head * ratio;
    for (int pair = 0; pair < ratio; pair += 2) {
        const int heads = min(2, ratio - pair);
        if (warp < heads)
            find_gates(p, chunk, key_head * ratio + pair + warp, lane, shared.gates[warp], shared.beta[warp]);
        __syncthreads();
        for (int h = 0; h < heads; ++h) find_scores(shared, h, warp, lane, kk, qk, records[pair + h]);
        __syncthreads();
        if (half < heads) {
            write_factors(shared, half, row, records[pair + half]);
            invert_column(shared.lower[half] + row / 16 * 16 * (kPitch + 1), row % 16);
        }
        __syncthreads();
        // Column 0 has the most blocks: who has column 0 of one head has column 3 of the other.
        for (int h = 0; h < heads; ++h)
            solve_column(shared.lower[h], shared.beta[h], h == 0 ? warp : 3 - warp, lane, records[pair + h]);
        __syncthreads();
    }
}

}  // namespace

void launch_prepare(Context& context, const DeltaStep& p, int64_t chunks) {
    launch(context, "delta_prefill: prepare", prepare,
           dim3(static_cast<unsigned>(p.key_heads), static_cast<unsigned>(chunks)), dim3(kThreads), 0, p);
}

}  // namespace quern::cuda::delta
