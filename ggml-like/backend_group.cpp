#include "ggml-like/backend_group.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cpu/thread_pool.h"

namespace quern {
namespace {

/// Whatever happens, a thread that has called several ranks ends as rank 0's.
struct FirstAgain {
    const Backend& first;
    ~FirstAgain() {
        try {
            first.use_on_this_thread();
        } catch (const Error&) {  // the device has failed, which the next call of it says
        }
    }
};

}  // namespace

BackendGroup::BackendGroup(std::vector<std::unique_ptr<Backend>> ranks,
                           std::shared_ptr<Communicator> communicator, std::string note)
    : ranks_(std::move(ranks)), communicator_(std::move(communicator)), note_(std::move(note)) {
    CHECK(!ranks_.empty() && communicator_->ranks() == this->ranks(),
          "[group] {} backends, and a communicator of {}", ranks_.size(), communicator_->ranks());
    for (const auto& r : ranks_)
        CHECK(r->captures() == captures() && r->activation_dtype() == activation_dtype(),
              "[group] {} beside {}", r->name(), name());
    // Between two steps of a device there is less time than it takes to wake a thread; CPU ranks need the cores.
    const std::chrono::microseconds spin(captures() ? 300 : 0);
    threads_ = std::make_unique<RankThreads>(
        this->ranks(), [this](int r) { of_rank(r).use_on_this_thread(); }, spin);
}

BackendGroup::~BackendGroup() { threads_.reset(); }

void BackendGroup::on_ranks(const std::function<void(int)>& work) {
    communicator_->begin_step();
    of_rank(0).after_node = after_node;
    threads_->run(work, [this] { communicator_->abort(); });
}

void BackendGroup::refuse(const char* what) {
    FAIL(runtime, "[group] {} is for one rank: plans and weights are each rank's own", what);
}

std::string BackendGroup::description() const {
    const std::string text = fmt::format("{} x {}", ranks(), first().description());
    return note_.empty() ? text : fmt::format("{}; {}", text, note_);
}

/// Ranks on a GPU share the host's threads; those on the CPU have them to themselves.
int BackendGroup::threads() const { return captures() ? first().threads() : ranks() * first().threads(); }

MemoryInfo BackendGroup::memory_info() const {
    const FirstAgain again{first()};
    MemoryInfo least = first().memory_info();
    for (const auto& r : ranks_) {
        r->use_on_this_thread();
        const MemoryInfo info = r->memory_info();
        if (info.free_bytes < least.free_bytes) least = info;
    }
    if (least.exact) return least;
    return {least.total_bytes / ranks(), least.free_bytes / ranks(), false};  // they share the host's memory
}

template <typename F>
void BackendGroup::each(F&& work) {
    const FirstAgain again{first()};
    for (int r = 0; r < ranks(); ++r) {
        of_rank(r).use_on_this_thread();
        work(r, of_rank(r));
    }
}

/// `take_on`, of a backend, allocates. On an error what was taken already is given back by `give_back`.
template <typename Take>
void* BackendGroup::take(int64_t bytes, Take&& take_on) {
    Block block{bytes, {}};
    each([&](int, Backend& b) { block.of_rank.push_back(static_cast<std::byte*>(take_on(b, block))); });
    const std::lock_guard lock(mutex_);
    std::byte* const address = block.of_rank[0];
    blocks_[address] = std::move(block);
    return address;
}

BackendGroup::Block BackendGroup::forget(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto at = blocks_.find(static_cast<std::byte*>(memory));
    CHECK(at != blocks_.end(), "[group] memory is given back that was not taken here");
    Block block = std::move(at->second);
    blocks_.erase(at);
    return block;
}

void* BackendGroup::alloc(int64_t bytes, const char* what) {
    return take(bytes, [&](Backend& b, const Block& taken) {
        try {
            return b.alloc(bytes, what);
        } catch (...) {
            for (size_t r = 0; r < taken.of_rank.size(); ++r) ranks_[r]->free(taken.of_rank[r]);
            throw;
        }
    });
}

void BackendGroup::free(void* memory) {
    if (memory == nullptr) return;
    const Block block = forget(memory);
    each([&](int r, Backend& b) { b.free(block.of_rank[static_cast<size_t>(r)]); });
}

void* BackendGroup::alloc_host(int64_t bytes, const char* what) {
    return take(bytes, [&](Backend& b, const Block& taken) {
        try {
            return b.alloc_host(bytes, what);
        } catch (...) {
            for (size_t r = 0; r < taken.of_rank.size(); ++r) ranks_[r]->free_host(taken.of_rank[r]);
            throw;
        }
    });
}

void BackendGroup::free_host(void* memory) {
    if (memory == nullptr) return;
    const Block block = forget(memory);
    each([&](int r, Backend& b) { b.free_host(block.of_rank[static_cast<size_t>(r)]); });
}

void* BackendGroup::memory_of(int rank, const void* memory) const {
    const auto* address = static_cast<const std::byte*>(memory);
    const std::lock_guard lock(mutex_);
    auto after = blocks_.upper_bound(address);
    CHECK(after != blocks_.begin(), "[group] an address that no rank knows");
    const Block& block = (--after)->second;
    const int64_t offset = address - after->first;
    CHECK(offset <= block.bytes, "[group] an address {} bytes into a block of {}", offset, block.bytes);
    return block.of_rank[static_cast<size_t>(rank)] + offset;
}

void BackendGroup::zero(void* memory, int64_t bytes) {
    each([&](int r, Backend& b) { b.zero(memory_of(r, memory), bytes); });
}

void BackendGroup::upload(void* to, const void* from_host, int64_t bytes) {
    each([&](int r, Backend& b) { b.upload(memory_of(r, to), from_host, bytes); });
}

void BackendGroup::download(void* to_host, const void* from, int64_t bytes) {
    of_rank(0).download(to_host, from, bytes);
}

void BackendGroup::copy(void* to, const void* from, int64_t bytes) {
    each([&](int r, Backend& b) { b.copy(memory_of(r, to), memory_of(r, from), bytes); });
}

std::vector<BlockCopy> BackendGroup::copies_of(int rank, std::span<const BlockCopy> list) const {
    std::vector<BlockCopy> own(list.begin(), list.end());
    for (BlockCopy& c : own) {
        c.to = static_cast<std::byte*>(memory_of(rank, c.to));
        c.from = static_cast<const std::byte*>(memory_of(rank, c.from));
    }
    return own;
}

void BackendGroup::save(std::span<const BlockCopy> list) {
    each([&](int r, Backend& b) { b.save(copies_of(r, list)); });
}

void BackendGroup::load(std::span<const BlockCopy> list) {
    each([&](int r, Backend& b) { b.load(copies_of(r, list)); });
}

void BackendGroup::order_after_saves() {
    each([](int, Backend& b) { b.order_after_saves(); });
}

void BackendGroup::finish_saves() {
    each([](int, Backend& b) { b.finish_saves(); });
}

void BackendGroup::synchronize() {
    each([](int, Backend& b) { b.synchronize(); });
}

int64_t BackendGroup::placed_bytes(const Weight& weight, RowOrder order) const {
    return first().placed_bytes(weight, order);
}

int64_t BackendGroup::placed_bytes(const ExpertWeights& experts, RowOrder order) const {
    return first().placed_bytes(experts, order);
}

std::unique_ptr<Backend> make_cpu_backends(int threads, int ranks) {
    if (ranks == 1) return make_cpu_backend(threads);
    const int all = threads > 0 ? threads : cpu::default_threads();
    const std::shared_ptr<Communicator> communicator = make_host_communicator(ranks);
    std::vector<std::unique_ptr<Backend>> list;
    for (int r = 0; r < ranks; ++r)
        list.push_back(make_cpu_backend(std::max(1, all / ranks), communicator, r));
    return std::make_unique<BackendGroup>(std::move(list), communicator);
}

}  // namespace quern
