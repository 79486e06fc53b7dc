// The account of a load: every tensor and byte of a checkpoint is used, known to be unused, or an error.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "models/tensor_names.h"

namespace quern {

/// The account when everything has been read. Bytes are file bytes: all classes together have the size of the files.
struct Audit {
    struct Count {
        uint64_t tensors = 0;
        uint64_t bytes = 0;
    };
    Count used;
    Count unused[kUnusedReasons];  // by UnusedReason
    Count unknown;
    uint64_t header_bytes = 0;
    uint64_t file_bytes = 0;
    std::vector<std::string> problems;  // one line each; not empty = this checkpoint must not be run
    std::vector<std::string> notes;     // harmless, but worth knowing

    bool ok() const { return problems.empty(); }
    /// The classes with counts and bytes, a line each.
    std::string totals() const;
    /// Error(model) with the problems unless ok().
    void require_ok() const;
};

enum class ReadMode : uint8_t {
    headers,  // names, dtypes and shapes only: fast, touches no weights; global scales stay 1
    values,   // scales are read, checked and converted
};

/// What has been read from a checkpoint so far, and the memory of scales that had to be converted to float.
/// Passed to every read_* function. Threads may share it while they read different tensors, but audit() and
/// take_floats() are for one thread.
class TensorUse {
  public:
    enum class State : uint8_t { unknown, used, unused };
    struct Entry {
        State state = State::unknown;
        UnusedReason reason = UnusedReason::vision;  // when unused
        const char* role = "";                       // when used: "values", "block scales", ...
    };

    explicit TensorUse(const Checkpoint& checkpoint, ReadMode mode = ReadMode::values);

    ReadMode mode() const { return mode_; }
    /// Marks a tensor as read. `role` must be a string literal. Fails when it was already used.
    void use(uint32_t tensor, const char* role);
    /// Marks a tensor as deliberately unread.
    void leave(uint32_t tensor, UnusedReason reason);
    const Entry& entry(uint32_t tensor) const { return entries_[tensor]; }
    /// Takes over what another account of the same checkpoint has read. Fails like use().
    void adopt(TensorUse&& other);
    /// A line for Audit::notes, which has them sorted.
    void note(std::string text);

    /// Memory for `count` floats that lives as long as this object or, once taken, as the result of take_floats.
    float* new_floats(size_t count);
    std::vector<std::unique_ptr<float[]>> take_floats() { return std::move(floats_); }

    /// Classifies what was not read and sums up. Call when everything has been read; may be called again.
    Audit audit();

  private:
    const Checkpoint& checkpoint_;
    ReadMode mode_;
    std::vector<Entry> entries_;
    std::mutex mutex_;  // of what follows
    std::vector<std::string> notes_;
    std::vector<std::unique_ptr<float[]>> floats_;
};

}  // namespace quern
