// The scan of the chunked delta rule by products of warpgroups (sm_90a); bits as those of prefill_scan.cu.
//
//   block = (sequence, value head, 64 columns of v)
//
//     warps 0 .. 3   S [16 v, 128 k] each, in registers:   S X_k^T | errors | U = A (..) | S += U^T X_k | S X_k^T ...
//     warps 4 .. 7   o [64 rows, 16 v] each:                         S X_q^T            | P U          | stores
//     one warp       all copies, by the copy engine, of what `prepare` has told is there
//
//   A state warp passes S before the chunk, and U, to its output warp, whose products run where the state's leave the tensor
//   cores free.
//
// Shared memory (prefill_scan_warpgroups.cuh, 220 KB, so one block an SM): three stages of x_k, v and A, two of x_q and P, two
// chunks of what is passed on. The zeros of A and P above the diagonal are written once, and copies leave them out.
// Bound: latency. A chunk takes some 3,100 cycles, of which its products need 1,400; 32 heads make 64 blocks. Measured for
// 1,000 and 8,192 rows of one sequence: 34 and 233 us (H200, 2026-11).
#include "ggml-like/cuda/delta/prefill_scan_warpgroups.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"
#include "ggml-like/cuda/ptx/tensor_map.cuh"
#include "ggml-like/cuda/ptx/told.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

using namespace warpgroups;

constexpr int kThreads = 3 * 128;

#if QUERN_WGMMA

__device__ __forceinline__ void init(Shared& shared) {
    if (threadIdx.x == 0) {
        const auto init_all = [](uint64_t* barriers, int stages, int count) {
            for (int i = 0; i < stages; ++i) init_phases(barriers + i, count);
        };
        init_all(shared.key_turns.full, kKeyStages, 1), init_all(shared.key_turns.empty, kKeyStages, 4);
        init_all(shared.query_turns.full, kQueryStages, 1),
            init_all(shared.query_turns.empty, kQueryStages, 4);
        init_all(shared.state_full, kPassed, 4), init_all(shared.u_full, kPassed, 4);
        init_all(shared.passed_empty, kPassed, 4);
        publish_phases();
    }
    const auto clear = [](void* square, int bytes) {
        for (int i = threadIdx.x * 16; i < bytes; i += kThreads * 16)
            *reinterpret_cast<uint4*>(static_cast<uint8_t*>(square) + i) = uint4{};
    };
    clear(shared.solve, sizeof shared.solve), clear(shared.scores, sizeof shared.scores);
    fence_async_proxy();
    __syncthreads();
}

/// One warp: all chunks of the block.
struct Copies {
    const DeltaStep& p;
    Shared& shared;
    const ScanBlock& b;
    const CUtensorMap& x;
    bool told;  // whether counts say what is there; else all of it is

    /// Two boxes, of 128 columns.
    __device__ __forceinline__ void copy_head(uint8_t (&to)[2][kBoxBytes], int column, int row,
                                              uint64_t* full) const {
        copy_box(to[0], x, column, row, full), copy_box(to[1], x, column + 64, row, full);
    }
    __device__ __forceinline__ void copy_triangle(Square& to, const Triangle& from, uint64_t* full) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) copy_bytes(to[j][2 * j], from + first_matrix(j), (4 - j) * 4 * 128, full);
    }
    /// Waits for a chunk; returns how many are there, or more.
    __device__ __forceinline__ int wait_for(int chunk) const {
        const int lane = threadIdx.x % 32, own = min(chunk + lane, b.chunks - 1);
        const int* count = told_of(p, b.before + own, b.key_head);
        unsigned missing;
        do missing = __ballot_sync(0xffffffffu, told_by_now(count) == 0);
        while ((missing & 1) != 0);
        __syncwarp();
        see_told();
        return chunk + (missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1);
    }
    __device__ __forceinline__ void copy_all() const {
        Place<kKeyStages> key;
        Place<kQueryStages> query;
        int there = told ? 0 : b.chunks;
#pragma unroll 1
        for (int chunk = 0; chunk < b.chunks; ++chunk, key.next(), query.next()) {
            if (chunk >= there) there = wait_for(chunk);
            wait_phase(shared.key_turns.empty + key.at, key.phase ^ 1);
            if (elected()) copy_key(chunk, key.at);
            wait_phase(shared.query_turns.empty + query.at, query.phase ^ 1);
            if (elected()) copy_query(chunk, query.at);
        }
    }
    __device__ __forceinline__ void copy_key(int chunk, int at) const {
        const int row = b.begin + chunk * kChunk;
        const Record* record = b.record(chunk);
        uint64_t* full = shared.key_turns.full + at;
        arrive_and_expect(full, 3 * kBoxBytes + 2 * sizeof(Triangle) + sizeof(KeyFactors));
        copy_head(shared.keys[at].k, b.k_column, row, full);
        copy_box(shared.keys[at].v, x, b.v_column, row, full);
        copy_bytes(&shared.factors[at], record->error, sizeof(KeyFactors), full);
        copy_triangle(shared.solve[at][0], record->solve, full);
        copy_triangle(shared.solve[at][1], record->solve_low, full);
    }
    __device__ __forceinline__ void copy_query(int chunk, int at) const {
        const Record* record = b.record(chunk);
        uint64_t* full = shared.query_turns.full + at;
        arrive_and_expect(full, 2 * kBoxBytes + sizeof(Triangle) + sizeof(record->read));
        copy_head(shared.queries[at].q, b.q_column, b.begin + chunk * kChunk, full);
        copy_triangle(shared.scores[at], record->scores, full);
        copy_bytes(shared.read[at], record->read, sizeof(record->read), full);
    }
};

__device__ __forceinline__ void advance_all(const DeltaStep& p, const ScanBlock& b, int v, Shared& shared) {
    const int lane = threadIdx.x % 32;
    float* state = b.state(p, v, lane);
    float s[16][4];
    load_state(s, state, p.positions[b.begin] == 0);
    Place<kKeyStages> key;
    Place<kPassed> pass;
#pragma unroll 1
    for (int chunk = 0; chunk < b.chunks; ++chunk, key.next(), pass.next()) {
        wait_phase(shared.key_turns.full + key.at, key.phase);
        const int rows = b.length - chunk * kChunk;
        if (rows < kChunk) clear_rows(shared.keys[key.at], rows);
        advance_state(shared, s, key, pass, b.length < 0);
    }
    store_state(s, state);
}

__device__ __forceinline__ void find_outputs(const DeltaStep& p, const ScanBlock& b, int v, Shared& shared) {
    const int64_t ld = int64_t{p.value_heads} * kDim;
    bf16* to = static_cast<bf16*>(p.o) + b.begin * ld + b.head * kDim + v;
    Place<kQueryStages> query;
    Place<kPassed> pass;
#pragma unroll 1
    for (int chunk = 0; chunk < b.chunks; ++chunk, query.next(), pass.next()) {
        float o[8][4];
        find_output(shared, o, query, pass, b.length < 0);
        store_output(o, to + chunk * kChunk * ld, ld, b.length - chunk * kChunk, threadIdx.x % 32);
    }
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    scan_warpgroups(const __grid_constant__ DeltaStep p, const __grid_constant__ CUtensorMap x, bool told) {
#if QUERN_WGMMA
    extern __shared__ __align__(1024) uint8_t unaligned[];
    Shared& shared = *reinterpret_cast<Shared*>(unaligned + (1024 - shared_address(unaligned) % 1024) % 1024);
    allow_successor();
    const int warp = threadIdx.x / 32;
    const int head = static_cast<int>(blockIdx.x) / (kDim / kColumns),
              slice = static_cast<int>(blockIdx.x) % (kDim / kColumns) * kColumns;
    init(shared);
    if (told) {  // what comes before `prepare` has ended when that has anything to tell
        if (threadIdx.x == 0) wait_until_told(told_of(p, 0, head / (p.value_heads / p.key_heads)), 1);
        __syncthreads();
    } else {
        wait_for_predecessor();
    }
    ScanBlock b(p, head, static_cast<int>(blockIdx.y), threadIdx.x % 32);
    if (b.length == 0) return wait_for_predecessor();
    b.v_column += slice;
    const int v = slice + warp % 4 * 16;
    if (warp < 4) {
        grow_registers<232>();
        advance_all(p, b, v, shared);
    } else if (warp < 8) {
        grow_registers<232>();
        find_outputs(p, b, v, shared);
    } else {
        shrink_registers<40>();
        if (warp == 8) Copies{p, shared, b, x, told}.copy_all();
        wait_for_predecessor();  // so that it has ended when this has
    }
#endif
}

/// Boxes are 64 columns of a chunk's rows.
CUtensorMap map_of_x(const DeltaStep& p) {
    const auto channels = static_cast<cuuint64_t>(2 * p.key_heads + p.value_heads) * kDim;
    return make_map(p.x, {.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          .dimensions = 2,
                          .size = {channels, static_cast<cuuint64_t>(p.tokens)},
                          .stride = {channels * 2},
                          .box = {64, kChunk},
                          .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
}

}  // namespace

void launch_scan_warpgroups(Context& context, const DeltaStep& p, bool told) {
    const dim3 grid(static_cast<unsigned>(p.value_heads * (kDim / kColumns)),
                    static_cast<unsigned>(p.sequences));
    launch(context, "delta_prefill: scan warpgroups", scan_warpgroups, grid, dim3(kThreads),
           kWarpgroupScanBytes, p, map_of_x(p), told);
}

}  // namespace quern::cuda::delta
