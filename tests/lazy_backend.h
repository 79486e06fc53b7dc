// The CPU backend as a device that works as late as it may: what is queued is done when somebody waits for it. Whoever fills memory
// that queued work still reads, or reads what queued work has not written, gets other bits.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/stage_group.h"

namespace quern::test {

class LazyBackend final : public Backend {
  public:
    std::string name() const override { return "lazy"; }
    std::string description() const override { return "for tests"; }
    int threads() const override { return cpu_->threads(); }
    MemoryInfo memory_info() const override { return {int64_t{1} << 34, int64_t{1} << 34, exact}; }
    DType activation_dtype() const override { return cpu_->activation_dtype(); }

    void* alloc(int64_t bytes, const char* what) override { return cpu_->alloc(bytes, what); }
    void free(void* memory) override {
        synchronize();
        cpu_->free(memory);
    }
    void* alloc_host(int64_t bytes, const char* what) override { return cpu_->alloc_host(bytes, what); }
    void free_host(void* memory) override {
        synchronize();
        cpu_->free_host(memory);
    }
    void zero(void* memory, int64_t bytes) override {
        queue([=, this] { cpu_->zero(memory, bytes); });
    }
    void upload(void* to, const void* from, int64_t bytes) override {
        queue([=, this] { cpu_->upload(to, from, bytes); });
    }
    void copy(void* to, const void* from, int64_t bytes) override {
        queue([=, this] { cpu_->copy(to, from, bytes); });
    }
    void send(void* to, const void* from, int64_t bytes) override {
        queue([=, this] { cpu_->download(to, from, bytes); });
    }
    void download(void* to, const void* from, int64_t bytes) override {
        synchronize();
        cpu_->download(to, from, bytes);
    }
    void save(std::span<const BlockCopy> list) override {
        for (const BlockCopy& c : list) saves_.push_back({c, queued()});
    }
    void order_after_saves() override {
        queue([this, count = saves_queued()] { save_until(count); });
    }
    void finish_saves() override { save_until(saves_queued()); }
    void load(std::span<const BlockCopy> list) override {
        order_after_saves();
        Backend::load(list);
    }
    void send_beside(void* to, const void* from, int64_t bytes, int mark) override {
        beside_.push_back([=, this, after = queued()] {
            work_until(after);
            cpu_->download(to, from, bytes);
        });
        beside_marks_.at(static_cast<size_t>(mark)) = sent_ + std::ssize(beside_);
    }
    void set_mark(int mark) override { marks_.at(static_cast<size_t>(mark)) = queued(); }
    void await_mark(int mark) override {
        work_until(marks_.at(static_cast<size_t>(mark)));
        send_until(beside_marks_.at(static_cast<size_t>(mark)));
    }
    void synchronize() override {
        work_until(queued());
        send_until(sent_ + std::ssize(beside_));
    }

    void receive(Backend& sender, std::span<const BlockCopy> list) override {
        auto& from = dynamic_cast<LazyBackend&>(sender);
        const std::vector<BlockCopy> copies(list.begin(), list.end());
        queue([this, &from, copies, sent = from.queued()] {
            from.work_until(sent);
            for (const BlockCopy& c : copies) cpu_->copy(c.to, c.from, c.bytes);
        });
        from.queue([this, received = queued()] { work_until(received); });
    }

    int64_t placed_bytes(const Weight& w, RowOrder) const override { return w.bytes(); }
    int64_t placed_bytes(const ExpertWeights& e, RowOrder) const override { return e.bytes(); }
    void reserve_weights(int64_t) override {}
    void place_weight(Weight& w, RowOrder order) override { cpu_->place_weight(w, order); }
    void place_experts(ExpertWeights& e, RowOrder order) override { cpu_->place_experts(e, order); }
    void place_apart(Weight& w, RowOrder order) override { cpu_->place_apart(w, order); }
    void weights_complete() override { cpu_->weights_complete(); }

    bool captures() const override { return true; }
    bool asynchronous() const override { return true; }
    void prepare(Plan&) override {}
    void run(Plan& plan) override {
        ++runs;
        most_ahead = std::max(most_ahead, runs - ran);
        queue([this, &plan] {
            cpu_->run(plan);
            ++ran;
        });
    }

    bool exact = true;          // its memory is its own, so that copies of kept states have room
    int64_t runs = 0, ran = 0;  // plans that were queued, that have run
    int64_t most_ahead = 0;     // the most that were queued and had not run

  private:
    void queue(std::function<void()> work) { waiting_.push_back(std::move(work)); }
    int64_t queued() const { return done_ + static_cast<int64_t>(waiting_.size()); }
    void send_until(int64_t count) {
        for (; sent_ < count; ++sent_) {
            beside_.front()();
            beside_.pop_front();
        }
    }
    void work_until(int64_t count) {
        while (done_ < count) {
            const std::function<void()> work = std::move(waiting_.front());
            waiting_.pop_front();
            ++done_;
            work();
        }
    }

    /// Copies to host memory, each after so much of other work; that work does not wait for them.
    struct Save {
        BlockCopy copy;
        int64_t after;
    };
    int64_t saves_queued() const { return saved_ + static_cast<int64_t>(saves_.size()); }
    void save_until(int64_t count) {
        while (saved_ < count) {
            const Save save = saves_.front();
            saves_.pop_front();
            ++saved_;
            work_until(save.after);
            cpu_->save({&save.copy, 1});
        }
    }

    std::unique_ptr<Backend> cpu_ = make_cpu_backend(2);
    std::deque<Save> saves_;
    int64_t saved_ = 0;
    std::deque<std::function<void()>> waiting_;
    int64_t done_ = 0;
    std::array<int64_t, kMarks> marks_{};
    std::deque<std::function<void()>> beside_;  // of send_beside
    int64_t sent_ = 0;
    std::array<int64_t, kMarks> beside_marks_{};
};

/// Stages of such devices.
struct LazyStages {
    explicit LazyStages(int stages) {
        std::vector<std::unique_ptr<Backend>> list;
        for (int s = 0; s < stages; ++s) {
            auto stage = std::make_unique<LazyBackend>();
            each.push_back(stage.get());
            list.push_back(std::move(stage));
        }
        group = std::make_unique<StageGroup>(std::move(list));
    }
    std::vector<LazyBackend*> each;
    std::unique_ptr<Backend> group;
};

}  // namespace quern::test
