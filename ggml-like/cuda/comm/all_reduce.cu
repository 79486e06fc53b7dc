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

#include "ggml-like/cuda/comm/peers.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::comm {

using namespace ptx;

namespace {

constexpr int kPolls = 1024;  // between two looks at the clock and at the host's word

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

/// How long somebody waits for one message.
class Waiting {
  public:
    __device__ explicit Waiting(const Peers& p) : p_(p), lost_(__ldcg(&p.own->lost) != 0) {}

    /// Whether to give up; called after each look that was in vain.
    __device__ bool over() {
        if (lost_) return true;
        if (++polls_ % kPolls != 0) return false;
        const uint64_t now = nanoseconds();
        if (begun_ == 0) begun_ = now;
        if (p_.watch->abort == 0 && now - begun_ < p_.patience) return false;
        lost_ = true;
        p_.own->lost = 1;
        p_.watch->lost[p_.rank] = 1;
        __threadfence_system();
        return true;
    }

  private:
    const Peers& p_;
    bool lost_;
    unsigned polls_ = 0;
    uint64_t begun_ = 0;
};

// ---- small ----

__device__ __forceinline__ uint4* packets(const Peers& p, int box, uint32_t number, int from) {
    return reinterpret_cast<uint4*>(p.box[box]) + ((number & 1) * p.ranks + from) * kSmallPairs;
}

__device__ __forceinline__ void send_packet(uint4* to, float2 v, uint32_t number) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(__float_as_uint(v.x)),
                 "r"(number), "r"(__float_as_uint(v.y)), "r"(number)
                 : "memory");
}

/// Halves of a packet, 8 bytes each, arrive whole.
__device__ __forceinline__ float2 receive_packet(const uint4* from, uint32_t number, Waiting& waiting) {
    uint32_t a, first, b, second;
    do {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a), "=r"(first), "=r"(b), "=r"(second)
                     : "l"(from)
                     : "memory");
    } while ((first != number || second != number) && !waiting.over());
    return make_float2(__uint_as_float(a), __uint_as_float(b));
}

__global__ void __launch_bounds__(kSmallThreads)
    all_reduce_small(const __grid_constant__ Peers p, const float* part, float* sum, int64_t pairs) {
    allow_successor();
    wait_for_predecessor();
    const uint32_t number = __ldcg(&p.own->small[blockIdx.x]) + 1;
    const auto* mine = reinterpret_cast<const float2*>(part);
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kSmallThreads + threadIdx.x,
                  step = static_cast<int64_t>(kSmallBlocks) * kSmallThreads;
    for (int64_t i = first; i < pairs; i += step) {
        const float2 v = __ldcg(mine + i);
        for (int r = 1; r < p.ranks; ++r) {  // everybody begins with another one
            const int to = (p.rank + r) % p.ranks;
            send_packet(packets(p, to, number, p.rank) + i, v, number);
        }
    }
    Waiting waiting(p);
    for (int64_t i = first; i < pairs; i += step) {
        float2 total = make_float2(0, 0);
        for (int from = 0; from < p.ranks; ++from) {
            const float2 v = from == p.rank
                                 ? __ldcg(mine + i)
                                 : receive_packet(packets(p, p.rank, number, from) + i, number, waiting);
            total = from == 0 ? v : make_float2(__fadd_rn(total.x, v.x), __fadd_rn(total.y, v.y));
        }
        reinterpret_cast<float2*>(sum)[i] = total;
    }
    __syncthreads();
    if (threadIdx.x == 0) p.own->small[blockIdx.x] = number;
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
    if (const int64_t pairs = count / 2; pairs <= kSmallPairs) {
        const int64_t blocks = min((pairs + kSmallThreads - 1) / kSmallThreads, int64_t{kSmallBlocks});
        return launch(c, "all_reduce small", all_reduce_small, static_cast<unsigned>(blocks), kSmallThreads,
                      0, p, part, sum, pairs);
    }
    const int64_t each = int64_t{kChunk} * p.ranks;
    const int64_t blocks = min((count + each - 1) / each, int64_t{kLargeBlocks});
    launch(c, "all_reduce large", all_reduce_large, static_cast<unsigned>(blocks), kLargeThreads, 0, p, part,
           sum, count);
}

}  // namespace quern::cuda::comm
