#include "tools/run/npy_file.h"

#include <bit>

#include "ggml-like/check.h"

namespace quern {

std::string npy_header(int64_t rows, int64_t columns) {
    static_assert(std::endian::native == std::endian::little, "the header says little-endian");
    std::string text =
        fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
    const size_t prefix = 10;  // magic 6, version 2, length 2
    text.append(63 - (prefix + text.size()) % 64, ' ');
    text += '\n';
    std::string out("\x93NUMPY\x01\x00", 8);
    out += static_cast<char>(text.size() & 0xFF);
    out += static_cast<char>(text.size() >> 8);
    return out + text;
}

NpyFile::NpyFile(const std::string& path, int64_t rows, int64_t columns)
    : file_(path, 0644), path_(path), rows_(rows), columns_(columns) {
    file_.write(npy_header(rows, columns));
}

void NpyFile::add_row(const float* values) {
    file_.write(values, static_cast<size_t>(columns_) * sizeof(float));
    ++added_;
}

void NpyFile::commit() {
    if (added_ != rows_) FAIL(runtime, "{}: {} of {} rows of logits were computed", path_, added_, rows_);
    file_.commit();
}

}  // namespace quern
