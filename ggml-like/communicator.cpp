#include "ggml-like/communicator.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "ggml-like/check.h"

namespace quern {
namespace {

class HostCommunicator final : public Communicator {
  public:
    explicit HostCommunicator(int ranks) : calls_(static_cast<size_t>(ranks)) {}

    int ranks() const override { return static_cast<int>(calls_.size()); }

    /// Each rank makes an equal stretch of the sum, for all of them.
    void all_reduce(int rank, const float* part, float* sum, int64_t count) override {
        calls_[static_cast<size_t>(rank)] = {part, sum};
        meet();
        const int64_t n = ranks(), begin = count * rank / n, end = count * (rank + 1) / n;
        for (int64_t i = begin; i < end; ++i) {
            float total = calls_[0].part[i];
            for (size_t r = 1; r < calls_.size(); ++r) total += calls_[r].part[i];
            for (const Call& call : calls_) call.sum[i] = total;
        }
        meet();
    }

    void abort() override {
        const std::lock_guard lock(mutex_);
        aborted_ = true;
        all_here_.notify_all();
    }

    void begin_step() override {
        const std::lock_guard lock(mutex_);
        aborted_ = false;
        here_ = 0;
    }

  private:
    struct Call {
        const float* part;
        float* sum;
    };

    /// Returns when all ranks have called it as often as this one has.
    void meet() {
        std::unique_lock lock(mutex_);
        if (++here_ == ranks()) {
            here_ = 0;
            ++meetings_;
            all_here_.notify_all();
        } else {
            all_here_.wait(lock, [&, now = meetings_] { return aborted_ || meetings_ != now; });
        }
        if (aborted_) FAIL(device, "[all_reduce] another rank of this model has failed");
    }

    std::mutex mutex_;
    std::condition_variable all_here_;
    std::vector<Call> calls_;  // of the ranks, between two meetings
    int here_ = 0;
    int64_t meetings_ = 0;
    bool aborted_ = false;
};

}  // namespace

std::unique_ptr<Communicator> make_host_communicator(int ranks) {
    CHECK(ranks > 0, "[communicator] {} ranks", ranks);
    return std::make_unique<HostCommunicator>(ranks);
}

}  // namespace quern
