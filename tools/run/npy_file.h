// NpyFile: a float32 matrix [rows, columns] in NumPy's format 1.0, written row by row; it appears whole or not at all.
// Source: the NumPy Enhancement Proposal 1, "A Simple File Format for NumPy Arrays".
#pragma once

#include <cstdint>
#include <string>

#include "tools/engine/atomic_file.h"

namespace quern {

class NpyFile {
  public:
    /// Throws Error(runtime) if the file cannot be made.
    NpyFile(const std::string& path, int64_t rows, int64_t columns);
    /// `values` [columns]. Throws Error(runtime), for example for a full disk.
    void add_row(const float* values);
    /// Throws Error(runtime) unless exactly `rows` rows were added.
    void commit();

  private:
    AtomicFile file_;
    std::string path_;
    int64_t rows_, columns_, added_ = 0;
};

/// The first bytes of the file: magic, version, and a dictionary padded to a multiple of 64 bytes.
std::string npy_header(int64_t rows, int64_t columns);

}  // namespace quern
