// Memory through which the GPUs of one model, its ranks, reach each other.
//
// Every rank has a mailbox that the others write into, in its own memory or, where they cannot reach that, in the host's
// (mailboxes.h); nobody reads from another GPU. Messages are numbered by counters in device memory, one a block, so a captured
// step is the same launches every time. Small messages and sums inside products have two places in a mailbox, used in turns: a rank
// writes its message number n only when it has received number n - 1 of all others, which have then read number n - 2. Large
// ones have one: a block has received the sums of number n - 1 before it sends parts of number n, and who added them up has read
// its parts; whoever sends sums of number n has got its parts, sent after the sums of number n - 1 were read.
//
//   small messages: packets of 16 bytes, two numbers and the message's number twice. Who receives looks at the packet itself.
//     [2 places][ranks][kSmallPairs] packets (packets.cuh)
//   large messages: chunks, and for each block a flag that says which message has arrived (chunks.cuh).
//     [2 halves][ranks][kLargeBlocks] chunks; [2 halves][ranks][kLargeBlocks] flags
//   sums inside products: lines, each 16 columns of a row, with the message's number beside each (tile_sums.cuh). A line has a
//     counter and places of its own.
//     [2 places][ranks][kSumTiles][kSumRows] lines
#pragma once

#include <cstddef>
#include <cstdint>

namespace quern::cuda::comm {

inline constexpr int kMaxRanks = 8;
inline constexpr int kSmallThreads = 256, kSmallBlocks = 256;
inline constexpr int64_t kSmallPairs = 160 << 10;  // 1.25 MB of numbers: 64 rows of 5,120
inline constexpr int kLargeThreads = 512,
                     kLargeBlocks = 128;              // at most, one an SM
inline constexpr int kChunkRows = 64;                 // of a chunk, at most
inline constexpr int kSumTiles = 320, kSumRows = 64;  // of 16 columns: up to 5,120; rows of a step

/// A rank's own device memory: how far it is.
struct Progress {
    uint32_t small[kSmallBlocks], large[kLargeBlocks];  // messages so far
    uint32_t lost;                                      // 1: a message did not come; nobody waits any more
    uint32_t lines[kSumTiles * kSumRows];               // messages so far
};

/// In host memory that all GPUs see.
struct Watch {
    uint32_t abort;            // set by the host: a rank has failed
    uint32_t lost[kMaxRanks];  // set by a rank whose message did not come
};

/// What a kernel of rank `rank` gets.
struct Peers {
    int rank, ranks;
    std::byte* box[kMaxRanks];              // mailboxes, by rank
    int64_t chunks_at, flags_at, lines_at;  // bytes of a mailbox before its chunks, flags, lines
    int64_t row_bytes;                      // of a chunk
    Progress* own;
    volatile Watch* watch;
    uint64_t patience;  // nanoseconds that a message may take
};

inline constexpr int64_t kPacket = 16;
inline constexpr int kSumLine = 128;

static_assert(2 * kLargeBlocks * sizeof(uint32_t) % kSumLine == 0, "lines begin at one of a GPU's");

/// Of a chunk, for its rows; a number for each row follows. Of two ranks' messages of 8,192 rows of 2,048 numbers in BF16 all fits.
constexpr int64_t row_bytes(int64_t ranks) { return (256 << 10) / ranks / 256 * 256; }

/// Bytes of a mailbox, and where its parts begin. For the host.
struct BoxLayout {
    int64_t ranks;

    int64_t small_bytes() const { return 2 * ranks * kSmallPairs * kPacket; }
    int64_t chunk_bytes() const {
        return 2 * ranks * kLargeBlocks * (row_bytes(ranks) + kChunkRows * int64_t{sizeof(float)});
    }
    int64_t flags_at() const { return small_bytes() + chunk_bytes(); }
    int64_t lines_at() const { return flags_at() + 2 * ranks * kLargeBlocks * int64_t{sizeof(uint32_t)}; }
    int64_t bytes() const { return lines_at() + 2 * ranks * kSumTiles * kSumRows * kSumLine; }
};

}  // namespace quern::cuda::comm
