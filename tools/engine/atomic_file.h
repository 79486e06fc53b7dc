// AtomicFile: a file that appears whole or not at all.
//
// Bytes go to a temporary file beside the target; commit() makes them durable and renames it. A target that is
// not a regular file (/dev/stdout, a FIFO) is written directly: there is nothing to rename over.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace quern {

class AtomicFile {
  public:
    /// `mode`: permissions of a new file. Throws Error(runtime) naming the path and the cause.
    AtomicFile(const std::string& path, unsigned mode);
    /// Without commit(), removes the temporary file and leaves the target as it was.
    ~AtomicFile();
    AtomicFile(const AtomicFile&) = delete;
    AtomicFile& operator=(const AtomicFile&) = delete;

    void write(std::string_view bytes);
    void write(const void* data, size_t bytes) { write({static_cast<const char*>(data), bytes}); }
    void commit();

  private:
    void flush();
    [[noreturn]] void fail(const char* what) const;

    std::string path_, temporary_;
    std::string buffer_;
    int fd_ = -1;
};

}  // namespace quern
