// Communicator: how the ranks that run one model together, each a part of it, add up their partial sums.
//
// Every rank runs the same steps in the same order on a thread of its own. Numbers are added in the order of the ranks, so
// a sum has the same bits on all ranks, whoever comes last.
#pragma once

#include <cstdint>
#include <memory>

namespace quern {

class Communicator {
  public:
    virtual ~Communicator() = default;
    virtual int ranks() const = 0;
    /// sum[i] = part[i] of rank 0 + part[i] of rank 1 + ... for `count` numbers, FP32. Called by every rank, in the same
    /// order, with the same count; returns when `sum` is complete and `part` may be written again. `sum` must not overlap
    /// `part`. Throws Error(device) if another rank has called abort() since begin_step().
    virtual void all_reduce(int rank, const float* part, float* sum, int64_t count) = 0;
    /// Called by a rank that fails: the others, which wait for it or will, fail, too.
    virtual void abort() = 0;
    /// Before a step, while no rank runs one: forgets the steps that were not completed.
    virtual void begin_step() = 0;
};

/// For ranks that are threads of this process and compute in its memory.
std::unique_ptr<Communicator> make_host_communicator(int ranks);

}  // namespace quern
