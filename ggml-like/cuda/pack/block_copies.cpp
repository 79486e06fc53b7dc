#include "ggml-like/cuda/pack/block_copies.h"

#include <algorithm>

#include "ggml-like/cuda/check_cuda.h"

namespace quern::cuda::pack {
namespace {

constexpr int64_t kSmall = 256 << 10;  // from so many bytes on the driver's time for a copy hides behind PCIe
constexpr size_t kMany = 16;           // small copies that are worth a kernel
// A load has the device for itself. Saves run beside plans: enough blocks for PCIe.
constexpr int kLoadBlocks = kPieces, kSaveBlocks = 16;

bool in_one_piece(const BlockCopy& c) {
    return c.count == 1 || (c.to_stride == c.bytes && c.from_stride == c.bytes);
}

bool is_small(const BlockCopy& c) {
    const auto aligned = [](const void* at) {
        return reinterpret_cast<uintptr_t>(at) % kPieceAlignment == 0;
    };
    const int64_t bytes = c.bytes * c.count;
    return in_one_piece(c) && bytes < kSmall && bytes % kPieceAlignment == 0 && aligned(c.to) &&
           aligned(c.from);
}

void copy_one(const BlockCopy& c, cudaMemcpyKind kind, cudaStream_t stream) {
    const auto bytes = static_cast<size_t>(c.bytes), count = static_cast<size_t>(c.count);
    if (in_one_piece(c))
        CUDA_CHECK(cudaMemcpyAsync(c.to, c.from, bytes * count, kind, stream));
    else
        CUDA_CHECK(cudaMemcpy2DAsync(c.to, static_cast<size_t>(c.to_stride), c.from,
                                     static_cast<size_t>(c.from_stride), bytes, count, kind, stream));
}

void copy_by_kernel(std::span<const Piece> pieces, int blocks, cudaStream_t stream) {
    PieceList list;
    for (size_t begin = 0; begin < pieces.size(); begin += kPieces) {
        const auto some = pieces.subspan(begin, std::min<size_t>(kPieces, pieces.size() - begin));
        std::copy(some.begin(), some.end(), list.piece);
        list.count = static_cast<int>(some.size());
        copy_pieces(stream, list, blocks);
    }
}

}  // namespace

SplitCopies split_copies(std::span<const BlockCopy> list) {
    SplitCopies out;
    for (const BlockCopy& c : list)
        if (is_small(c))
            out.pieces.push_back({c.to, c.from, c.bytes * c.count});
        else
            out.copies.push_back(c);
    if (out.pieces.size() >= kMany) return out;
    return {{}, {list.begin(), list.end()}};
}

void copy_blocks(std::span<const BlockCopy> list, cudaMemcpyKind kind, cudaStream_t stream, bool pinned) {
    if (!pinned) {
        for (const BlockCopy& c : list) copy_one(c, kind, stream);
        return;
    }
    const SplitCopies split = split_copies(list);
    for (const BlockCopy& c : split.copies) copy_one(c, kind, stream);
    copy_by_kernel(split.pieces, kind == cudaMemcpyHostToDevice ? kLoadBlocks : kSaveBlocks, stream);
}

}  // namespace quern::cuda::pack
