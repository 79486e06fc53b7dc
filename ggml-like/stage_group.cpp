#include "ggml-like/stage_group.h"

#include <algorithm>
#include <random>

#include "ggml-like/check.h"

namespace quern {

/// One device. It becomes the calling thread's in every call, and the group learns of all memory that is taken from it.
class StageGroup::Stage final : public Backend {
  public:
    Stage(StageGroup& group, int number, std::unique_ptr<Backend> device)
        : group_(group), number_(number), device_(std::move(device)) {}

    std::string name() const override { return device_->name(); }
    std::string description() const override { return device_->description(); }
    std::string bus_id() const override { return device_->bus_id(); }
    int threads() const override { return device_->threads(); }
    MemoryInfo memory_info() const override {
        MemoryInfo info = here().memory_info();
        if (info.exact) return info;
        info.total_bytes /= group_.stages();  // they share the host's memory
        info.free_bytes /= group_.stages();
        return info;
    }
    void use_on_this_thread() const override { device_->use_on_this_thread(); }
    DType activation_dtype() const override { return device_->activation_dtype(); }

    void* alloc(int64_t bytes, const char* what) override {
        void* memory = here().alloc(bytes, what);
        group_.note_block(memory, bytes, number_);
        return memory;
    }
    void free(void* memory) override {
        if (memory == nullptr) return;
        group_.forget_block(memory);
        here().free(memory);
    }
    void zero(void* memory, int64_t bytes) override { here().zero(memory, bytes); }
    void upload(void* to, const void* from, int64_t bytes) override { here().upload(to, from, bytes); }
    void download(void* to, const void* from, int64_t bytes) override { here().download(to, from, bytes); }
    void copy(void* to, const void* from, int64_t bytes) override { here().copy(to, from, bytes); }
    void send(void* to, const void* from, int64_t bytes) override { here().send(to, from, bytes); }
    void set_mark(int mark) override { here().set_mark(mark); }
    void await_mark(int mark) override { here().await_mark(mark); }
    void save(std::span<const BlockCopy> list) override { here().save(list); }
    void order_after_saves() override { here().order_after_saves(); }
    void finish_saves() override { here().finish_saves(); }
    void load(std::span<const BlockCopy> list) override { here().load(list); }
    void* alloc_host(int64_t bytes, const char* what) override { return here().alloc_host(bytes, what); }
    void free_host(void* memory) override { here().free_host(memory); }

    int64_t placed_bytes(const Weight& weight, RowOrder order) const override {
        return here().placed_bytes(weight, order);
    }
    int64_t placed_bytes(const ExpertWeights& experts, RowOrder order) const override {
        return here().placed_bytes(experts, order);
    }
    void reserve_weights(int64_t bytes) override { here().reserve_weights(bytes); }
    void place_weight(Weight& weight, RowOrder order) override { here().place_weight(weight, order); }
    void place_experts(ExpertWeights& e, RowOrder order) override { here().place_experts(e, order); }
    void share_first_rows(Weight& part, const Weight& of) override { here().share_first_rows(part, of); }
    void place_apart(Weight& weight, RowOrder order) override { here().place_apart(weight, order); }
    void finish_reading() override { here().finish_reading(); }
    void weights_complete() override { here().weights_complete(); }

    void receive(Backend& sender, std::span<const BlockCopy> list) override {
        here().receive(*dynamic_cast<Stage&>(sender).device_, list);
    }

    bool captures() const override { return device_->captures(); }
    bool asynchronous() const override { return device_->asynchronous(); }
    void prepare(Plan& plan) override { here().prepare(plan); }
    void run(Plan& plan) override {
        device_->after_node = group_.after_node;
        here().run(plan);
    }
    void synchronize() override { here().synchronize(); }

  private:
    Backend& here() const {
        device_->use_on_this_thread();
        return *device_;
    }

    StageGroup& group_;
    const int number_;
    std::unique_ptr<Backend> device_;
};

StageGroup::StageGroup(std::vector<std::unique_ptr<Backend>> stages, std::string note)
    : note_(std::move(note)) {
    CHECK(!stages.empty(), "[stages] no devices");
    for (auto& device : stages) {
        stages_.push_back(
            std::make_unique<Stage>(*this, static_cast<int>(stages_.size()), std::move(device)));
        const Backend& own = *stages_.back();
        CHECK(own.captures() == captures() && own.activation_dtype() == activation_dtype(),
              "[stages] {} beside {}", own.name(), name());
    }
}

StageGroup::~StageGroup() = default;

Backend& StageGroup::of_stage(int stage) { return *stages_[static_cast<size_t>(stage)]; }
const Backend& StageGroup::of_stage(int stage) const { return *stages_[static_cast<size_t>(stage)]; }

void StageGroup::refuse(const char* what) {
    FAIL(runtime, "[stages] {} is for one stage: plans and weights are each stage's own", what);
}

std::string StageGroup::description() const {
    std::string text = fmt::format("{} devices by layers: ", stages());
    for (int s = 0; s < stages(); ++s) text += (s > 0 ? "; " : "") + of_stage(s).description();
    return note_.empty() ? text : text + "; " + note_;
}

MemoryInfo StageGroup::memory_info() const {
    MemoryInfo sum{0, 0, true};
    for (const auto& stage : stages_) {
        const MemoryInfo own = stage->memory_info();
        sum.total_bytes += own.total_bytes;
        sum.free_bytes += own.free_bytes;
        sum.exact &= own.exact;
    }
    return sum;
}

void StageGroup::note_block(const void* memory, int64_t bytes, int stage) {
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<const std::byte*>(memory)] = {bytes, stage};
}

void StageGroup::forget_block(const void* memory) {
    const std::lock_guard lock(mutex_);
    blocks_.erase(static_cast<const std::byte*>(memory));
}

int StageGroup::stage_of(const void* memory) const {
    const auto* address = static_cast<const std::byte*>(memory);
    const std::lock_guard lock(mutex_);
    auto after = blocks_.upper_bound(address);
    CHECK(after != blocks_.begin(), "[stages] an address that no stage knows");
    const auto& [begin, block] = *--after;
    CHECK(address - begin <= block.bytes, "[stages] an address {} bytes into a block of {}", address - begin,
          block.bytes);
    return block.stage;
}

void StageGroup::free(void* memory) {
    if (memory != nullptr) at(memory).free(memory);
}

void StageGroup::zero(void* memory, int64_t bytes) { at(memory).zero(memory, bytes); }

void StageGroup::upload(void* to, const void* from_host, int64_t bytes) {
    at(to).upload(to, from_host, bytes);
}

void StageGroup::download(void* to_host, const void* from, int64_t bytes) {
    at(from).download(to_host, from, bytes);
}

void StageGroup::copy(void* to, const void* from, int64_t bytes) {
    CHECK(stage_of(to) == stage_of(from), "[stages] a copy from one stage to another");
    at(to).copy(to, from, bytes);
}

std::vector<std::vector<BlockCopy>> StageGroup::by_stage(std::span<const BlockCopy> list,
                                                         bool to_host) const {
    std::vector<std::vector<BlockCopy>> lists(stages_.size());
    for (const BlockCopy& c : list)
        lists[static_cast<size_t>(stage_of(to_host ? c.from : c.to))].push_back(c);
    return lists;
}

void StageGroup::save(std::span<const BlockCopy> list) {
    const auto lists = by_stage(list, true);
    for (size_t s = 0; s < lists.size(); ++s)
        if (!lists[s].empty()) stages_[s]->save(lists[s]);
}

void StageGroup::load(std::span<const BlockCopy> list) {
    const auto lists = by_stage(list, false);
    for (size_t s = 0; s < lists.size(); ++s)
        if (!lists[s].empty()) stages_[s]->load(lists[s]);
}

void StageGroup::order_after_saves() {
    for (const auto& stage : stages_) stage->order_after_saves();
}

void StageGroup::finish_saves() {
    for (const auto& stage : stages_) stage->finish_saves();
}

void StageGroup::synchronize() {
    for (const auto& stage : stages_) stage->synchronize();
}

int first_wrong_link(Backend& group, int64_t bytes) {
    std::mt19937_64 random(20);
    bytes -= bytes % 8;
    std::vector<uint64_t> sent(static_cast<size_t>(bytes / 8)), arrived(sent.size());
    for (int s = 0; s + 1 < group.stages(); ++s) {
        for (uint64_t& word : sent) word = random();
        Backend &from = group.of_stage(s), &to = group.of_stage(s + 1);
        const auto taken = [&](Backend& b) {
            return std::shared_ptr<std::byte>(static_cast<std::byte*>(b.alloc(bytes, "a test of the link")),
                                              [&b](std::byte* m) { b.free(m); });
        };
        const auto a = taken(from), b = taken(to);
        from.upload(a.get(), sent.data(), bytes);
        const BlockCopy copy{b.get(), a.get(), bytes, bytes, bytes, 1};
        to.receive(from, {&copy, 1});
        to.download(arrived.data(), b.get(), bytes);
        from.synchronize();
        if (arrived != sent) return s;
    }
    return -1;
}

std::unique_ptr<Backend> make_cpu_stages(int threads, int stages) {
    std::vector<std::unique_ptr<Backend>> list;
    for (int s = 0; s < stages; ++s) list.push_back(make_cpu_backend(threads));
    return std::make_unique<StageGroup>(std::move(list));
}

}  // namespace quern
