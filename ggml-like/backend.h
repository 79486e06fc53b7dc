// Backend: a device that holds memory and runs plans. Two exist: CPU here, CUDA beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "ggml-like/plan.h"
#include "ggml-like/weight.h"

namespace quern {

struct MemoryInfo {
    int64_t total_bytes = 0;
    int64_t free_bytes = 0;
    bool exact = false;  // free_bytes reflects allocations immediately: a device's own memory
};

/// Equal blocks to copy, each so many bytes after the one before.
struct BlockCopy {
    std::byte* to;
    const std::byte* from;
    int64_t to_stride, from_stride;
    int64_t bytes, count;  // of a block; blocks
};

/// Inputs of a plan, from memory of alloc_host. Addresses and size are multiples of 16 bytes.
struct InputCopy {
    std::byte* to;
    const std::byte* from_host;
    int64_t bytes;
};

class Backend {
  public:
    static constexpr int kMarks = 16;

    virtual ~Backend() = default;

    virtual std::string name() const = 0;         // "CPU"
    virtual std::string description() const = 0;  // "2 threads, AVX-512"
    /// PCI address of the device, for tools that watch it; empty for the CPU.
    virtual std::string bus_id() const { return {}; }
    /// Host threads that ops use.
    virtual int threads() const = 0;
    virtual MemoryInfo memory_info() const = 0;
    /// The calling thread uses this backend from now on, until it calls this of another one. Threads that make or use only
    /// one backend need not call it.
    virtual void use_on_this_thread() const {}
    /// The type of activations between ops.
    virtual DType activation_dtype() const = 0;

    /// Aligned to kPlanAlignment, contents undefined. Throws Error(memory) that says how much was asked for.
    virtual void* alloc(int64_t bytes, const char* what) = 0;
    virtual void free(void* memory) = 0;
    virtual void zero(void* memory, int64_t bytes) = 0;
    virtual void upload(void* to, const void* from_host, int64_t bytes) = 0;
    virtual void download(void* to_host, const void* from, int64_t bytes) = 0;
    virtual void copy(void* to, const void* from, int64_t bytes) = 0;
    /// As upload, of the inputs of two plans. Faster where they come behind a plan that runs; slower where the device waits for them.
    virtual void upload_between(const InputCopy& first, const InputCopy& second);
    /// As download, in the order of all other work and without a wait: the bytes are there after await_mark of a mark that is
    /// set later. `to_host`: of alloc_host.
    virtual void send(void* to_host, const void* from, int64_t bytes) { download(to_host, from, bytes); }
    /// As send and set_mark, but later work does not wait for the copy: it may not write to `from` before the mark was awaited. Such
    /// copies are made in the order of their calls.
    virtual void send_beside(void* to_host, const void* from, int64_t bytes, int mark) {
        send(to_host, from, bytes);
        set_mark(mark);
    }
    /// Number `mark`, 0 .. kMarks - 1, stands for all work queued so far from now on.
    virtual void set_mark(int) {}
    /// Returns when the work that the mark stands for has ended, whatever was queued since; at once if it was never set.
    virtual void await_mark(int) {}

    /// Copies to memory of alloc_host, beside the plans: begins when all work queued so far has ended, and later work does
    /// not wait for it.
    virtual void save(std::span<const BlockCopy> list);
    /// Work that is queued from now on begins when all saves so far have ended.
    virtual void order_after_saves() {}
    /// Returns when all saves so far have ended.
    virtual void finish_saves() {}
    /// Whether all saves so far have ended, without a wait where that can be known.
    virtual bool saves_ended() {
        finish_saves();
        return true;
    }
    /// Copies from memory of alloc_host, in the order of all other work, after all saves so far.
    virtual void load(std::span<const BlockCopy> list);

    /// Host memory with the fastest uploads and downloads; any thread may ask. Throws Error(memory).
    virtual void* alloc_host(int64_t bytes, const char* what) = 0;
    virtual void free_host(void* memory) = 0;

    /// Bytes of this backend's memory that place_weight takes: 0 where the CPU reads the mapped file.
    virtual int64_t placed_bytes(const Weight& weight, RowOrder order) const = 0;
    virtual int64_t placed_bytes(const ExpertWeights& experts, RowOrder order) const = 0;
    /// Allocates `bytes` for all weights together (the sum of placed_bytes), before any of them is read. Throws
    /// Error(memory).
    virtual void reserve_weights(int64_t bytes) = 0;
    /// Makes a weight usable by this backend's ops. The CPU reads it where it is (the mapped file); a GPU uploads
    /// and repacks it into memory that the backend owns. Segments without data get random values of sensible
    /// size, the same ones for the same name.
    virtual void place_weight(Weight& weight, RowOrder order) = 0;
    virtual void place_experts(ExpertWeights& experts, RowOrder order) = 0;
    /// part: becomes as many first rows as it has, a multiple of 16, of a stacked weight that is placed, in its memory.
    virtual void share_first_rows(Weight& part, const Weight& of) { part = first_rows(of, part.rows); }
    /// As place_weight, but in memory of its own, which is freed when the weight is placed apart again with other
    /// segments: plans that read it may not run after that. Has read the segments when it returns.
    virtual void place_apart(Weight& weight, RowOrder order) = 0;
    /// Returns when all segments placed so far have been read: their memory may go where the weight is `placed`.
    virtual void finish_reading() {}
    /// Call after the last weight: waits for uploads and frees their buffers.
    virtual void weights_complete() = 0;

    /// A group (backend_group.h) is several ranks, whose memory is taken, copied and cleared together; all others are one.
    virtual int ranks() const { return 1; }
    virtual Backend& of_rank(int) { return *this; }
    /// Where rank `rank` has its part of what is at `memory`, of alloc or alloc_host, on rank 0.
    virtual void* memory_of(int, const void* memory) const { return const_cast<void*>(memory); }
    /// Calls work(rank) for all ranks at the same time, rank 0's on this thread, and returns when all calls have ended. If one
    /// throws, the others do not go on waiting for it, and the error that came first is rethrown.
    virtual void on_ranks(const std::function<void(int rank)>& work) { work(0); }

    /// A group (stage_group.h) is several devices, each with some of a model's layers, that run one after another; all others
    /// are one. What of_stage gives may be called on any thread.
    virtual int stages() const { return 1; }
    virtual Backend& of_stage(int) { return *this; }
    virtual const Backend& of_stage(int) const { return *this; }
    /// Copies what another stage's queued work leaves in its memory to this one's. Begins when all work queued so far on both has
    /// ended; later work of either waits for it.
    virtual void receive(Backend& sender, std::span<const BlockCopy> list);

    /// Whether it captures plans that run repeatedly; then few shapes, with padding, are faster than many.
    virtual bool captures() const = 0;
    /// Called once by Plan, when all its memory is known.
    virtual void prepare(Plan& plan) = 0;
    virtual void run(Plan& plan) = 0;
    /// Whether `run` returns while the plan runs, so that the host may work meanwhile.
    virtual bool asynchronous() const { return false; }
    virtual void synchronize() = 0;

    /// If set: called after each node with its wall time and the names of the kernels that it launched, for the bench and for
    /// tests; plans then run eagerly.
    std::function<void(const Node&, double seconds, const std::string& kernels)> after_node;
};

class Communicator;

/// threads: 0 = as many as this process may use. `communicator`: of the ranks that this one belongs to as rank `rank`; null:
/// to none.
std::unique_ptr<Backend> make_cpu_backend(int threads, std::shared_ptr<Communicator> communicator = nullptr,
                                          int rank = 0);

}  // namespace quern
