// PeerGroup: the GPUs that run one model together as ranks, and the memory through which they add up (peers.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ggml-like/communicator.h"
#include "ggml-like/cuda/comm/peers.h"
#include "ggml-like/cuda/context.h"

namespace quern::cuda::comm {

class PeerGroup final : public Communicator {
  public:
    /// One rank on each of these GPUs; takes a mailbox on each. Not two on one: there kernels that wait could keep those from
    /// running that they wait for. Throws Error(device) if one GPU cannot write into another's memory, or if they are cards of
    /// different kinds.
    explicit PeerGroup(const std::vector<int>& devices);
    ~PeerGroup() override;
    PeerGroup(const PeerGroup&) = delete;
    PeerGroup& operator=(const PeerGroup&) = delete;

    /// Of a rank's kernels; stays where it is.
    const Peers& peers(int rank) const { return peers_[static_cast<size_t>(rank)]; }
    /// The context of a rank's backend, which must outlive its calls of all_reduce.
    void attach(int rank, Context& context) { contexts_[static_cast<size_t>(rank)] = &context; }

    int ranks() const override { return static_cast<int>(devices_.size()); }
    /// Queued on the stream of the rank's backend.
    void all_reduce(int rank, const float* part, float* sum, int64_t count) override;
    void abort() override;
    void begin_step() override;

    /// After the rank's work has ended: throws Error(device) if it has not got a message.
    void check(int rank) const;
    /// All attached: adds up random numbers in messages of every kind and compares them with sums by the host, bit for bit.
    /// Throws Error(device) for a wrong sum, or if a message does not come within seconds. Returns what to tell a user:
    /// "8 KB added up in 6.2 us".
    std::string test();

  private:
    void enable_access() const;
    void clear();
    void test_size(int64_t count);
    void compare(int rank, const float* sum, const std::vector<float>& expected) const;
    /// Makes the rank's device the thread's.
    cudaStream_t use_stream(int rank) const;
    double microseconds(int64_t count);

    std::vector<int> devices_;
    std::vector<Peers> peers_;
    std::vector<Context*> contexts_;
    Watch* watch_ = nullptr;
    bool aborted_ = false;
};

}  // namespace quern::cuda::comm
