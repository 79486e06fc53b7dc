// The gated delta rule over many rows: two kernels, chunks of 64 rows, BF16 products with FP32 sums.
//
//   prepare  block = (key head, chunk): x = silu(conv u) for its q, k and v heads; for each of its value heads
//            [ 64 x 64 lower triangle ] A = (I + L)^-1 diag(beta) and P = q k^T with decays, as 10 16x16 blocks each
//   scan     block = (sequence, value head, 32 v columns): chunks in order; 2 warps keep S [16 v x 128 k] each in
//            registers, 2 more compute o of the chunk before from what those pass on (no barrier inside a chunk)
//
// With G the sums of log gates inside a chunk, n = 1 / |x_k|, m = 1 / (|x_q| sqrt(128)):
//   L_ij = beta_i exp(G_i - G_j) k_i.k_j (j < i)     P_ij = exp(G_i - G_j) q_i.k_j (j <= i)
//   U = A (V - diag(exp(G) n) X_k S^T)               o = diag(exp(G) m) X_q S^T + P U
//   S = exp(G_last) S + (diag(exp(G_last - G) n) U)^T X_k
// x_q and x_k enter the products as they are: the norms go into the FP32 factors, so nothing is rounded twice.
// Every product is computed transposed, with v along the rows: a sum's registers then are the next product's left
// operand as they stand, and all right operands come from tiles that all blocks of a key head share.
//
// Traffic a row and layer (nk 16, nv 32): u 16 KB and x 16 KB, records 5.6 KB written and read, o 8 KB; scan reads x
// through L2, q and k once for each of 8 blocks. Limits: heads of 128, 4 taps; 98 KB of shared memory.
#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/delta_chunks.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {
namespace {

constexpr int kDim = 128;
constexpr int kChunk = kDeltaChunk;
constexpr int kWindow = 3;     // rows before a sequence's first that its convolution sees
constexpr int kTriangle = 10;  // 16x16 blocks on and below the diagonal of 64x64; block (i, j) is i (i + 1) / 2 + j
constexpr int kTileBytes = kChunk * kDim * 2;
constexpr int kPitch = 72;  // floats a row of L in shared memory: float2 reads of 8 rows meet no bank twice
constexpr int kPrepareThreads = 128;
constexpr int kThreads = 128;
constexpr int kSlice = 32;  // v columns of a scan block
constexpr float kEps = 1e-6f;

/// What prepare leaves for scan, one for each chunk and value head. A block of A or P is stored as the right
/// operand of mma wants it: lane l's four registers are element l.
struct Record {
    uint4 solve[kTriangle][32];
    uint4 scores[kTriangle][32];
    float error[kChunk];  // exp(G) n
    float write[kChunk];  // exp(G_last - G) n
    float last[kChunk];   // [0] is exp(G_last)
    float read[kChunk];   // exp(G) m
};

struct Chunk {
    int sequence;
    int index;   // in its sequence
    int row;     // its first row in the batch
    int rows;    // 1..64
    int begin;   // the sequence's first row
    int length;  // of the sequence
};

/// None for a sequence of one row: delta_decode has it.
__device__ __forceinline__ int chunks_of(const int* start, int sequence) {
    const int rows = start[sequence + 1] - start[sequence];
    return rows > 1 ? (rows + kChunk - 1) / kChunk : 0;
}

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

/// Chunks of all sequences before this one.
__device__ int chunks_before(const int* start, int sequence, int lane) {
    int sum = 0;
    for (int s = lane; s < sequence; s += 32) sum += chunks_of(start, s);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
}

/// Byte of 16-byte part `part` of a row in a tile of 256-byte rows; the swizzle spreads 8 rows over all banks.
__device__ __forceinline__ int tile_byte(int row, int part) { return row * 256 + ((part ^ (row & 7)) << 4); }
/// The same for rows of 64 bytes.
__device__ __forceinline__ int slice_byte(int row, int part) { return row * 64 + ((part ^ ((row >> 1) & 3)) << 4); }

__device__ __forceinline__ float2 unpack(uint32_t two) {
    return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}

/// Transposes an 8x8 matrix of BF16 held two elements a lane.
__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// ---- prepare: convolution ----

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ void load_row(uint32_t (&to)[4], const bf16* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/// Column of head `head` of a block: 0 is q, 1 is k, then the value heads.
__device__ __forceinline__ int head_column(const DeltaStep& p, int key_head, int head) {
    if (head < 2) return (head * p.key_heads + key_head) * kDim;
    return (2 * p.key_heads + key_head * (p.value_heads / p.key_heads) + head - 2) * kDim;
}

/// Row of the ring that holds the input of a position.
__device__ __forceinline__ bf16* ring_row(const DeltaStep& p, bf16* ring, int position, int channels) {
    return ring + static_cast<int64_t>(position % p.ring) * channels;
}

/// The inputs of up to three positions before `position`; zeros before the sequence's start.
__device__ __forceinline__ void load_window(const DeltaStep& p, bf16* ring, int position, int channels,
                                            uint32_t (&window)[11][4]) {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
        const int at = position - kWindow + i;
        if (at >= 0) load_row(window[i], ring_row(p, ring, at, channels));
    }
}

/// The step's last inputs go to the ring. Only this thread reads or writes these 8 channels of it.
__device__ __forceinline__ void save_window(const DeltaStep& p, bf16* ring, int position, int channels,
                                            const bf16* inputs, int length) {
    for (int from = max(0, length - p.ring); from < length; ++from) {
        uint32_t row[4];
        load_row(row, inputs + from * p.u_ld);
        *reinterpret_cast<uint4*>(ring_row(p, ring, position + from, channels)) =
            make_uint4(row[0], row[1], row[2], row[3]);
    }
}

/// rows[3..10] hold inputs and become outputs; rows[0..2], the inputs before them, become the last three inputs.
__device__ __forceinline__ void convolve_rows(uint32_t (&rows)[11][4], const float4* taps) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float4 lo = taps[2 * e], hi = taps[2 * e + 1];
        float2 x0 = unpack(rows[0][e]), x1 = unpack(rows[1][e]), x2 = unpack(rows[2][e]);
        const uint32_t last[3] = {rows[8][e], rows[9][e], rows[10][e]};
#pragma unroll
        for (int r = 3; r < 11; ++r) {
            const float2 x3 = unpack(rows[r][e]);
            rows[r][e] = pack_bf16(silu(lo.x * x0.x + lo.y * x1.x + lo.z * x2.x + lo.w * x3.x),
                                   silu(hi.x * x0.y + hi.y * x1.y + hi.z * x2.y + hi.w * x3.y));
            x0 = x1, x1 = x2, x2 = x3;
        }
#pragma unroll
        for (int i = 0; i < 3; ++i) rows[i][e] = last[i];
    }
}

/// Two heads of the block: lane = 8 channels, warp = 16 rows. `tiles`: where to keep the outputs too, or null.
__device__ void convolve(const DeltaStep& p, const Chunk& chunk, int key_head, int first_head, int warp, int lane,
                         unsigned char* tiles) {
    const int head = first_head + lane / 16;
    if (head >= 2 + p.value_heads / p.key_heads) return;
    const int channels = (2 * p.key_heads + p.value_heads) * kDim;
    const int column = head_column(p, key_head, head) + lane % 16 * 8;
    const int row = 16 * warp;
    const bf16* u = static_cast<const bf16*>(p.u) + column + chunk.begin * p.u_ld;
    const int64_t first = int64_t{chunk.index} * kChunk + row;  // in the sequence
    uint32_t rows[11][4] = {};
    if (first > 0 && row < chunk.rows) {
#pragma unroll
        for (int i = 0; i < kWindow; ++i) load_row(rows[i], u + (first - kWindow + i) * p.u_ld);
    } else if (first == 0) {
        bf16* ring = static_cast<bf16*>(p.conv_state) +
                     static_cast<int64_t>(p.slots[chunk.sequence]) * p.ring * channels + column;
        load_window(p, ring, p.positions[chunk.begin], channels, rows);
        save_window(p, ring, p.positions[chunk.begin], channels, u, chunk.length);
    }
    const float4* taps = reinterpret_cast<const float4*>(p.conv) + column;
    bf16* x = static_cast<bf16*>(p.x) + int64_t{chunk.row} * channels + column;
#pragma unroll 1
    for (int batch = 0; batch < 2; ++batch) {
        const int top = row + 8 * batch;
        if (top < chunk.rows) {
#pragma unroll
            for (int r = 0; r < 8; ++r) {
                if (top + r < chunk.rows) {
                    load_row(rows[3 + r], u + (first + 8 * batch + r) * p.u_ld);
                } else {
                    rows[3 + r][0] = rows[3 + r][1] = rows[3 + r][2] = rows[3 + r][3] = 0;
                }
            }
            convolve_rows(rows, taps);
        }
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const bool valid = top + r < chunk.rows;
            const uint4 v = valid ? make_uint4(rows[3 + r][0], rows[3 + r][1], rows[3 + r][2], rows[3 + r][3])
                                  : make_uint4(0, 0, 0, 0);
            if (valid) *reinterpret_cast<uint4*>(x + int64_t{top + r} * channels) = v;
            if (tiles != nullptr)
                *reinterpret_cast<uint4*>(tiles + head * kTileBytes + tile_byte(top + r, lane % 16)) = v;
        }
    }
}

// ---- prepare: gates, scores, inverse ----

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
__device__ void find_gates(const DeltaStep& p, const Chunk& chunk, int head, int lane, float* gates, float* beta) {
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
    gates[2 * lane] = sum - g[1];
    gates[2 * lane + 1] = sum;
    beta[2 * lane] = s[0];
    beta[2 * lane + 1] = s[1];
}

/// kk = x_k x_k^T and qk = x_q x_k^T, rows 16 warp .. +15, columns up to the diagonal block.
__device__ __forceinline__ void find_products(const PrepareShared& shared, int warp, int lane, float (&kk)[8][4],
                                              float (&qk)[8][4]) {
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
                                            const float (&kk)[8][4], const float (&qk)[8][4], Record& record) {
    const float* gates = shared.gates[half];
    const int i0 = 16 * warp + lane / 4;
    const float gate[2] = {gates[i0], gates[i0 + 8]};
    const float q[2] = {shared.norm_q[i0], shared.norm_q[i0 + 8]};
    const float k[2] = {shared.norm_k[i0] * shared.beta[half][i0], shared.norm_k[i0 + 8] * shared.beta[half][i0 + 8]};
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
                *reinterpret_cast<float2*>(shared.lower[half] + i * kPitch + j) =
                    make_float2(j < i ? x * k[r] * kk[c][2 * r] : 0.0f, j + 1 < i ? y * k[r] * kk[c][2 * r + 1] : 0.0f);
            }
        }
        record.scores[warp * (warp + 1) / 2 + block][lane] = make_uint4(scores[0], scores[1], scores[2], scores[3]);
    }
}

/// One thread: column `column` of the inverse of a 16x16 block I + L, by forward substitution; all threads of a block
/// are in one warp.
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

__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
    high = pack_bf16(x, y);
    const float2 h = unpack(high);
    low = pack_bf16(x - h.x, y - h.y);
}

__device__ __forceinline__ Split split(const float (&x)[2][4]) {
    Split s;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i / 2][2 * (i % 2)], x[i / 2][2 * (i % 2) + 1], s.high[i], s.low[i]);
    return s;
}

/// sum += left right^T, right a 16x16 block in shared memory; close to FP32.
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Split& left, const float* right, int lane) {
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

/// One warp: the blocks (i, column) of the inverse, i >= column, from L with inverted diagonal blocks:
/// X_ic = -X_ii sum_j L_ij X_jc. Works on X^T, whose sums are left operands as they stand.
__device__ void solve_column(const float* lower, const float* beta, int column, int lane, Record& record) {
    const int r = lane / 4, c = 2 * (lane % 4);
    const float* diagonal = lower + column * 16 * (kPitch + 1);
    beta += 16 * column;
    const float2 b0 = *reinterpret_cast<const float2*>(beta + c);
    const float2 b1 = *reinterpret_cast<const float2*>(beta + c + 8);
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(diagonal + (r + 8 * i) * kPitch + c);
        const float2 y = *reinterpret_cast<const float2*>(diagonal + (r + 8 * i) * kPitch + c + 8);
        out[2 * i] = pack_bf16(x.x * b0.x, x.y * b0.y);
        out[2 * i + 1] = pack_bf16(y.x * b1.x, y.y * b1.y);
    }
    record.solve[column * (column + 3) / 2][lane] = make_uint4(out[0], out[1], out[2], out[3]);

    Split x[3];
    float first[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e)
        first[e / 4][e % 4] = diagonal[(8 * (e / 4) + c + e % 2) * kPitch + r + 8 * (e / 2 % 2)];
    x[0] = split(first);
    const float beta_lo = beta[r], beta_hi = beta[r + 8];
#pragma unroll
    for (int d = 1; d < 4; ++d) {
        const int i = column + d;
        if (i >= 4) break;
        float sum[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; ++e) multiply(sum, x[e], lower + 16 * i * kPitch + 16 * (column + e), lane);
        float z[2][4] = {};
        multiply(z, split(sum), lower + 16 * i * (kPitch + 1), lane);
#pragma unroll
        for (int e = 0; e < 8; ++e) z[e / 4][e % 4] = -z[e / 4][e % 4];
        if (d < 3) x[d] = split(z);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            out[2 * t] = transpose(pack_bf16(z[t][0] * beta_lo, z[t][1] * beta_lo));
            out[2 * t + 1] = transpose(pack_bf16(z[t][2] * beta_hi, z[t][3] * beta_hi));
        }
        record.solve[i * (i + 1) / 2 + column][lane] = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

__device__ __forceinline__ void write_factors(const PrepareShared& shared, int half, int row, Record& record) {
    const float gate = shared.gates[half][row], last = shared.gates[half][kChunk - 1];
    record.error[row] = __expf(gate) * shared.norm_k[row];
    record.write[row] = __expf(last - gate) * shared.norm_k[row];
    record.last[row] = __expf(last);
    record.read[row] = __expf(gate) * shared.norm_q[row];
}

__global__ __launch_bounds__(kPrepareThreads, 4) void prepare(DeltaStep p) {
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

// ---- scan ----

/// Warps of the two roles meet here from different places in the code, which __syncthreads does not promise to bear.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

/// All that one turn of the loop reads: the state warps' part of chunk c, the output warps' part of chunk c - 1.
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
__device__ __forceinline__ void load_tile(unsigned char* tile, const ScanBlock& b, int chunk, int column, int thread) {
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

__device__ __forceinline__ void load_stage(Stage& stage, const ScanBlock& b, int turn, int thread) {
    if (turn < b.chunks) {
        load_tile<16>(stage.k, b, turn, b.k_column, thread);
        load_tile<4>(stage.v, b, turn, b.v_column, thread);
        const float* factors = b.records[int64_t{turn} * b.value_heads].error;
        if (thread < 33) copy_async16(stage.factors + 4 * thread, factors + 4 * thread);
    }
    if (turn > 0 && turn <= b.chunks) {
        load_tile<16>(stage.q, b, turn - 1, b.q_column, thread);
        const float* factors = b.records[int64_t{turn - 1} * b.value_heads].read;
        if (thread < 16) copy_async16(stage.factors + 3 * kChunk + 4 * thread, factors + 4 * thread);
    }
    commit_copies();
}

__device__ __forceinline__ void load_triangle(uint4 (&to)[kTriangle], const uint4 (&from)[kTriangle][32], int lane) {
#pragma unroll
    for (int i = 0; i < kTriangle; ++i) to[i] = from[i][lane];
}

/// sum[row tiles] += left tile^T, over the 128 columns of a tile of 64 rows.
__device__ __forceinline__ void multiply_tile(float (&sum)[8][4], const uint32_t (&left)[4], uint32_t tile, int d,
                                              int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t right[4];
        load_matrices(right, tile + tile_byte(16 * i + lane % 8 + 8 * (lane / 16), 2 * d + lane / 8 % 2));
        mma(sum[2 * i], left, right[0], right[1]);
        mma(sum[2 * i + 1], left, right[2], right[3]);
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

/// left = V^T - error (S X_k^T), from the sums in e.
__device__ __forceinline__ void find_errors(uint32_t (&left)[4][4], const float (&e)[8][4], const Stage& stage,
                                            int half, int lane) {
    const uint32_t v = shared_address(stage.v);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t two[4];
        load_matrices_transposed(two, v + slice_byte(16 * i + lane % 8 + 8 * (lane / 16), 2 * half + lane / 8 % 2));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 f =
                *reinterpret_cast<const float2*>(stage.factors + 16 * i + 8 * (t / 2) + 2 * (lane % 4));
            const float* s = e[2 * i + t / 2] + 2 * (t % 2);
            const float2 value = unpack(two[t]);
            left[i][t] = pack_bf16(value.x - f.x * s[0], value.y - f.y * s[1]);
        }
    }
}

/// One chunk of a state warp: S [16 v, 128 k] moves on by up to 64 rows. `solve` becomes the next chunk's.
__device__ __forceinline__ void advance_state(float (&s)[16][4], uint4 (&solve)[kTriangle], const Stage& stage,
                                              Passed& passed, const Record* next, int half, int lane) {
    const uint32_t k = shared_address(stage.k);
    float sum[8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
        uint32_t left[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            left[i] = pack_bf16(s[2 * d + i / 2][2 * (i % 2)], s[2 * d + i / 2][2 * (i % 2) + 1]);
        passed.state[d][lane] = make_uint4(left[0], left[1], left[2], left[3]);
        multiply_tile(sum, left, k, d, lane);
    }
    uint32_t left[4][4];
    find_errors(left, sum, stage, half, lane);
    float u[8][4] = {};
    multiply_triangle(u, left, solve);
    if (next != nullptr) load_triangle(solve, next->solve, lane);

    const float last = stage.factors[2 * kChunk];
#pragma unroll
    for (int t = 0; t < 16; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][e] *= last;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t plain[4], scaled[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 f = *reinterpret_cast<const float2*>(stage.factors + kChunk + 16 * j + 8 * (t / 2) +
                                                              2 * (lane % 4));
            const float* x = u[2 * j + t / 2] + 2 * (t % 2);
            plain[t] = pack_bf16(x[0], x[1]);
            scaled[t] = pack_bf16(f.x * x[0], f.y * x[1]);
        }
        passed.u[j][lane] = make_uint4(plain[0], plain[1], plain[2], plain[3]);
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
            uint32_t right[4];
            load_matrices_transposed(right, k + tile_byte(16 * j + lane % 8 + 8 * (lane / 8 % 2), 2 * d + lane / 16));
            mma(s[2 * d], scaled, right[0], right[1]);
            mma(s[2 * d + 1], scaled, right[2], right[3]);
        }
    }
}

/// Rows of o, 16 columns: the sums have v along the rows, so 8x8 blocks are transposed and neighbours swap halves
/// for stores of 8 bytes.
__device__ __forceinline__ void store_output(const float (&o)[8][4], bf16* to, int64_t ld, int rows, int lane) {
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
__device__ __forceinline__ void find_output(uint4 (&scores)[kTriangle], const Stage& stage, const Passed& passed,
                                            const Record* next, bf16* to, int64_t ld, int rows, int lane) {
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
        const float2 f = *reinterpret_cast<const float2*>(stage.factors + 3 * kChunk + 8 * t + 2 * (lane % 4));
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
    if (b.length <= 1) return;
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
        float* delta = p.delta + ((int64_t{p.slots[sequence]} * p.value_heads + head) * kDim + v + lane / 4) * kDim +
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
        for (int turn = 0; turn <= b.chunks; ++turn) {
            meet();
            if (turn == b.chunks) break;
            const Record* next =
                turn + 1 < b.chunks ? b.records + int64_t{turn + 1} * b.value_heads : nullptr;
            advance_state(s, solve, shared.stages[turn % kStages], shared.passed[turn % 2][half], next, half, lane);
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
        for (int turn = 0; turn < kStages - 1; ++turn) load_stage(shared.stages[turn], b, turn, thread);
        for (int turn = 0; turn <= b.chunks; ++turn) {
            wait_copies<kStages - 2>();
            meet();
            load_stage(shared.stages[(turn + kStages - 1) % kStages], b, turn + kStages - 1, thread);
            if (turn == 0) continue;
            const Record* next = turn < b.chunks ? b.records + int64_t{turn} * b.value_heads : nullptr;
            find_output(scores, shared.stages[turn % kStages], shared.passed[(turn - 1) % 2][half], next,
                        to + (turn - 1) * kChunk * ld, ld, b.length - (turn - 1) * kChunk, lane);
        }
        wait_copies<0>();
    }
}

template <int kStages>
void launch_scan(Context& context, const DeltaStep& p, dim3 grid) {
    launch(context, "delta_prefill: scan", scan<kStages>, grid, dim3(kThreads), sizeof(ScanShared<kStages>), p);
}

void launch_best_scan(Context& context, const DeltaStep& p) {
    const dim3 grid(static_cast<unsigned>(p.value_heads * (kDim / kSlice)), static_cast<unsigned>(p.sequences));
    // Deeper prefetch where blocks do not compete for an SM's shared memory.
    const bool alone = static_cast<int>(grid.x * grid.y) <= context.sms;
    if (alone && context.shared_bytes >= static_cast<int>(sizeof(ScanShared<4>))) {
        launch_scan<4>(context, p, grid);
    } else {
        launch_scan<2>(context, p, grid);
    }
}

}  // namespace

static_assert(sizeof(Record) == kDeltaRecordBytes);

void delta_prefill(Context& context, const DeltaStep& p) {
    if (p.tokens <= 0 || p.sequences <= 0) return;
    const auto chunks = static_cast<unsigned>(delta_chunks(p.tokens, p.sequences));
    launch(context, "delta_prefill: prepare", prepare, dim3(static_cast<unsigned>(p.key_heads), chunks),
           dim3(kPrepareThreads), 0, p);
    launch_best_scan(context, p);
}

}  // namespace quern::cuda
