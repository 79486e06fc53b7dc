// Products of an answer step of many rows (step_product.h).
//
//               rows of x: 16 or 32          A warp owns one tile of 16 weight rows and these rows of x. A sum has up to 16
//   tile 0  w0 | sums of all rows, per warp  splits, each over every 16th piece of the columns, as in few_rows.cuh; they are
//   tile 1  w1 | pieces march on together    added in fours, then the fours. A warp makes the splits one after another, or,
//   ..      .. |                             of a matrix with few tiles, one four of the four.
//
// Shared memory: a ring of stages, each a piece of every tile (fragment order, 16 bytes a lane) and the same columns of
// x (rows of 128 bytes whose 16-byte columns are XORed with the row). Traffic: weights once, x once a block, from L2.
// Limit: reads of x from shared memory, 2 KB for 8 products a warp; for NVFP4 also the instructions of the block scales.
#include "ggml-like/cuda/linear/step_product.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_rows.cuh"
#include "ggml-like/cuda/linear/finish_sum.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

constexpr int kMaxWarps = 6, kFourWarps = 8, kMaxStages = 8;
constexpr int kPairs = 2;  // of eights of rows of x, that a warp has at most
constexpr int kEights = 2 * kPairs;

struct StepShape {
    int chunks, cols;
    int splits, steps;  // of a sum, pieces of one
    int fours;          // that a block makes at the same time, by warps of their own: 1 or 4
    int tiles;          // of a block
    int rows;           // of x in a block: 16 or 32
    int stages, weight_stage, row_stage;  // bytes of one

    __host__ __device__ int stage_bytes() const { return weight_stage + row_stage; }
    __host__ __device__ int warps() const { return tiles * fours; }
    /// Stages that a block goes through.
    __host__ __device__ int all() const { return splits * steps / fours; }
};

struct StepTask {
    Part part;
    StepShape shape;
    StepRows x;
    StepOutput out;
};

/// x as few_rows.cuh has it: the products' operands are the same, and so are their sums.
template <Kind K>
__device__ __forceinline__ void lift(uint32_t (&b)[4]) {
    if constexpr (K == Kind::bf16) return;
    const __nv_bfloat162 by = __float2bfloat162_rn(kActivationLift<K>);
#pragma unroll
    for (uint32_t& v : b) {
        const __nv_bfloat162 p = __hmul2(reinterpret_cast<const __nv_bfloat162&>(v), by);
        v = reinterpret_cast<const uint32_t&>(p);
    }
}

/// sum += (chunk of 16 x 64) times 64 columns of the rows; as few_rows.cuh's multiply_chunk, bit by bit.
template <Kind K>
struct StepChunk {
    const uint8_t* chunk;
    int pairs;      // that there are
    uint32_t rows;  // shared address of the first 16 rows, with the lane's place

    __device__ __forceinline__ void operands(int kk, int j, uint32_t (&b)[4]) const {
        load_matrices(b, (rows ^ static_cast<uint32_t>(kk * 32)) + j * 2048);
        lift<K>(b);
    }
    __device__ __forceinline__ void products(int kk, const uint32_t (&a)[4], float (&sum)[kEights][4]) const {
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            if (j >= pairs) break;
            uint32_t b[4];
            operands(kk, j, b);
            mma(sum[2 * j], a, b[0], b[1]);
            mma(sum[2 * j + 1], a, b[2], b[3]);
        }
    }
    __device__ __forceinline__ void add(int lane, float (&sum)[kEights][4]) const {
        if constexpr (K == Kind::bf16) {
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
                const uint4 w = load16(chunk + 512 * kk + 16 * lane);
                const uint32_t a[4] = {w.x, w.y, w.z, w.w};
                products(kk, a, sum);
            }
        } else if constexpr (K == Kind::fp8) {
            add_fp8_chunk(
                chunk, lane,
                [&](int kk, const uint32_t(&a)[4], float(&partial)[kEights][4]) { products(kk, a, partial); },
                sum);
        } else {
            add_fp4(lane, sum);
        }
    }

  private:
    __device__ __forceinline__ void add_fp4(int lane, float (&sum)[kEights][4]) const {
        const uint4 w = load16(chunk + 16 * lane);
        const uint2 bytes = *reinterpret_cast<const uint2*>(chunk + 512 + 8 * (lane >> 2));
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
        float low[4], high[4];
        scales_of(bytes.x, low);
        scales_of(bytes.y, high);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            uint32_t a[4];
            decode_nvfp4(words[kk / 2 * 2], words[kk / 2 * 2 + 1], kk % 2, a);
#pragma unroll
            for (int j = 0; j < kPairs; ++j) {
                if (j >= pairs) break;
                uint32_t b[4];
                operands(kk, j, b);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float d[4] = {};
                    mma(d, a, b[2 * h], b[2 * h + 1]);
                    float(&to)[4] = sum[2 * j + h];
#pragma unroll
                    for (int i = 0; i < 4; ++i) to[i] = __fmaf_rn(i < 2 ? low[kk] : high[kk], d[i], to[i]);
                }
            }
        }
    }
};

template <Kind K>
struct StepBlock {
    const StepTask& task;
    uint8_t* shared;
    int warp, lane, tile, four;  // of this warp

    __device__ StepBlock(const StepTask& t, uint8_t* memory)
        : task(t), shared(memory), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {
        const StepShape& s = t.shape;
        four = s.fours == 1 ? 0 : warp % s.fours;
        tile = blockIdx.x * s.tiles + (s.fours == 1 ? warp : warp / s.fours);
    }
    /// The first chunk of the piece that four `f` has in stage `step`; kPieceChunks<K> chunks, if they exist.
    __device__ __forceinline__ int chunk_of(int f, int step) const {
        const StepShape& s = task.shape;
        const int at = f * s.all() + step, split = at / s.steps;
        return (split + (at - split * s.steps) * s.splits) * kPieceChunks<K>;
    }
    __device__ __forceinline__ uint8_t* weights_of(int stage) const {
        return shared + stage * task.shape.stage_bytes() + warp * kPieceBytes<K>;
    }
    __device__ __forceinline__ uint8_t* rows_of(int stage, int f) const {
        return shared + stage * task.shape.stage_bytes() + task.shape.weight_stage +
               f * kPieceChunks<K> * row_chunk_bytes();
    }

    /// Bytes of 64 columns of the block's rows.
    __device__ __forceinline__ int row_chunk_bytes() const { return task.shape.rows * 128; }

    __device__ __forceinline__ void copy_weights(int stage, int step) const {
        const StepShape& s = task.shape;
        const int chunk = chunk_of(four, step);
        if (tile >= task.part.tiles || chunk >= s.chunks) return;
        const int bytes = min(kPieceChunks<K>, s.chunks - chunk) * chunk_bytes(K);
        const uint8_t* from =
            task.part.data + (static_cast<int64_t>(tile) * s.chunks + chunk) * chunk_bytes(K);
        uint8_t* to = weights_of(stage);
        for (int i = 16 * lane; i < bytes; i += 512) copy_async16(to + i, from + i);
    }
    __device__ __forceinline__ void copy_rows(int stage, int step) const {
        const StepShape& s = task.shape;
        const int column = threadIdx.x % 8, threads = blockDim.x / 8;
        for (int f = 0; f < s.fours; ++f) {
            const int chunk = chunk_of(f, step);
            uint8_t* to = rows_of(stage, f);
#pragma unroll
            for (int k = 0; k < kPieceChunks<K>; ++k) {
                const int at = (chunk + k) * kChunkCols + column * 8,
                          bytes = max(0, min(16, (s.cols - at) * 2));
                if (chunk + k >= s.chunks) break;
                const bf16* from = task.x.x + (bytes > 0 ? at : 0);
                for (int n = threadIdx.x / 8; n < s.rows; n += threads)
                    copy_async_part(
                        to + k * row_chunk_bytes() + n * 128 + ((column ^ (n & 7)) << 4),
                        from + min(static_cast<int>(blockIdx.y) * s.rows + n, task.x.rows - 1) * task.x.ld,
                        bytes);
            }
        }
    }
    /// The warp's piece of a stage.
    __device__ __forceinline__ void multiply(int stage, int step, float (&sum)[kEights][4]) const {
        const int chunk = chunk_of(four, step);
        const int row = (lane & 7) + ((lane >> 4) << 3);
        const uint32_t place = static_cast<uint32_t>(row * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4));
        const uint32_t rows = shared_address(rows_of(stage, four));
#pragma unroll
        for (int k = 0; k < kPieceChunks<K>; ++k)
            if (chunk + k < task.shape.chunks)
                StepChunk<K>{weights_of(stage) + k * chunk_bytes(K), task.shape.rows / 16,
                             rows + place + k * row_chunk_bytes()}
                    .add(lane, sum);
    }

  private:
    /// Copies the first `bytes` of 16 and writes zeros for the rest.
    __device__ static __forceinline__ void copy_async_part(void* to, const void* from, int bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                     "r"(bytes));
    }
};

__device__ __forceinline__ void add_to(float (&to)[kEights][4], float (&from)[kEights][4]) {
#pragma unroll
    for (int nt = 0; nt < kEights; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[nt][i] += from[nt][i], from[nt][i] = 0;
}

/// Waits for the oldest of `stages` - 1 groups of copies.
__device__ __forceinline__ void wait_stage(int stages) {
    switch (stages) {
        case 2:
            return wait_copies<0>();
        case 3:
            return wait_copies<1>();
        case 4:
            return wait_copies<2>();
        case 5:
            return wait_copies<3>();
        case 6:
            return wait_copies<4>();
        case 7:
            return wait_copies<5>();
        default:
            return wait_copies<6>();
    }
}

/// The sums of one tile, [four][row][16] at `sums`, fours `four_step` apart, to where they go.
template <Kind K>
__device__ __forceinline__ void finish_tile(const StepTask& task, int tile, int first, int rows,
                                            const float* sums, int four_step, const float* factors) {
    const StepOutput& out = task.out;
    const int kept = out.paired ? 8 : 16, height = out.paired ? task.part.rows / 2 : task.part.rows;
    const int r = threadIdx.x % 16, row = tile * kept + r;
    if (r >= kept || row >= height) return;
    for (int n = threadIdx.x / 16; n < rows; n += blockDim.x / 16) {
        const auto sum_of = [&](int at) {
            float total = 0;
            for (int f = 0; f < task.shape.fours; ++f) total += sums[f * four_step + n * 16 + at];
            return K == Kind::bf16 ? total : scaled(total, task.part.factor[tile * kTileRows + at]);
        };
        const float scale = out.scale.squares != nullptr ? factors[n] : 1.0f;
        finish_sum(out, first + n, row, sum_of(r), out.paired ? sum_of(r + 8) : 0.0f, scale);
    }
}

template <Kind K>
__global__ void __launch_bounds__(kFourWarps * 32, 1) step_kernel(const __grid_constant__ StepTask task) {
    extern __shared__ __align__(1024) uint8_t shared[];
    __shared__ float factors[8 * kEights];
    allow_successor();
    const StepShape& s = task.shape;
    const StepBlock<K> block(task, shared);
    const int all = s.all(), primed = min(s.stages - 1, all);
    for (int i = 0; i < primed; ++i) block.copy_weights(i, i);
    wait_for_predecessor();
    for (int i = 0; i < s.stages - 1; ++i) {
        if (i < primed) block.copy_rows(i, i);
        commit_copies();
    }
    const int first = blockIdx.y * s.rows, rows = min(s.rows, task.x.rows - first);
    if (task.out.scale.squares != nullptr) norm_factors(task.out.scale, first, 1, rows, s.warps(), factors);
    float sum[kEights][4] = {}, four[kEights][4] = {}, total[kEights][4] = {};
    int stage = 0, in_split = 0, split = 0;
#pragma unroll 1
    for (int step = 0; step < all; ++step) {
        wait_stage(s.stages);
        __syncthreads();
        const int ahead = step + s.stages - 1, to = stage == 0 ? s.stages - 1 : stage - 1;
        if (ahead < all) {
            block.copy_weights(to, ahead);
            block.copy_rows(to, ahead);
        }
        commit_copies();
        block.multiply(stage, step, sum);
        stage = stage + 1 == s.stages ? 0 : stage + 1;
        if (++in_split < s.steps) continue;
        in_split = 0;
        add_to(four, sum);
        if (++split % 4 == 0) add_to(total, four);
    }
    add_to(total, four);
    wait_copies<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int nt = 0; nt < kEights; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (8 * nt < s.rows)
                sums[block.warp * s.rows * 16 + (8 * nt + 2 * (block.lane & 3) + (i & 1)) * 16 +
                     (block.lane >> 2) + (i >> 1) * 8] = total[nt][i];
    __syncthreads();
    for (int t = 0; t < s.tiles; ++t) {
        const int tile = blockIdx.x * s.tiles + t;
        if (tile < task.part.tiles)
            finish_tile<K>(task, tile, first, rows, sums + t * s.fours * s.rows * 16, s.rows * 16, factors);
    }
}

/// Tiles of a block, two blocks an SM, so that they come in as few rounds as possible.
int tiles_of_block(int tiles, int row_tiles, int sms) {
    int best = kMaxWarps, least = 1 << 30;
    for (int each = kMaxWarps; each >= 3; --each) {
        const int blocks = (tiles + each - 1) / each * row_tiles,
                  time = (blocks + 2 * sms - 1) / (2 * sms) * each;
        if (time < least) least = time, best = each;
    }
    return best;
}

template <Kind K>
void launch_step(Context& c, const StepTask& given) {
    StepTask task = given;
    StepShape& s = task.shape;
    const int pieces = pieces_for(K, s.chunks), tiles = task.part.tiles;
    s.rows = task.x.rows <= 16 ? 16 : 32;
    const int row_tiles = (task.x.rows + s.rows - 1) / s.rows;
    s.splits = warps_per_tile(pieces);
    s.steps = (pieces + s.splits - 1) / s.splits;
    s.fours = s.splits == 16 && tiles <= 2 * c.sms ? 4 : 1;
    s.tiles = s.fours == 1 ? tiles_of_block(tiles, row_tiles, c.sms) : tiles * row_tiles <= 2 * c.sms ? 1 : 2;
    s.weight_stage = (s.warps() * kPieceBytes<K> + 1023) / 1024 * 1024;
    s.row_stage = s.fours * kPieceChunks<K> * s.rows * 128;
    const int room = c.shared_bytes / 2 - 1024;
    s.stages = max(2, min(kMaxStages, room / s.stage_bytes()));
    const int bytes = max(s.stages * s.stage_bytes(), s.warps() * s.rows * 64);
    launch(c, s.rows == 16 ? "step_product 16" : "step_product 32", step_kernel<K>,
           dim3((tiles + s.tiles - 1) / s.tiles, row_tiles), s.warps() * 32, bytes, task);
}

}  // namespace

void step_product(Context& c, AnswerProduct product, const Part& part, const Packed& w, const StepRows& x,
                  const StepOutput& out, const comm::Peers* peers) {
    if (x.rows > kStepRows) unsupported("step_product", "more than 64 rows of an answer step");
    if (product == AnswerProduct::held) return dense_held(c, part, w, x, out);
    if (product != AnswerProduct::step) return gemm_answer(c, product, part, w, x, out, peers);
    StepTask task{part, {}, x, out};
    task.shape.chunks = w.chunks, task.shape.cols = w.cols;
    if (part.kind == Kind::bf16) return launch_step<Kind::bf16>(c, task);
    if (part.kind == Kind::fp8) return launch_step<Kind::fp8>(c, task);
    launch_step<Kind::nvfp4>(c, task);
}

}  // namespace quern::cuda::linear
