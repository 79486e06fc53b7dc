// StageGroup: several devices that hold a model by layers, as one backend. Each is a stage: it runs its own layers and hands on
// the hidden states.
//
// What is at an address is on the stage that it was taken from, so it is copied and cleared here, whichever that is. Memory that
// is taken here is on the first stage. Weights and plans are each stage's own: of_stage(s) has them.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ggml-like/backend.h"

namespace quern {

class StageGroup final : public Backend {
  public:
    /// Backends whose receive() knows the others'. `note`: what description() says at its end.
    explicit StageGroup(std::vector<std::unique_ptr<Backend>> stages, std::string note = {});
    ~StageGroup() override;

    std::string name() const override { return first().name(); }
    std::string description() const override;
    std::string bus_id() const override { return first().bus_id(); }
    int threads() const override { return first().threads(); }
    /// Of devices with memory of their own the sum; on the CPU what all share.
    MemoryInfo memory_info() const override;
    void use_on_this_thread() const override { first().use_on_this_thread(); }
    DType activation_dtype() const override { return first().activation_dtype(); }

    void* alloc(int64_t bytes, const char* what) override { return of_stage(0).alloc(bytes, what); }
    void free(void* memory) override;
    void zero(void* memory, int64_t bytes) override;
    void upload(void* to, const void* from_host, int64_t bytes) override;
    void download(void* to_host, const void* from, int64_t bytes) override;
    /// Within a stage.
    void copy(void* to, const void* from, int64_t bytes) override;
    void save(std::span<const BlockCopy> list) override;
    void order_after_saves() override;
    void finish_saves() override;
    void load(std::span<const BlockCopy> list) override;
    void* alloc_host(int64_t bytes, const char* what) override { return of_stage(0).alloc_host(bytes, what); }
    void free_host(void* memory) override { of_stage(0).free_host(memory); }

    /// As the first stage stores it.
    int64_t placed_bytes(const Weight& weight, RowOrder order) const override {
        return first().placed_bytes(weight, order);
    }
    int64_t placed_bytes(const ExpertWeights& experts, RowOrder order) const override {
        return first().placed_bytes(experts, order);
    }
    void reserve_weights(int64_t) override { refuse("reserve_weights"); }
    void place_weight(Weight&, RowOrder) override { refuse("place_weight"); }
    void place_experts(ExpertWeights&, RowOrder) override { refuse("place_experts"); }
    void share_first_rows(Weight&, const Weight&) override { refuse("share_first_rows"); }
    void place_apart(Weight&, RowOrder) override { refuse("place_apart"); }
    void weights_complete() override { refuse("weights_complete"); }

    /// The first stage.
    Backend& of_rank(int) override { return of_stage(0); }
    int stages() const override { return static_cast<int>(stages_.size()); }
    Backend& of_stage(int stage) override;
    const Backend& of_stage(int stage) const override;

    bool captures() const override { return first().captures(); }
    bool asynchronous() const override { return first().asynchronous(); }
    void prepare(Plan&) override { refuse("prepare"); }
    void run(Plan&) override { refuse("run"); }
    void synchronize() override;

  private:
    class Stage;
    struct Block {
        int64_t bytes;
        int stage;
    };
    [[noreturn]] static void refuse(const char* what);
    const Backend& first() const { return of_stage(0); }
    void note_block(const void* memory, int64_t bytes, int stage);
    void forget_block(const void* memory);
    int stage_of(const void* memory) const;
    Backend& at(const void* memory) { return of_stage(stage_of(memory)); }
    std::vector<std::vector<BlockCopy>> by_stage(std::span<const BlockCopy> list, bool to_host) const;

    mutable std::mutex mutex_;                  // of blocks_
    std::map<const std::byte*, Block> blocks_;  // by address
    std::vector<std::unique_ptr<Stage>> stages_;
    std::string note_;
};

/// Sends rows of random numbers from each stage to the next, `bytes` of them. The first stage whose rows arrive wrong, or -1.
int first_wrong_link(Backend& group, int64_t bytes);

/// Simulated devices on the CPU, each with `threads` threads (0: as many as this process may use), since they work in turn.
std::unique_ptr<Backend> make_cpu_stages(int threads, int stages);

}  // namespace quern
