// The CPU backend that looks like a device: its memory is counted and may run out, plans are captured, and the
// engine launches the next step before it tells of the last one.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/error.h"

namespace quern::test {

class CountedBackend final : public Backend {
  public:
    /// `cpu`: what computes.
    explicit CountedBackend(int64_t total, std::unique_ptr<Backend> cpu = make_cpu_backend(2))
        : total_(total), cpu_(std::move(cpu)) {}

    std::string name() const override { return "counted"; }
    std::string description() const override { return "for tests"; }
    int threads() const override { return cpu_->threads(); }
    MemoryInfo memory_info() const override { return {total_, total_ - used, true}; }
    DType activation_dtype() const override { return cpu_->activation_dtype(); }

    void* alloc(int64_t bytes, const char* what) override {
        take(bytes, what);
        void* memory = cpu_->alloc(bytes, what);
        sizes_[memory] = bytes;
        return memory;
    }
    void free(void* memory) override {
        used -= sizes_[memory];
        cpu_->free(memory);
    }
    void zero(void* memory, int64_t bytes) override { cpu_->zero(memory, bytes); }
    void upload(void* to, const void* from, int64_t bytes) override { cpu_->upload(to, from, bytes); }
    void download(void* to, const void* from, int64_t bytes) override { cpu_->download(to, from, bytes); }
    void copy(void* to, const void* from, int64_t bytes) override { cpu_->copy(to, from, bytes); }
    void* alloc_host(int64_t bytes, const char* what) override {
        if (before_host_memory) before_host_memory();
        ++host_pieces;
        if ((host_left -= bytes) < 0) throw Error(ErrorKind::memory, std::string("no memory for ") + what);
        return cpu_->alloc_host(bytes, what);
    }
    void free_host(void* memory) override { cpu_->free_host(memory); }

    int64_t placed_bytes(const Weight& w, RowOrder) const override { return w.bytes(); }
    int64_t placed_bytes(const ExpertWeights& e, RowOrder) const override { return e.bytes(); }
    void reserve_weights(int64_t bytes) override { take(bytes, "weights"); }
    void place_weight(Weight& w, RowOrder order) override {
        ++placed;
        cpu_->place_weight(w, order);
    }
    void place_experts(ExpertWeights& e, RowOrder order) override {
        ++placed;
        cpu_->place_experts(e, order);
    }
    void place_apart(Weight& w, RowOrder order) override {
        int64_t& size = apart_[&w];
        used -= size;
        take(size = w.bytes(), "a weight");
        cpu_->place_apart(w, order);
    }
    void weights_complete() override { cpu_->weights_complete(); }

    bool saves_ended() override { return !saving; }
    void load(std::span<const BlockCopy> list) override {
        ++loads;
        loaded += static_cast<int64_t>(list.size());
        Backend::load(list);
    }

    bool captures() const override { return true; }
    bool asynchronous() const override { return true; }
    void prepare(Plan& plan) override { prepared += plan.use() == PlanUse::repeatedly; }
    void run(Plan& plan) override {
        if (before_run) before_run();
        cpu_->run(plan);
    }
    void synchronize() override { cpu_->synchronize(); }

    void receive(Backend& sender, std::span<const BlockCopy> list) override {
        Backend::receive(sender, list);
        if (after_receive) after_receive(list);
    }

    std::function<void()> before_run, before_host_memory;
    std::function<void(std::span<const BlockCopy>)> after_receive;
    std::atomic<int64_t> host_left = int64_t{1} << 62;  // bytes that alloc_host may give
    std::atomic<int> host_pieces = 0;                   // calls of alloc_host
    std::atomic<bool> saving = false;  // copies to host memory seem to run until they are waited for
    int64_t used = 0, most = 0;        // bytes now; the most at a time
    int64_t loads = 0, loaded = 0;     // calls of load; copies that they asked for
    int placed = 0, allocations = 0, prepared = 0;  // weights; allocations; plans for repeated use

  private:
    void take(int64_t bytes, const char* what) {
        if (used + bytes > total_) throw Error(ErrorKind::memory, std::string("no memory for ") + what);
        used += bytes;
        most = std::max(most, used);
        ++allocations;
    }

    int64_t total_;
    std::unique_ptr<Backend> cpu_;
    std::map<void*, int64_t> sizes_;
    std::map<const Weight*, int64_t> apart_;
};

/// The two that engine tests run on: the CPU, and the CPU behind a device's face, whose plans are captured.
inline std::unique_ptr<Backend> cpu() { return make_cpu_backend(2); }
inline std::unique_ptr<Backend> device() { return std::make_unique<CountedBackend>(int64_t{1} << 34); }

}  // namespace quern::test
