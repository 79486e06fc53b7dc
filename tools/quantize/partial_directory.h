// PartialDirectory: DIR.partial, with the state of a write (job, lock, checksums) and, in files/, what will be DIR.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quern {

class PartialDirectory {
  public:
    /// Makes DIR.partial or continues it. `job`: a line that says what is being written; to continue, it must be the
    /// same. Throws Error(usage) if DIR exists, if DIR.partial is something else, or if another process is writing it.
    PartialDirectory(const std::string& directory, const std::string& job);
    PartialDirectory(const PartialDirectory&) = delete;
    PartialDirectory& operator=(const PartialDirectory&) = delete;

    /// Where files are made: "DIR.partial/files/".
    const std::string& path() const { return path_; }
    /// DIR is complete (only DIR.partial had not been removed): nothing is left to do.
    bool complete() const { return complete_; }
    /// Whether the file exists with this size and the noted checksum.
    bool has(const std::string& name, uint64_t bytes, int threads) const;
    /// Removes all other files, which an interrupted run left.
    void keep_only(const std::vector<std::string>& names) const;
    /// Notes the checksum of a file that is durable.
    void finished(const std::string& name, int threads) const;
    /// DIR.partial/files becomes DIR; DIR.partial is removed.
    void commit();

  private:
    struct Lock {
        ~Lock();
        int fd = -1;
    };
    void take_lock();
    void remove_state() const;

    std::string directory_, state_, path_;
    Lock lock_;
    bool complete_ = false;
};

/// A file of known size, written at any offset from any thread; it gets its name when it is durable.
class RandomAccessFile {
  public:
    /// Reserves the space. All members throw Error(runtime) naming the file and the cause.
    RandomAccessFile(const std::string& path, uint64_t bytes);
    ~RandomAccessFile();
    RandomAccessFile(const RandomAccessFile&) = delete;
    RandomAccessFile& operator=(const RandomAccessFile&) = delete;

    void write(uint64_t at, const void* data, size_t bytes) const;
    void commit();

  private:
    [[noreturn]] void fail() const;
    std::string path_, temporary_;
    int fd_ = -1;
};

/// Depends on the file's bytes only, not on the number of threads. Throws Error(runtime).
uint64_t file_checksum(const std::string& path, int threads);

}  // namespace quern
