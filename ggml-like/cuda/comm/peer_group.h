// PeerGroup: the GPUs that run one model together as ranks, and the memory through which they add up (peers.h).
#pragma once

#include <string>
#include <vector>

#include "ggml-like/communicator.h"
#include "ggml-like/cuda/comm/mailboxes.h"
#include "ggml-like/cuda/comm/peers.h"
#include "ggml-like/cuda/context.h"

namespace quern::cuda::comm {

class PeerGroup final : public Communicator {
  public:
    /// One rank on each of these GPUs, which are of one kind, with a mailbox each. Not two on one: there kernels that wait could
    /// keep those from running that they wait for.
    PeerGroup(const std::vector<int>& devices, Link link);
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
    /// Whether it has not got one.
    bool lost(int rank) const;

    /// How long a message may take, in nanoseconds, of what is launched from now on. Returns what it was.
    uint64_t set_patience(uint64_t nanoseconds);
    Link link() const { return boxes_.link(); }
    const std::vector<int>& devices() const { return devices_; }
    /// Makes the rank's device the thread's. Returns the stream of its backend.
    cudaStream_t use_stream(int rank) const;

  private:
    void clear();

    const std::vector<int> devices_;
    Mailboxes boxes_;
    std::vector<Peers> peers_;
    std::vector<Context*> contexts_;
    Watch* watch_ = nullptr;
    bool aborted_ = false;
};

}  // namespace quern::cuda::comm
