// Large messages between ranks (peers.h): chunks of whole rows, a flag for each. A block has as many chunks a round as there are
// ranks, one for each to add. It sends every chunk to who adds it (reduce-scatter), adds its own, ends its rows and sends what
// they became to all (all-gather); a flag follows each of the two.
//
//     chunks of block b   | 0 | 1 | ... | ranks - 1 |  next round: + blocks * ranks
//
// Traffic over the link: 2 (N - 1) / N of the message. Bound: the link; each round waits for two ways over it.
#pragma once

#include "ggml-like/cuda/comm/packets.cuh"

namespace quern::cuda::comm {

/// How a message is cut.
struct Cut {
    int columns;    // of a row, a multiple of 4
    int rows;       // of a chunk
    int64_t count;  // numbers of the message; its last row may be shorter
    int blocks;

    /// bytes: that a number takes in a chunk. sms: of the card: blocks that wait for others must all run at once.
    Cut(int ranks, int of_columns, int64_t of_count, int bytes, int sms)
        : columns(of_columns), count(of_count) {
        const int64_t all = (count + columns - 1) / columns, fit = row_bytes(ranks) / bytes / columns,
                      most = fit < kChunkRows ? fit : kChunkRows,
                      at_once = sms < kLargeBlocks ? sms : kLargeBlocks, wide = ranks * at_once,
                      rounds = (all + wide * most - 1) / (wide * most);
        rows = static_cast<int>((all + wide * rounds - 1) / (wide * rounds));
        const int64_t each = int64_t{ranks} * rows, needed = (all + each - 1) / each;
        blocks = static_cast<int>(needed < at_once ? needed : at_once);
    }
};

enum class Half : int { parts, sums };

/// A block of kLargeThreads of a kernel with Cut::blocks of them; after wait_for_predecessor. Of End, four numbers of a row at a time:
///   Part part(int64_t row, int column)                   this rank's part: float4, or uint2 of BF16
///   Before before(int64_t row, int column)               what is there before
///   float4 become(Before, float4 sum)                    of both: what the row becomes
///   void keep(int64_t row, int column, float4 v, float& squares)   of own rows, and of all if kWhole: what it became
///   void note(int i, int rows, const float (&squares)[kRowsAtOnce])   after keep() of rows i, ... of the chunk
///   void end_chunk(int64_t row, int rows, send)          whole block, after all rows of a chunk: send(i, float): to all ranks,
///                                                        unless kWhole, of the i-th of them
///   kPartsAtOnce, kRowsAtOnce: rows of which a thread has parts, sums in registers
///   kWhole: all ranks get what a row became; else its short form and one number:
///   uint2 shorten(int column, float4 v)
///   void keep_short(int64_t row, int column, uint2 v), void keep_number(int64_t row, float number)
template <typename End>
class Chunks {
  public:
    static constexpr int kRowsAtOnce = End::kRowsAtOnce;

    __device__ Chunks(const Peers& p, const Cut& cut, const End& end)
        : p_(p), cut_(cut), end_(end), number_(__ldcg(&p.own->large[blockIdx.x])) {}

    __device__ void run() {
        const int64_t rows = (cut_.count + cut_.columns - 1) / cut_.columns,
                      round = int64_t{cut_.blocks} * p_.ranks * cut_.rows;
        for (int64_t row = int64_t{blockIdx.x} * p_.ranks * cut_.rows; row < rows; row += round) {
            ++number_;
            first_ = row;
            for (int r = 1; r < p_.ranks; ++r) send_part(other(r));
            raise_flags(Half::parts);
            await_flags(Half::parts);
            add_own();
            raise_flags(Half::sums);
            await_flags(Half::sums);
            for (int r = 1; r < p_.ranks; ++r) take_sum(other(r));
        }
        __syncthreads();
        if (threadIdx.x == 0) p_.own->large[blockIdx.x] = number_;
    }

  private:
    static constexpr int kStep = 4 * kLargeThreads;

    using Part = typename End::Part;

    __device__ int other(int r) const { return (p_.rank + r) % p_.ranks; }

    /// Of the chunk that `owner` adds: its first row, and how many numbers there are.
    __device__ int64_t begin(int owner) const { return first_ + int64_t{owner} * cut_.rows; }
    __device__ int numbers(int owner) const {
        const int64_t left = cut_.count - begin(owner) * cut_.columns;
        return static_cast<int>(max(int64_t{0}, min(left, int64_t{cut_.rows} * cut_.columns)));
    }
    __device__ int rows(int owner) const { return (numbers(owner) + cut_.columns - 1) / cut_.columns; }
    /// In `box`: a chunk's part of rank `from`, or its sum by rank `from`.
    __device__ std::byte* place(int box, Half half, int from) const {
        const int64_t at = (int64_t{static_cast<int>(half)} * p_.ranks + from) * kLargeBlocks + blockIdx.x;
        return p_.box[box] + p_.chunks_at + at * (p_.row_bytes + kChunkRows * int64_t{sizeof(float)});
    }
    __device__ float* numbers_of(std::byte* chunk) const {
        return reinterpret_cast<float*>(chunk + p_.row_bytes);
    }
    __device__ uint32_t* flag(int box, Half half, int from) const {
        auto* flags = reinterpret_cast<uint32_t*>(p_.box[box] + p_.flags_at);
        return flags + (static_cast<int>(half) * p_.ranks + from) * kLargeBlocks + blockIdx.x;
    }

    /// All that the block's threads have written so far is with the others before the flags are: a release is cumulative.
    __device__ void raise_flags(Half half) const {
        __syncthreads();
        const int to = static_cast<int>(threadIdx.x);
        if (to < p_.ranks && to != p_.rank)
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(to, half, p_.rank)), "r"(number_)
                         : "memory");
    }
    /// What the others wrote before they raised their flags is here.
    __device__ void await_flags(Half half) const {
        const int from = static_cast<int>(threadIdx.x);
        if (from < p_.ranks && from != p_.rank) {
            Waiting waiting(p_);
            uint32_t seen;
            do {
                asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                             : "=r"(seen)
                             : "l"(flag(p_.rank, half, from))
                             : "memory");
            } while (static_cast<int32_t>(seen - number_) < 0 && !waiting.over());
        }
        __syncthreads();
    }

    /// Visits `owner`'s chunk, kAtOnce rows at a time: at(row, column, there) for four numbers of each; there(k): whether row + k has
    /// them, as row has; then done(row, rows). Rows are counted in the chunk.
    template <int kAtOnce, typename At, typename Done>
    __device__ void for_rows(int owner, const At& at, const Done& done) {
        const int count = numbers(owner), columns = cut_.columns;
        for (int row = 0; row * columns < count; row += kAtOnce) {
            for (int column = 4 * static_cast<int>(threadIdx.x); column < columns; column += kStep)
                if (row * columns + column < count)
                    at(row, column, [&](int k) { return (row + k) * columns + column < count; });
            done(row, min(kAtOnce, rows(owner) - row));
        }
    }

    /// load(row, column), which writes nothing, of all rows of a visit, then use(k, row, column, value). Without branches between
    /// them loads do not wait for each other: a row that is not there is the first one once more.
    template <int kAtOnce, typename Load, typename Use>
    __device__ static auto loads_first(const Load& load, const Use& use) {
        return [&load, &use](int row, int column, const auto& there) {
            decltype(load(0, 0)) v[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) v[k] = load(there(k) ? row + k : row, column);
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k)
                if (there(k)) use(k, row + k, column, v[k]);
        };
    }

    __device__ void send_part(int owner) {
        const int64_t first = begin(owner);
        std::byte* to = place(owner, Half::parts, p_.rank);
        const auto load = [&](int row, int column) { return end_.part(first + row, column); };
        const auto use = [&](int, int row, int column, const Part& v) { put(to, row, column, v); };
        for_rows<End::kPartsAtOnce>(owner, loads_first<End::kPartsAtOnce>(load, use), [](int, int) {});
    }

    __device__ void add_own() {
        const int64_t first = begin(p_.rank);
        float squares[kRowsAtOnce] = {};
        for_rows<kRowsAtOnce>(
            p_.rank,
            [&](int row, int column, const auto& there) {
                typename End::Before before[kRowsAtOnce];
#pragma unroll
                for (int k = 0; k < kRowsAtOnce; ++k)
                    before[k] = end_.before(first + (there(k) ? row + k : row), column);
                float4 total[kRowsAtOnce];
                add_parts(first, row, column, there, total);
#pragma unroll
                for (int k = 0; k < kRowsAtOnce; ++k) {
                    if (!there(k)) continue;
                    const float4 v = end_.become(before[k], total[k]);
                    end_.keep(first + row + k, column, v, squares[k]);
                    if constexpr (End::kWhole)
                        send_sum(row + k, column, v);
                    else
                        send_sum(row + k, column, end_.shorten(column, v));
                }
            },
            [&](int row, int rows) { note(row, rows, squares); });
        end_.end_chunk(first, rows(p_.rank), [&](int i, float number) {
            for (int r = 1; r < p_.ranks; ++r) numbers_of(place(other(r), Half::sums, p_.rank))[i] = number;
        });
    }

    /// The sums of a visit's rows, in the order of the ranks: all rows' parts of a rank are asked for at once, this rank's first.
    template <typename There>
    __device__ void add_parts(int64_t first, int row, int column, const There& there,
                              float4 (&total)[kRowsAtOnce]) {
        Part own[kRowsAtOnce];
#pragma unroll
        for (int k = 0; k < kRowsAtOnce; ++k) own[k] = end_.part(first + (there(k) ? row + k : row), column);
        for (int from = 0; from < p_.ranks; ++from) {
            Part v[kRowsAtOnce];
            const std::byte* chunk = place(p_.rank, Half::parts, from == p_.rank ? other(1) : from);
#pragma unroll
            for (int k = 0; k < kRowsAtOnce; ++k) v[k] = get<Part>(chunk, there(k) ? row + k : row, column);
#pragma unroll
            for (int k = 0; k < kRowsAtOnce; ++k) {
                const float4 part = wide(from == p_.rank ? own[k] : v[k]);
                total[k] = from == 0 ? part : add(total[k], part);
            }
        }
    }

    __device__ void take_sum(int owner) {
        const int64_t first = begin(owner);
        std::byte* here = place(p_.rank, Half::sums, owner);
        if constexpr (End::kWhole) {
            float squares[kRowsAtOnce] = {};
            const auto load = [&](int row, int column) { return get<float4>(here, row, column); };
            const auto use = [&](int k, int row, int column, const float4& v) {
                end_.keep(first + row, column, v, squares[k]);
            };
            for_rows<kRowsAtOnce>(owner, loads_first<kRowsAtOnce>(load, use),
                                  [&](int row, int rows) { note(row, rows, squares); });
            end_.end_chunk(first, rows(owner), [](int, float) {});
        } else {
            constexpr int kAtOnce = 8;
            const auto load = [&](int row, int column) { return get<uint2>(here, row, column); };
            const auto use = [&](int, int row, int column, const uint2& v) {
                end_.keep_short(first + row, column, v);
            };
            for_rows<kAtOnce>(owner, loads_first<kAtOnce>(load, use), [](int, int) {});
            const int i = static_cast<int>(threadIdx.x);
            if (i < rows(owner)) end_.keep_number(first + i, __ldcg(numbers_of(here) + i));
        }
    }

    __device__ void note(int row, int rows, float (&squares)[kRowsAtOnce]) {
        end_.note(row, rows, squares);
#pragma unroll
        for (float& sum : squares) sum = 0;
    }

    /// Four numbers of a row, or their short form, to all other ranks.
    template <typename Four>
    __device__ void send_sum(int row, int column, const Four& v) const {
        for (int to = 0; to < p_.ranks; ++to)
            if (to != p_.rank) put(place(to, Half::sums, p_.rank), row, column, v);
    }
    template <typename Four>
    __device__ void put(std::byte* chunk, int row, int column, const Four& v) const {
        reinterpret_cast<Four*>(chunk)[(row * cut_.columns + column) / 4] = v;
    }
    template <typename Four>
    __device__ Four get(const std::byte* chunk, int row, int column) const {
        return __ldcg(reinterpret_cast<const Four*>(chunk) + (row * cut_.columns + column) / 4);
    }
    __device__ static float4 wide(const float4& v) { return v; }
    __device__ static float4 wide(const uint2& v) {
        return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                           __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
    }
    __device__ static float4 add(const float4& a, const float4& b) {
        return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                           __fadd_rn(a.w, b.w));
    }

    const Peers& p_;
    const Cut& cut_;
    End end_;
    uint32_t number_;
    int64_t first_ = 0;  // row of the round
};

}  // namespace quern::cuda::comm
