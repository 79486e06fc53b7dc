// BackendGroup: the backends of several ranks that run one model together, as the memory of one backend.
//
// All ranks hold tensors of the same shapes, each its own part of the model's: what is allocated here is allocated on every
// rank, under rank 0's address, and what is copied or cleared here is copied or cleared on every rank. Plans and weights are
// each rank's own: of_rank(r) has them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/communicator.h"
#include "ggml-like/rank_threads.h"

namespace quern {

class BackendGroup final : public Backend {
  public:
    /// The backends' all_reduce must use `communicator`. `note`: what description() says at its end.
    BackendGroup(std::vector<std::unique_ptr<Backend>> ranks, std::shared_ptr<Communicator> communicator,
                 std::string note = {});
    ~BackendGroup() override;

    std::string name() const override { return first().name(); }
    std::string description() const override;
    std::string bus_id() const override { return first().bus_id(); }
    int threads() const override;
    /// What each rank has: of the one with the least.
    MemoryInfo memory_info() const override;
    DType activation_dtype() const override { return first().activation_dtype(); }

    void* alloc(int64_t bytes, const char* what) override;
    void free(void* memory) override;
    void zero(void* memory, int64_t bytes) override;
    void upload(void* to, const void* from_host, int64_t bytes) override;
    /// Of rank 0.
    void download(void* to_host, const void* from, int64_t bytes) override;
    void copy(void* to, const void* from, int64_t bytes) override;
    void save(std::span<const BlockCopy> list) override;
    void order_after_saves() override;
    void finish_saves() override;
    void load(std::span<const BlockCopy> list) override;
    void* alloc_host(int64_t bytes, const char* what) override;
    void free_host(void* memory) override;

    int ranks() const override { return static_cast<int>(ranks_.size()); }
    Backend& of_rank(int r) override { return *ranks_[static_cast<size_t>(r)]; }
    void* memory_of(int rank, const void* memory) const override;
    void on_ranks(const std::function<void(int rank)>& work) override;

    /// Bytes of each rank, for a weight of rank 0.
    int64_t placed_bytes(const Weight& weight, RowOrder order) const override;
    int64_t placed_bytes(const ExpertWeights& experts, RowOrder order) const override;
    void reserve_weights(int64_t) override { refuse("reserve_weights"); }
    void place_weight(Weight&, RowOrder) override { refuse("place_weight"); }
    void place_experts(ExpertWeights&, RowOrder) override { refuse("place_experts"); }
    void share_first_rows(Weight&, const Weight&) override { refuse("share_first_rows"); }
    void place_apart(Weight&, RowOrder) override { refuse("place_apart"); }
    void weights_complete() override { refuse("weights_complete"); }

    bool captures() const override { return first().captures(); }
    bool asynchronous() const override { return first().asynchronous(); }
    void prepare(Plan&) override { refuse("prepare"); }
    void run(Plan&) override { refuse("run"); }
    void synchronize() override;

  private:
    /// The addresses of one allocation on all ranks.
    struct Block {
        int64_t bytes;
        std::vector<std::byte*> of_rank;
    };
    [[noreturn]] static void refuse(const char* what);
    const Backend& first() const { return *ranks_.front(); }
    /// Calls work(rank, backend) one after another on this thread.
    template <typename F>
    void each(F&& work);
    template <typename Take>
    void* take(int64_t bytes, Take&& take_on);
    Block forget(void* memory);
    std::vector<BlockCopy> copies_of(int rank, std::span<const BlockCopy> list) const;

    std::vector<std::unique_ptr<Backend>> ranks_;
    std::shared_ptr<Communicator> communicator_;
    std::string note_;
    mutable std::mutex mutex_;                  // of blocks_: host memory is taken on any thread
    std::map<const std::byte*, Block> blocks_;  // by rank 0's address
    std::unique_ptr<RankThreads> threads_;
};

/// CPU ranks that share `threads` threads (0: as many as this process may use), one each at least; of one rank: its backend.
std::unique_ptr<Backend> make_cpu_backends(int threads, int ranks);

}  // namespace quern
