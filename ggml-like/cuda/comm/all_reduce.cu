// The sum over ranks: each pushes its numbers into the others' mailboxes (peers.h), waits for theirs and adds in the order
// of the ranks, so all of them get the same bits.
//
// small, up to 1.25 MB (answers): a thread sends two numbers in a packet of 16 bytes to every other rank, then polls its own
//   mailbox for theirs. One way over the link, no fence; twice the bytes.
//
//     rank 0  part -> | packet {a, n, b, n} ->->-  box of rank 1 | poll, add -> sum
//     rank 1  part -> | packet {a, n, b, n} ->->-  box of rank 0 | poll, add -> sum
//
// large: chunks.cuh
//
// Traffic over the link: small 2 (N - 1) messages, large 2 (N - 1) / N. Bound: small by one way's latency, large by the link.
#include "ggml-like/cuda/comm/all_reduce.h"

#include "ggml-like/cuda/comm/chunks.cuh"
#include "ggml-like/cuda/comm/packets.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::comm {

using namespace ptx;

namespace {

constexpr int kColumns = 2048;  // of what has no rows: one round of a block of threads

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

struct Store {
    static constexpr bool kWhole = true;
    static constexpr int kPartsAtOnce = 2, kRowsAtOnce = 2;
    using Part = float4;
    struct Before {};

    const float* own;
    float* sum;

    __device__ float4 part(int64_t row, int column) const {
        return __ldcg(reinterpret_cast<const float4*>(own + row * kColumns + column));
    }
    __device__ Before before(int64_t, int) const { return {}; }
    __device__ float4 become(Before, const float4& v) const { return v; }
    __device__ void keep(int64_t row, int column, const float4& v, float&) const {
        *reinterpret_cast<float4*>(sum + row * kColumns + column) = v;
    }
    template <int kRows>
    __device__ void note(int, int, const float (&)[kRows]) const {}
    template <typename Send>
    __device__ void end_chunk(int64_t, int, const Send&) const {}
};

__global__ void __launch_bounds__(kLargeThreads)
    all_reduce_large(const __grid_constant__ Peers p, const float* part, float* sum,
                     const __grid_constant__ Cut cut) {
    allow_successor();
    wait_for_predecessor();
    Chunks<Store>(p, cut, {part, sum}).run();
}

}  // namespace

void all_reduce(Context& c, const float* part, float* sum, int64_t count) {
    if (c.peers == nullptr) unsupported("all_reduce", "a GPU that is no rank of several");
    if (count % 4 != 0) unsupported("all_reduce", "a count that is no multiple of 4");
    const Peers& p = *c.peers;
    if (fits_packets(count))
        return launch(c, "all_reduce small", all_reduce_small, packet_blocks(count), kSmallThreads, 0, p,
                      part, sum, count);
    const Cut cut(p.ranks, kColumns, count, sizeof(float), c.sms);
    launch(c, "all_reduce large", all_reduce_large, static_cast<unsigned>(cut.blocks), kLargeThreads, 0, p,
           part, sum, cut);
}

}  // namespace quern::cuda::comm
