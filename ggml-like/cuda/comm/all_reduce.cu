// The sum over ranks: each pushes its numbers into the others' mailboxes (peers.h), waits for theirs and adds in the order
// of the ranks, so all of them get the same bits.
//
// small, up to 1.25 MB (answers): a thread sends two numbers in a packet of 16 bytes to every other rank, then polls its own
//   mailbox for theirs. One way over the link, no fence; twice the bytes.
//
//     rank 0  part -> | packet {a, n, b, n} ->->-  box of rank 1 | poll, add -> sum
//     rank 1  part -> | packet {a, n, b, n} ->->-  box of rank 0 | poll, add -> sum
//
// large (prompts): a block takes as many chunks as there are ranks, one for each to add. It sends every chunk to who adds it
//   (reduce-scatter), adds its own, and sends that sum to all (all-gather); a flag a block follows each of the two.
//
//     chunks of block b   | 0 | 1 | ... | ranks - 1 |  next round: + blocks * ranks
//
// Traffic over the link: small 2 (N - 1) messages, large 2 (N - 1) / N. Bound: small by one way's latency, large by the link.
#include "ggml-like/cuda/comm/all_reduce.h"

#include "ggml-like/cuda/comm/packets.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::comm {

using namespace ptx;

namespace {

// ---- small ----

__global__ void __launch_bounds__(kSmallThreads)
    all_reduce_small(const __grid_constant__ Peers p, const float* part, float* sum, int64_t count) {
    allow_successor();
    wait_for_predecessor();
    Packets packets(p);
    const auto* mine = reinterpret_cast<const float4*>(part);
    for (int64_t i = Packets::first(); i < count / 4; i += Packets::kStep) packets.send(i, __ldcg(mine + i));
    for (int64_t i = Packets::first(); i < count / 4; i += Packets::kStep)
        reinterpret_cast<float4*>(sum)[i] = packets.sum(i, __ldcg(mine + i));
    packets.end();
}

// ---- large ----

enum class Half : int { parts, sums };

__device__ __forceinline__ float4* chunk(const Peers& p, int box, uint32_t number, Half half, int from) {
    const int64_t place = (number & 1) * 2 + static_cast<int>(half),
                  at = (place * p.ranks + from) * kLargeBlocks + blockIdx.x;
    return reinterpret_cast<float4*>(p.box[box] + p.chunks_at) + at * (kChunk / 4);
}

__device__ __forceinline__ uint32_t* flag(const Peers& p, int box, Half half, int from) {
    auto* flags = reinterpret_cast<uint32_t*>(p.box[box] + p.flags_at);
    return flags + (static_cast<int>(half) * p.ranks + from) * kLargeBlocks + blockIdx.x;
}

/// Whole block: all that its threads have written so far is with the others before the flags are.
__device__ __forceinline__ void raise_flags(const Peers& p, Half half, uint32_t number) {
    __threadfence_system();
    __syncthreads();
    const int to = static_cast<int>(threadIdx.x);
    if (to < p.ranks && to != p.rank)
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(p, to, half, p.rank)), "r"(number)
                     : "memory");
}

/// Whole block: what the others wrote before they raised their flags is here.
__device__ __forceinline__ void await_flags(const Peers& p, Half half, uint32_t number) {
    const int from = static_cast<int>(threadIdx.x);
    if (from < p.ranks && from != p.rank) {
        Waiting waiting(p);
        uint32_t seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                         : "=r"(seen)
                         : "l"(flag(p, p.rank, half, from))
                         : "memory");
        } while (static_cast<int32_t>(seen - number) < 0 && !waiting.over());
    }
    __syncthreads();
}

__device__ __forceinline__ float4 add(const float4& a, const float4& b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__global__ void __launch_bounds__(kLargeThreads)
    all_reduce_large(const __grid_constant__ Peers p, const float* part, float* sum, int64_t count) {
    allow_successor();
    wait_for_predecessor();
    uint32_t number = __ldcg(&p.own->large[blockIdx.x]);
    const int64_t round_size = static_cast<int64_t>(gridDim.x) * p.ranks * kChunk;
    for (int64_t base = static_cast<int64_t>(blockIdx.x) * p.ranks * kChunk; base < count;
         base += round_size) {
        ++number;
        // Of chunk r of this round: where it begins, and its numbers in fours.
        const auto at = [&](int r) { return base + static_cast<int64_t>(r) * kChunk; };
        const auto fours = [&](int r) {
            return static_cast<int>(max(int64_t{0}, min(count - at(r), static_cast<int64_t>(kChunk)))) / 4;
        };
        const auto mine = [&](int r) { return reinterpret_cast<const float4*>(part + at(r)); };
        const auto result = [&](int r) { return reinterpret_cast<float4*>(sum + at(r)); };
        for (int r = 1; r < p.ranks; ++r) {
            const int to = (p.rank + r) % p.ranks;
            float4* there = chunk(p, to, number, Half::parts, p.rank);
            for (int i = threadIdx.x; i < fours(to); i += kLargeThreads) there[i] = __ldcg(mine(to) + i);
        }
        raise_flags(p, Half::parts, number);
        await_flags(p, Half::parts, number);
        for (int i = threadIdx.x; i < fours(p.rank); i += kLargeThreads) {
            float4 total = make_float4(0, 0, 0, 0);
            for (int from = 0; from < p.ranks; ++from) {
                const float4 v =
                    __ldcg(from == p.rank ? mine(from) + i : chunk(p, p.rank, number, Half::parts, from) + i);
                total = from == 0 ? v : add(total, v);
            }
            result(p.rank)[i] = total;
            for (int r = 1; r < p.ranks; ++r)
                chunk(p, (p.rank + r) % p.ranks, number, Half::sums, p.rank)[i] = total;
        }
        raise_flags(p, Half::sums, number);
        await_flags(p, Half::sums, number);
        for (int r = 1; r < p.ranks; ++r) {
            const int from = (p.rank + r) % p.ranks;
            const float4* here = chunk(p, p.rank, number, Half::sums, from);
            for (int i = threadIdx.x; i < fours(from); i += kLargeThreads) result(from)[i] = __ldcg(here + i);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.own->large[blockIdx.x] = number;
}

}  // namespace

void all_reduce(Context& c, const float* part, float* sum, int64_t count) {
    if (c.peers == nullptr) unsupported("all_reduce", "a GPU that is no rank of several");
    if (count % 4 != 0) unsupported("all_reduce", "a count that is no multiple of 4");
    const Peers& p = *c.peers;
    if (fits_packets(count))
        return launch(c, "all_reduce small", all_reduce_small, packet_blocks(count), kSmallThreads, 0, p,
                      part, sum, count);
    const int64_t each = int64_t{kChunk} * p.ranks;
    const int64_t blocks = min((count + each - 1) / each, int64_t{kLargeBlocks});
    launch(c, "all_reduce large", all_reduce_large, static_cast<unsigned>(blocks), kLargeThreads, 0, p, part,
           sum, count);
}

}  // namespace quern::cuda::comm
