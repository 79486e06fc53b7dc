// Tensor: a named, strided view of memory. Plain data; memory belongs to a Plan, a pool or a checkpoint.
#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace quern {

enum class DType : uint8_t { F32, BF16, F16, F8_E4M3, NVFP4, I32, I64, U8 };

/// "F32", "BF16", ...
const char* dtype_name(DType dtype);
/// Bytes of `elements` consecutive elements. NVFP4: codes only (two a byte); scales are counted by Weight.
int64_t dtype_bytes(DType dtype, int64_t elements);

/// Where a tensor's memory lives and who may write it.
enum class Place : uint8_t {
    weight,   // checkpoint data, read only
    state,    // outlives the step: KV pages, conv and recurrent state
    input,    // uploaded before each run in one packed block
    scratch,  // lives from its producer to its last reader; the planner shares the memory
    output,   // read back after the run; never shared
};

inline constexpr int kMaxRank = 4;

struct Tensor {
    char name[48] = {};
    DType dtype = DType::F32;
    Place place = Place::scratch;
    int rank = 0;
    int64_t shape[kMaxRank] = {1, 1, 1, 1};   // outermost first, as in checkpoints
    int64_t stride[kMaxRank] = {0, 0, 0, 0};  // in elements
    void* data = nullptr;                     // set by the plan for scratch, input and output
    bool zeroed = false;                      // scratch that is all zeros when a run begins
    int32_t base = -1;                        // views: index of the tensor whose memory this is, else -1
    int64_t base_offset = 0;                  // views: bytes from the start of the base

    int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
    /// Bytes from the first to one past the last element.
    int64_t bytes() const;
    bool contiguous() const;

    template <typename T>
    T* as() const {
        return static_cast<T*>(data);
    }
    /// Address of row `i` of the outermost dimension.
    template <typename T>
    T* row(int64_t i) const {
        return static_cast<T*>(data) + i * stride[0];
    }
};

/// Contiguous tensor of the given shape; ranks 1 to 4.
Tensor make_tensor(std::string_view name, DType dtype, Place place, std::initializer_list<int64_t> shape);
/// "h [33, 2048] BF16"
std::string describe(const Tensor& t);

/// BF16 <-> float: rounding to nearest even; NaN stays NaN.
uint16_t float_to_bf16(float x);
inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
/// IEEE half <-> float: rounding to nearest even, overflow to infinity.
uint16_t float_to_f16(float x);
float f16_to_float(uint16_t x);

/// Reads `count` consecutive elements starting at element `offset` of `t` as float (F32, BF16, F16).
void load_floats(const Tensor& t, int64_t offset, int64_t count, float* out);
/// Writes with one rounding to t.dtype (F32, BF16, F16).
void store_floats(const Tensor& t, int64_t offset, int64_t count, const float* in);

}  // namespace quern
