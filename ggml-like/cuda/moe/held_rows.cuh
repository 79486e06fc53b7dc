// The rows of x that a block of the stream (fp4_stream.cuh) holds in shared memory at a time, and how they get there.
//
//     slots   | rows of the shared expert's groups | rows of routed groups |      up to Stream::slots
#pragma once

#include "ggml-like/cuda/moe/tile_runs.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// Which rows: those of the block's next groups, whole groups, as many as fit.
struct HeldRows {
    int shared_rows = 0, slots = 0;
    int first_row = 0, first_pair = 0;  // of the shared expert; place of the first routed pair
    int next_group;                     // the first whose rows do not fit, or are not needed

    __device__ __forceinline__ HeldRows(const ExpertGroups& list, const TileLine& line, int from, int end)
        : next_group(line.run(from, 1).group) {
        for (; next_group < list.count && line.first_tile(next_group) < end; ++next_group) {
            const ExpertGroup group = list.group[next_group];
            if (slots + group.count > line.s.slots) break;
            if (slots == 0) first_row = group.first;
            if (slots == shared_rows) first_pair = group.first;
            slots += group.count;
            if (group.expert < 0) shared_rows = slots;
        }
    }
    __device__ __forceinline__ bool is_shared(int slot) const { return slot < shared_rows; }
    /// A slot's pair, or its row for the shared expert.
    __device__ __forceinline__ int index(const ExpertGroups& list, int slot) const {
        const int at = place(slot);
        return is_shared(slot) ? at : list.pair[at];
    }
    /// Its place in groups, or its row for the shared expert.
    __device__ __forceinline__ int place(int slot) const {
        return is_shared(slot) ? first_row + slot : first_pair + slot - shared_rows;
    }
    __device__ __forceinline__ int slot_of(const ExpertGroup& group) const {
        return group.expert < 0 ? group.first - first_row : shared_rows + group.first - first_pair;
    }
};

/// Brings held rows into shared memory, 16 numbers a thread at a time. begin() loads the first of them into registers,
/// end() stores these and brings the rest.
template <class Work>
struct RowLoads {
    static constexpr int kEarly = 2;
    const Work& work;
    const HeldRows& held;
    const ExpertGroups& list;
    uint8_t* rows;
    int row_bytes;
    Divisor blocks;  // of 16 numbers, in a row
    Fp4Block early[kEarly];

    __device__ __forceinline__ RowLoads(const Work& w, const HeldRows& h, const ExpertGroups& l, uint8_t* r,
                                        int bytes)
        : work(w), held(h), list(l), rows(r), row_bytes(bytes), blocks(bytes / 32) {}
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < kEarly; ++i) load(early[i], threadIdx.x + i * kThreads);
    }
    __device__ __forceinline__ void end() const {
#pragma unroll
        for (int i = 0; i < kEarly; ++i) store(early[i], threadIdx.x + i * kThreads);
#pragma unroll 2
        for (int b = threadIdx.x + kEarly * kThreads; b < held.slots * blocks.by(); b += kThreads) {
            Fp4Block block;
            load(block, b);
            store(block, b);
        }
    }

  private:
    __device__ __forceinline__ void load(Fp4Block& block, int b) const {
        const int slot = blocks.quotient(b), column = (b - slot * blocks.by()) * 16;
        if (slot >= held.slots) return;
        const bool shared = held.is_shared(slot);
        const int of = Work::kRowsAtPlaces ? held.place(slot) : held.index(list, slot);
        if (column < work.width(shared)) block.load(work.row(shared, of) + column);
    }
    __device__ __forceinline__ void store(const Fp4Block& block, int b) const {
        const int slot = blocks.quotient(b);
        if (slot < held.slots)
            block.template store<!Work::kPrompt>(rows + slot * row_bytes, b - slot * blocks.by());
    }
};

}  // namespace quern::cuda::moe
