// The chunked delta rule's second kernel: chunk after chunk, S and the output (prefill.cu has the formulas). Cards with products of
// warpgroups take prefill_scan_warpgroups.cu.
//
//   block = (sequence, value head, 32 columns of v); 4 warps
//
//     round      0          1          2          3              warps 0, 1   S [16 v, 128 k] each, in registers
//     warps 0 1  chunk 0    chunk 1    chunk 2    ...            warps 2, 3   o [64 rows, 16 v] each; all copies
//     warps 2 3  (copies)   chunk 0    chunk 1    chunk 2 ...
//
//   All meet once a round, not inside a chunk. A state warp passes S before the chunk, and U, to its output warp.
//
// Shared memory: kStages stages of x_k, x_q, v and factors (37 KB each), filled kStages - 1 rounds ahead, and two
// rounds of what is passed on (24 KB). 4 stages where each block has an SM for itself, else 2, so that two blocks fit.
#include "ggml-like/cuda/delta/prefill_scan_products.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kThreads = 128;

/// A barrier for warps of both roles, which meet from different places in the code; __syncthreads does not promise to
/// allow that.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

template <int kStages>
struct ScanShared {
    Stage stages[kStages];
    Passed passed[2][kSlice / 16];
};

/// 64 threads: starts copying a chunk's rows of kParts 16-byte parts; zeros past the sequence's end.
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

/// Starts all copies of a round.
__device__ __forceinline__ void load_stage(Stage& stage, const ScanBlock& b, int round, int thread) {
    if (round < b.chunks) {
        load_tile<16>(stage.k, b, round, b.k_column, thread);
        load_tile<4>(stage.v, b, round, b.v_column, thread);
        const float* factors = b.record(round)->error;
        if (thread < 33) copy_async16(stage.factors + 4 * thread, factors + 4 * thread);
    }
    if (round > 0 && round <= b.chunks) {
        load_tile<16>(stage.q, b, round - 1, b.q_column, thread);
        const float* factors = b.record(round - 1)->read;
        if (thread < 16) copy_async16(stage.factors + 3 * kChunk + 4 * thread, factors + 4 * thread);
    }
    commit_copies();
}

template <int kStages>
__global__ __launch_bounds__(kThreads) void scan(DeltaStep p) {
    extern __shared__ __align__(128) unsigned char raw[];
    auto& shared = *reinterpret_cast<ScanShared<kStages>*>(raw);
    allow_successor();
    wait_for_predecessor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = static_cast<int>(blockIdx.x) / (kDim / kSlice), slice = blockIdx.x % (kDim / kSlice);
    ScanBlock b(p, head, static_cast<int>(blockIdx.y), lane);
    if (b.length == 0) return;
    b.v_column += slice * kSlice;

    const int half = warp % 2;  // which 16 columns of the slice
    const int v = slice * kSlice + 16 * half;
    if (warp < 2) {
        float* delta = b.state(p, v, lane);
        float s[16][4];
        load_state(s, delta, p.positions[b.begin] == 0);
        uint4 solve[kTriangle];
        load_triangle(solve, b.records->solve, lane);
        for (int round = 0; round <= b.chunks; ++round) {
            meet();
            if (round == b.chunks) break;
            const Record* record = b.record(round);
            const Record* next = round + 1 < b.chunks ? b.record(round + 1) : nullptr;
            advance_state(s, solve, shared.stages[round % kStages], shared.passed[round % 2][half], *record,
                          next, half, lane);
        }
        store_state(s, delta);
    } else {
        const int thread = threadIdx.x - 64;
        const int64_t ld = int64_t{p.value_heads} * kDim;
        bf16* to = static_cast<bf16*>(p.o) + b.begin * ld + head * kDim + v;
        uint4 scores[kTriangle];
        load_triangle(scores, b.records->scores, lane);
#pragma unroll
        for (int round = 0; round < kStages - 1; ++round) load_stage(shared.stages[round], b, round, thread);
        for (int round = 0; round <= b.chunks; ++round) {
            wait_copies<kStages - 2>();
            meet();
            load_stage(shared.stages[(round + kStages - 1) % kStages], b, round + kStages - 1, thread);
            if (round == 0) continue;
            const Record* next = round < b.chunks ? b.record(round) : nullptr;
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
    // More stages where each block has an SM for itself.
    const bool alone = static_cast<int>(grid.x * grid.y) <= context.sms;
    if (alone && context.shared_bytes >= static_cast<int>(sizeof(ScanShared<4>))) {
        launch_staged<4>(context, p, grid);
    } else {
        launch_staged<2>(context, p, grid);
    }
}

}  // namespace quern::cuda::delta
