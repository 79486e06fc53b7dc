// delta_prefill's first kernel: convolution, gates, scores and inverse of each chunk. See delta_prefill.cu.
#include "ggml-like/cuda/delta/prefill.cuh"
#include "ggml-like/cuda/delta/prefill_convolve.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kThreads = 128;
constexpr int kPitch = 72;  // floats a row of L in shared memory: float2 reads of 8 rows meet no bank twice
constexpr float kEps = 1e-6f;

/// Which chunk of which sequence is number `wanted` of the batch; each warp finds out for itself.
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
        unsigned char tiles[2][kTileBytes];  // x_q, x_k; no longer needed when L is written
        float lower[2][kChunk * kPitch];     // L of two value heads, then its diagonal blocks inverted
    };
    float norm_q[kChunk];
    float norm_k[kChunk];
    float gates[2][kChunk];  // G
    float beta[2][kChunk];
};

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

/// One warp: G and beta of a value head, two rows a lane; rows past the end have g = 0 and beta = 0.
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

/// kk = x_k x_k^T and qk = x_q x_k^T, rows 16 warp .. +15, columns up to the diagonal block.
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

/// Writes P of one value head to its record and L to shared memory.
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

/// One thread: column `column` of the inverse of a 16x16 block I + L, by forward substitution; all threads of
/// a block are in one warp.
__device__ void invert_column(float* block, int column) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) sum -= block[i * kPitch + j] * x[j];
        x[i] = sum;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) block[i * kPitch + column] = x[i];
}

/// A left operand as the sum of two BF16 matrices.
struct Split {
    uint32_t high[4];
    uint32_t low[4];
};

__device__ __forceinline__ Split split_sums(const float (&x)[2][4]) {
    Split s;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i / 2][2 * (i % 2)], x[i / 2][2 * (i % 2) + 1], s.high[i], s.low[i]);
    return s;
}

/// sum += left right^T, right a 16x16 block in shared memory; close to FP32.
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Split& left, const float* right,
                                         int lane) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        const float* at = right + (8 * t + lane / 4) * kPitch + 2 * (lane % 4);
        const float2 b0 = *reinterpret_cast<const float2*>(at);
        const float2 b1 = *reinterpret_cast<const float2*>(at + 8);
        uint32_t high0, low0, high1, low1;
        split(b0.x, b0.y, high0, low0);
        split(b1.x, b1.y, high1, low1);
        mma(sum[t], left.high, low0, low1);
        mma(sum[t], left.low, high0, high1);
        mma(sum[t], left.high, high0, high1);
    }
}

__device__ __forceinline__ void store_block(Record& record, int block, int lane, const uint32_t (&high)[4],
                                            const uint32_t (&low)[4]) {
    record.solve[block][lane] = make_uint4(high[0], high[1], high[2], high[3]);
    record.solve_low[block][lane] = make_uint4(low[0], low[1], low[2], low[3]);
}

/// One warp: the blocks (i, column) of the inverse, i >= column, from L with inverted diagonal blocks:
/// X_ic = -X_ii sum_j L_ij X_jc. Works on X^T, whose sums are left operands as they stand.
__device__ void solve_column(const float* lower, const float* beta, int column, int lane, Record& record) {
    const int r = lane / 4, c = 2 * (lane % 4);
    const float* diagonal = lower + column * 16 * (kPitch + 1);
    beta += 16 * column;
    const float2 b0 = *reinterpret_cast<const float2*>(beta + c);
    const float2 b1 = *reinterpret_cast<const float2*>(beta + c + 8);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(diagonal + (r + 8 * i) * kPitch + c);
        const float2 y = *reinterpret_cast<const float2*>(diagonal + (r + 8 * i) * kPitch + c + 8);
        split(x.x * b0.x, x.y * b0.y, high[2 * i], low[2 * i]);
        split(y.x * b1.x, y.y * b1.y, high[2 * i + 1], low[2 * i + 1]);
    }
    store_block(record, column * (column + 3) / 2, lane, high, low);

    Split x[3];
    float first[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e)
        first[e / 4][e % 4] = diagonal[(8 * (e / 4) + c + e % 2) * kPitch + r + 8 * (e / 2 % 2)];
    x[0] = split_sums(first);
    const float beta_lo = beta[r], beta_hi = beta[r + 8];
#pragma unroll
    for (int d = 1; d < 4; ++d) {
        const int i = column + d;
        if (i >= 4) break;
        float sum[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; ++e) multiply(sum, x[e], lower + 16 * i * kPitch + 16 * (column + e), lane);
        float z[2][4] = {};
        multiply(z, split_sums(sum), lower + 16 * i * (kPitch + 1), lane);
#pragma unroll
        for (int e = 0; e < 8; ++e) z[e / 4][e % 4] = -z[e / 4][e % 4];
        if (d < 3) x[d] = split_sums(z);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float scale = t % 2 == 0 ? beta_lo : beta_hi;
            split(z[t / 2][2 * (t % 2)] * scale, z[t / 2][2 * (t % 2) + 1] * scale, high[t], low[t]);
            high[t] = transpose(high[t]);
            low[t] = transpose(low[t]);
        }
        store_block(record, i * (i + 1) / 2 + column, lane, high, low);
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
        // Column 0 is the longest: one warp gets column 0 of one head and column 3 of the other.
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
