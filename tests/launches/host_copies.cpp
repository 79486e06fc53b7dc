// States that come back from host memory in many small pieces: few launches, and each byte once.
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "cuda_stand_in/stand_in.h"
#include "ggml-like/cuda/pack/block_copies.h"
#include "ggml-like/cuda_backend.h"

namespace quern {
namespace {

using cuda::pack::kPieces;

constexpr int64_t kPart = 64 << 10;

/// Every second piece of `from` to every second one of `to`.
std::vector<BlockCopy> scattered(std::byte* to, const std::byte* from, int64_t pieces, int64_t bytes) {
    std::vector<BlockCopy> list;
    for (int64_t i = 0; i < pieces; ++i)
        list.push_back({to + 2 * i * bytes, from + 2 * i * bytes, bytes, bytes, bytes, 1});
    return list;
}

TEST_CASE(
    "host copies: the state of 30,000 tokens in scattered pages takes at most one launch for 160 pieces") {
    const int64_t pieces = 468 * 20;
    const auto backend = make_cuda_backend(cuda_stand_in::kH200);
    auto* device = static_cast<std::byte*>(backend->alloc(2 * pieces * kPart, "pages"));
    auto* host = static_cast<std::byte*>(backend->alloc_host(2 * pieces * kPart / 64, "blocks"));
    cuda_stand_in::take_record();
    std::vector<BlockCopy> list = scattered(device, host, pieces / 64, kPart);
    for (int i = 1; i < 64; ++i)  // the host's memory again, since here it costs something
        for (const BlockCopy& c : scattered(device + i * (2 * pieces / 64) * kPart, host, pieces / 64, kPart))
            list.push_back(c);
    backend->load(list);
    const auto launches = cuda_stand_in::take_record().launches;
    CHECK(static_cast<int64_t>(launches.size()) ==
          (static_cast<int64_t>(list.size()) + kPieces - 1) / kPieces);
    for (const auto& l : launches) CHECK(l.kernel->name == "copy_pieces_kernel");
    CHECK(launches.front().grid.x == kPieces);
    // Beside plans a save takes few blocks.
    for (BlockCopy& c : list) c = {host, c.to, kPart, kPart, kPart, 1};
    backend->save(list);
    for (const auto& l : cuda_stand_in::take_record().launches) CHECK(l.grid.x <= 16);
    backend->finish_saves();
    backend->free(device);
    backend->free_host(host);
}

TEST_CASE("host copies: large, odd and few ones are the copy engines'") {
    std::vector<std::byte> to(4 << 20), from(4 << 20);
    std::byte* const a = to.data() + 16 - reinterpret_cast<uintptr_t>(to.data()) % 16;
    std::byte* const b = from.data() + 16 - reinterpret_cast<uintptr_t>(from.data()) % 16;
    const auto parts = [](const cuda::pack::SplitCopies& s) {
        return std::pair(s.pieces.size(), s.copies.size());
    };
    using Sizes = std::pair<size_t, size_t>;
    CHECK(parts(cuda::pack::split_copies(scattered(a, b, 20, 4096))) == Sizes(20, 0));
    CHECK(parts(cuda::pack::split_copies(scattered(a, b, 15, 4096))) == Sizes(0, 15));
    CHECK(parts(cuda::pack::split_copies(scattered(a + 8, b, 20, 4096))) == Sizes(0, 20));
    CHECK(parts(cuda::pack::split_copies(scattered(a, b + 8, 20, 4096))) == Sizes(0, 20));
    CHECK(parts(cuda::pack::split_copies(scattered(a, b, 20, 4088))) == Sizes(0, 20));
    std::vector<BlockCopy> list = scattered(a, b, 20, 4096);
    list.push_back({a + (1 << 20), b + (1 << 20), 1 << 20, 1 << 20, 1 << 20, 1});
    list.push_back({a + (3 << 20), b + (3 << 20), 4096, 8192, 4096, 8});  // rows
    list.push_back({a + (3 << 20), b + (3 << 20), 4096, 4096, 4096, 8});  // rows without gaps are one piece
    const auto split = cuda::pack::split_copies(list);
    CHECK(parts(split) == Sizes(21, 2));
    CHECK(split.pieces.back().bytes == 8 * 4096);
    CHECK(split.pieces[3].to == a + 6 * 4096);
    CHECK(split.pieces[3].from == b + 6 * 4096);
}

TEST_CASE("host copies: memory is given back as it was taken, pinned after or while it was taken") {
    const auto backend = make_cuda_backend(cuda_stand_in::kH200);
    for (const int64_t bytes : {int64_t{100}, int64_t{33} << 20}) {
        void* memory = backend->alloc_host(bytes, "a test");
        void* device = backend->alloc(bytes, "a test");
        static_cast<std::byte*>(memory)[bytes - 1] = std::byte{7};
        backend->upload(device, memory, bytes);
        CHECK(static_cast<std::byte*>(device)[bytes - 1] == std::byte{7});
        cudaPointerAttributes attributes{};
        CHECK(cudaPointerGetAttributes(&attributes, memory) == cudaSuccess);
        CHECK(attributes.type == cudaMemoryTypeHost);
        backend->free_host(memory);
        CHECK(cudaPointerGetAttributes(&attributes, memory) == cudaSuccess);
        CHECK(attributes.type == cudaMemoryTypeUnregistered);
        backend->free(device);
    }
}

}  // namespace
}  // namespace quern
