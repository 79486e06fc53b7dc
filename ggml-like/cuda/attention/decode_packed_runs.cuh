// Attention of answer rows over packed caches: which keys a warp has, and how they come into its slots in shared memory.
//
//   units    16 keys of a page, counted from the row's newest key backwards, so that keys of this step come first
//   chunks   one for each 1,024 or 2,048 keys begun, at most 21; a chunk has 8 runs of `each` units, one for each block of its
//            cluster; the last runs, or chunks, may have none: their results weigh nothing
//   warps    take a run's units in turns
#pragma once

#include "ggml-like/cuda/attention/decode_packed.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

constexpr int kUnitsPerPage = kTileKeys / kWarpKeys;

/// Keys of a chunk, where there are not too many: two units a warp, or four where keys or values are fp8, of which a warp needs less time
/// for each; results of as many keys have to be merged half as often.
template <class K, class V>
constexpr int kChunkKeysOf =
    K::kPacking == Packing::fp8 || V::kPacking == Packing::fp8 ? 2 * kChunkKeys : kChunkKeys;

/// How a row's keys are divided, and what a block has of them.
struct Runs {
    int units, chunks, each;  // of the row; of a run
    int stride;               // from the begin of a block's run to that of its next one

    __device__ __forceinline__ Runs(int keys, int chunk_keys, int clusters) {
        units = (keys + kWarpKeys - 1) / kWarpKeys;
        chunks = min((keys + chunk_keys - 1) / chunk_keys, kMaxPackedChunks);
        each = quotient(units + chunks * kSplitBlocks - 1, chunks * kSplitBlocks);
        stride = clusters * kSplitBlocks * each;
    }
    /// The block's run of a chunk.
    __device__ __forceinline__ int begin(int chunk) const {
        return (chunk * kSplitBlocks + static_cast<int>(blockIdx.x) % kSplitBlocks) * each;
    }
};

/// A warp's current unit, and the run that it is in. Not valid on entering a run: the warp has no unit there, nor in any later one.
struct Place {
    int begin, end;  // of the run
    int unit;

    __device__ __forceinline__ Place(const Runs& r, int first) { enter(r, first); }
    __device__ __forceinline__ bool valid() const { return unit < end; }
    __device__ __forceinline__ void next_run(const Runs& r) { enter(r, begin + r.stride); }
    __device__ __forceinline__ void next(const Runs& r) {
        if (!valid()) return;
        unit += kWarps;
        if (!valid()) next_run(r);
    }

  private:
    __device__ __forceinline__ void enter(const Runs& r, int first) {
        begin = first, end = min(first + r.each, r.units), unit = first + static_cast<int>(threadIdx.x) / 32;
    }
};

/// What a warp copies: K and V of its units in their order, two ahead of the one it attends to.
template <class K, class V>
struct Feed {
    static constexpr uint32_t kUnit = K::kUnitBytes + V::kUnitBytes, kSlot = kWarps * kUnit;

    const Runs& runs;
    char* own;  // the warp's unit in the first slot
    const int* pages;
    int keys, fresh;             // of the row
    int64_t k_stride, v_stride;  // of a page
    Copier<K> copy_keys;
    Copier<V> copy_values;
    LaneAt<K, V> at;
    Place ahead;
    int page;

    __device__ __forceinline__ Feed(const AttentionCall& c, const Row& r, const Runs& all, const Place& first,
                                    char* slots)
        : runs(all),
          own(slots + threadIdx.x / 32 * kUnit),
          pages(r.pages),
          keys(r.keys),
          fresh(r.fresh),
          k_stride(c.kv_heads * K::kBytes),
          v_stride(c.kv_heads * V::kBytes),
          copy_keys(c.k_cache, r.kv_head, shared_address(own)),
          copy_values(c.v_cache, r.kv_head, shared_address(own) + K::kUnitBytes),
          at(shared_address(own)),
          ahead(first) {
        page = page_of_ahead();
    }
    /// Of a unit counted from the newest, the one counted from the oldest.
    __device__ __forceinline__ int from_oldest(int unit) const { return runs.units - 1 - unit; }
    __device__ __forceinline__ int page_of_ahead() const {
        return pages[max(from_oldest(ahead.unit), 0) / kUnitsPerPage];
    }

    /// Starts a unit's rows of K; a group of copies, empty after the last unit.
    __device__ __forceinline__ void start_keys(uint32_t slot) const {
        if (ahead.valid()) copy_keys.start(page * k_stride, from_oldest(ahead.unit) % kUnitsPerPage, slot);
        commit_copies();
    }
    /// The same of V, and goes on to the next unit.
    __device__ __forceinline__ void start_values(uint32_t slot) {
        if (ahead.valid()) copy_values.start(page * v_stride, from_oldest(ahead.unit) % kUnitsPerPage, slot);
        commit_copies();
        ahead.next(runs);
        page = page_of_ahead();
    }
};

}  // namespace quern::cuda::attention::decode
