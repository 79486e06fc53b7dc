// One safetensors file: strict header reader and read-only mapping of the data.
//
// A file is u64 little-endian header length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the
// data section. Everything is checked before a tensor is handed out: N <= 100 MB and within the file; the
// JSON strict; no duplicate name or key; product(shape) * element size, computed with overflow checks, equal to
// the length of the byte range, for every dtype below but `other`; ranges that follow each other without gap or
// overlap and fill the data section to the last byte. All errors are Error(model) and name the file,
// the tensor, what was expected, what was found and the likely cause. Source: the safetensors format
// description (huggingface/safetensors, Apache-2.0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ggml-like/name_hash.h"

namespace quern {

enum class SafeDType : uint8_t {
    BOOL,
    U8,
    I8,
    F8_E4M3,
    F8_E5M2,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    F64,
    I64,
    U64,
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    F4,       // two elements a byte
    F6_E2M3,  // four elements in three bytes
    F6_E3M2,
    C64,
    other  // a name that is not in this list: SafeTensor::other_dtype
};

/// "BF16", as written in the file; "another dtype" for `other`.
const char* safe_dtype_name(SafeDType dtype);
/// Bits of one element; 0 for `other`, whose size is not known.
int safe_dtype_bits(SafeDType dtype);

inline constexpr int kSafeMaxRank = 8;
inline constexpr uint64_t kSafeMaxHeader = 100'000'000;

struct SafeTensor {
    std::string_view name;  // lives as long as the file object
    SafeDType dtype = SafeDType::U8;
    uint8_t rank = 0;                  // 0 is a scalar: one element
    int64_t shape[kSafeMaxRank] = {};  // outermost first
    uint64_t begin = 0, end = 0;       // byte range in the data section
    const std::byte* data = nullptr;   // end - begin bytes in the mapping, at any alignment
    std::string_view other_dtype;      // as written in the file, if dtype is `other`; lives as long as name

    std::span<const int64_t> dims() const { return {shape, rank}; }
    /// The product of the shape.
    int64_t elements() const;
    uint64_t bytes() const { return end - begin; }
    bool has_shape(std::initializer_list<int64_t> expected) const;
};

/// The dtype as written in the file, whatever it is.
std::string_view dtype_text(const SafeTensor& t);
/// "[248320, 2048] BF16"
std::string describe(const SafeTensor& t);
/// "[1, 2]"
std::string shape_text(std::span<const int64_t> shape);

struct SafetensorsHeader {
    std::vector<SafeTensor> tensors;                            // in the order of their data; data is null
    std::vector<std::pair<std::string, std::string>> metadata;  // `__metadata__`, in file order
    NameMap by_name;                                            // name -> index in `tensors`
    uint64_t data_begin = 0;                                    // offset of the data section in the file
    std::deque<std::string> unescaped;  // names that were written with JSON escapes, and other_dtype
};

/// Parses the start of a safetensors file of `file_size` bytes. `start` holds the 8 length bytes and at least
/// the whole header, and must outlive the result, whose names point into it. `what` is the file, for
/// messages.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> start, uint64_t file_size,
                                           const std::string& what);

/// The likely nature of a file that is not safetensors ("a git-lfs pointer: run `git lfs pull`"), from its
/// first bytes; empty when there is nothing to say.
std::string guess_file_kind(std::string_view first_bytes);

/// An open, checked file. The header is copied to memory; the data is mapped, so that opening reads no
/// weights. If another process shortens the file afterwards, reading the lost pages raises SIGBUS, as with every
/// mapping: call `check_unchanged` before long reads. Move only; safe to read from many threads.
class SafetensorsFile {
  public:
    static SafetensorsFile open(const std::string& path);
    ~SafetensorsFile();
    SafetensorsFile(SafetensorsFile&& other) noexcept;
    SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
    SafetensorsFile(const SafetensorsFile&) = delete;
    SafetensorsFile& operator=(const SafetensorsFile&) = delete;

    const std::string& path() const { return path_; }
    uint64_t file_size() const { return size_; }
    /// Bytes that are not tensor data: length and JSON.
    uint64_t header_bytes() const { return parsed_.data_begin; }
    const std::vector<SafeTensor>& tensors() const { return parsed_.tensors; }
    const std::vector<std::pair<std::string, std::string>>& metadata() const { return parsed_.metadata; }
    /// The tensor of that exact name, or null.
    const SafeTensor* find(std::string_view name) const;
    /// One fstat: fails when the file was shortened, grown or rewritten since it was opened.
    void check_unchanged() const;

  private:
    SafetensorsFile() = default;
    void close_all() noexcept;

    std::string path_;
    int fd_ = -1;
    uint64_t size_ = 0;
    int64_t mtime_ns_ = 0;
    std::unique_ptr<std::byte[]> header_;
    SafetensorsHeader parsed_;
    const std::byte* map_ = nullptr;
};

}  // namespace quern
