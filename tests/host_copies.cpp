// What a GPU copies to and from host memory is as it was, in large pieces and in small ones; and how fast.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <vector>

#include "ops/second_backend.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::byte> random_bytes(int64_t count) {
    std::vector<std::byte> bytes(static_cast<size_t>(count));
    std::mt19937_64 draw(3);
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
        const uint64_t word = draw();
        std::memcpy(&bytes[i], &word, sizeof word);
    }
    return bytes;
}

/// Pieces in order, from places in one order to places in another, with gaps between them.
struct Places {
    Places(int64_t pieces, int64_t each) : bytes(each) {
        for (int64_t i = 0; i < pieces; ++i) device.push_back(2 * i * bytes), host.push_back(2 * i * bytes);
        std::mt19937 draw(5);
        std::shuffle(device.begin(), device.end(), draw);
        std::shuffle(host.begin(), host.end(), draw);
    }
    int64_t size() const { return 2 * static_cast<int64_t>(device.size()) * bytes; }
    std::vector<BlockCopy> copies(std::byte* to, const std::byte* from, bool to_host) const {
        std::vector<BlockCopy> list;
        for (size_t i = 0; i < device.size(); ++i)
            list.push_back({to + (to_host ? host : device)[i], from + (to_host ? device : host)[i], bytes,
                            bytes, bytes, 1});
        return list;
    }

    int64_t bytes;
    std::vector<int64_t> device, host;
};

TEST_SUITE("cuda") {
    TEST_CASE("host copies: pieces of all sizes go to host memory and come back") {
        const auto backend = test::make_test_cuda_backend();
        for (const int64_t bytes : {16, 48, 1000, 4096, 65536 + 16, 65536, 300 << 10}) {
            CAPTURE(bytes);
            const Places places(bytes < 100000 ? 500 : 64, bytes);
            auto* pages = static_cast<std::byte*>(backend->alloc(places.size(), "pages"));
            auto* blocks = static_cast<std::byte*>(backend->alloc_host(places.size(), "blocks"));
            const auto before = random_bytes(places.size());
            std::vector<std::byte> after(before.size());
            backend->upload(pages, before.data(), places.size());
            backend->save(places.copies(blocks, pages, true));
            backend->order_after_saves();
            backend->zero(pages, places.size());
            backend->load(places.copies(pages, blocks, false));
            backend->download(after.data(), pages, places.size());
            int64_t wrong = 0;
            for (const int64_t at : places.device)
                wrong += !std::equal(before.begin() + at, before.begin() + at + bytes, after.begin() + at);
            CHECK(wrong == 0);
            int64_t touched = 0;  // between the pieces
            for (const int64_t at : places.device)
                touched += std::any_of(after.begin() + at + bytes, after.begin() + at + 2 * bytes,
                                       [](std::byte b) { return b != std::byte{}; });
            CHECK(touched == 0);
            backend->free(pages);
            backend->free_host(blocks);
        }
    }

    TEST_CASE("host copies: inputs of two plans, of all sizes, and nothing behind them") {
        const auto backend = test::make_test_cuda_backend();
        constexpr int64_t kRoom = 256 << 10;
        auto* device = static_cast<std::byte*>(backend->alloc(2 * kRoom, "inputs"));
        auto* host = static_cast<std::byte*>(backend->alloc_host(2 * kRoom, "inputs"));
        const auto from = random_bytes(2 * kRoom);
        std::copy(from.begin(), from.end(), host);
        struct Sizes {
            int64_t one, other;
        };
        for (const Sizes& sizes : {Sizes{256, 256}, Sizes{16, 8176}, Sizes{8192, 8208}, Sizes{0, 4096},
                                   Sizes{4096, 0}, Sizes{100 << 10, 24576}, Sizes{kRoom, kRoom}}) {
            const int64_t one = sizes.one, other = sizes.other;
            CAPTURE(one);
            CAPTURE(other);
            backend->zero(device, 2 * kRoom);
            backend->upload_between({device, host, one}, {device + kRoom, host + kRoom, other});
            auto expected = from;
            std::fill(expected.begin() + one, expected.begin() + kRoom, std::byte{});
            std::fill(expected.begin() + kRoom + other, expected.end(), std::byte{});
            std::vector<std::byte> after(expected.size());
            backend->download(after.data(), device, 2 * kRoom);
            CHECK(after == expected);
        }
        backend->free(device);
        backend->free_host(host);
    }

    TEST_CASE("host copies: scattered pieces come back nearly as fast as large ones") {
        const auto backend = test::make_test_cuda_backend();
        constexpr int64_t kAll = 613 << 20;
        double rates[2] = {};
        const auto begun_taking = Clock::now();
        auto* pages = static_cast<std::byte*>(backend->alloc(2 * kAll, "pages"));
        auto* blocks = static_cast<std::byte*>(backend->alloc_host(2 * kAll, "blocks"));
        MESSAGE("host memory taken at "
                << 2 * kAll / 1e9 / std::chrono::duration<double>(Clock::now() - begun_taking).count()
                << " GB/s");
        for (const bool small : {false, true}) {
            const int64_t bytes = small ? 64 << 10 : 6 << 20;
            const Places places(kAll / bytes, bytes);
            const auto list = places.copies(pages, blocks, false);
            double best = 1e9;
            for (int i = 0; i < 5; ++i) {
                backend->synchronize();
                const auto begun = Clock::now();
                backend->load(list);
                const double queued = std::chrono::duration<double>(Clock::now() - begun).count();
                backend->synchronize();
                best = std::min(best, std::chrono::duration<double>(Clock::now() - begun).count());
                if (i == 4) MESSAGE(list.size() << " copies queued in " << 1e3 * queued << " ms");
            }
            rates[small] = static_cast<double>(kAll) / best / 1e9;
            MESSAGE("pieces of " << bytes << " bytes: " << rates[small] << " GB/s");
        }
        CHECK(rates[1] > 0.7 * rates[0]);
        backend->free(pages);
        backend->free_host(blocks);
    }
}

}  // namespace
}  // namespace quern
