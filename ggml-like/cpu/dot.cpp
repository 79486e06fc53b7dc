// Choice of the dot kernels at run time, and the set for any CPU: plain loops over 8 independent sums.
// Compiled without contraction of products and sums (CMakeLists.txt), so every tile size rounds alike.
#include "ggml-like/cpu/dot.h"

#include <cstring>

#include "ggml-like/cpu/dot_tiles.h"
#include "ggml-like/cpu/vector_tiles.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/tensor.h"

namespace quern::cpu {
namespace {

struct Scalar {
    struct V {
        float v[8];
    };
    static constexpr int kLanes = 8;
    static constexpr int kMaxTokens = 4;
    static constexpr int kRows = 1;
    static constexpr int kColumns = 1;
    static constexpr int kPrefetch = 4096;

    static V set1(float a) { return {{a, a, a, a, a, a, a, a}}; }
    static V once(V a) { return a; }
    static V zero() { return set1(0.0f); }
    static V load(const float* p) {
        V a;
        std::memcpy(a.v, p, sizeof a.v);
        return a;
    }
    static V load_first(const float* p, int n) {
        V a = zero();
        for (int i = 0; i < n; ++i) a.v[i] = p[i];
        return a;
    }
    static void store(float* p, V a) { std::memcpy(p, a.v, sizeof a.v); }
    static void store_first(float* p, V a, int n) {
        for (int i = 0; i < n; ++i) p[i] = a.v[i];
    }
    static V add(V a, V b) {
        for (int i = 0; i < 8; ++i) a.v[i] += b.v[i];
        return a;
    }
    static V mul(V a, V b) {
        for (int i = 0; i < 8; ++i) a.v[i] *= b.v[i];
        return a;
    }
    static V div(V a, V b) {
        for (int i = 0; i < 8; ++i) a.v[i] /= b.v[i];
        return a;
    }
    static V max(V a, V b) {
        for (int i = 0; i < 8; ++i) b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
        return b;
    }
    static V min(V a, V b) {
        for (int i = 0; i < 8; ++i) b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
        return b;
    }
    static V power(V magic) {
        uint32_t bits[8];
        std::memcpy(bits, magic.v, sizeof bits);
        for (uint32_t& b : bits) b = (b + 127) << 23;
        std::memcpy(magic.v, bits, sizeof bits);
        return magic;
    }
    static V fma(V a, V b, V c) {
        for (int i = 0; i < 8; ++i) c.v[i] += a.v[i] * b.v[i];
        return c;
    }
    static float sum(V a) {
        return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
    }
};

/// A format read one value after the other; `Value` names the stored type and its meaning.
template <typename Stored, float (*kValue)(Stored)>
struct Values : NeverPoisoned {
    static constexpr int kBytes = static_cast<int>(sizeof(Stored));
    static Scalar::V load_first(const uint8_t* p, int n) {
        Scalar::V a = Scalar::zero();
        for (int i = 0; i < n; ++i) {
            Stored stored;
            std::memcpy(&stored, p + i * kBytes, sizeof stored);
            a.v[i] = kValue(stored);
        }
        return a;
    }
    static Scalar::V load(const uint8_t* p) { return load_first(p, Scalar::kLanes); }
};

float same(float x) { return x; }
using F32 = Values<float, same>;
using Bf16 = Values<uint16_t, bf16_to_float>;
using F16 = Values<uint16_t, f16_to_float>;
using F8 = Values<uint8_t, nvfp4::e4m3_to_float>;

/// Activations as pack_even_odd leaves them, so that a byte's codes need no reordering.
struct Nvfp4Tile {
    static constexpr int kRows = 1;

    template <int R, int T>
    static void tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
        const uint8_t* codes = static_cast<const uint8_t*>(w.data) + row * w.row_bytes;
        const uint8_t* scales = static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes;
        Scalar::V acc[T];
        for (int t = 0; t < T; ++t) acc[t] = Scalar::zero();
        for (int64_t b = 0; b < k / nvfp4::kBlock; ++b) {
            Scalar::V even, odd;
            for (int i = 0; i < 8; ++i) {
                even.v[i] = nvfp4::kCodeValue[codes[8 * b + i] & 15];
                odd.v[i] = nvfp4::kCodeValue[codes[8 * b + i] >> 4];
            }
            const Scalar::V scale = Scalar::set1(nvfp4::e4m3_to_float(scales[b]));
            for (int t = 0; t < T; ++t) {
                const float* xb = x[t] + nvfp4::kBlock * b;
                Scalar::V part = Scalar::fma(even, Scalar::load(xb), Scalar::zero());
                part = Scalar::fma(odd, Scalar::load(xb + 8), part);
                acc[t] = Scalar::fma(part, scale, acc[t]);
            }
        }
        for (int t = 0; t < T; ++t) y[t][row] = Scalar::sum(acc[t]);
    }
    static bool poisoned(const RowBlock&, int64_t, int64_t) { return false; }
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}
#endif

}  // namespace

const DotKernels& scalar_dot_kernels() {
    static constexpr DotKernels kKernels = {
        "scalar",
        run_rows<Scalar, PlainTile<Scalar, F32>>,
        run_rows<Scalar, PlainTile<Scalar, Bf16>>,
        run_rows<Scalar, PlainTile<Scalar, F16>>,
        run_rows<Scalar, PlainTile<Scalar, F8>>,
        run_rows<Scalar, BlockScaledTile<Scalar, F8>>,
        run_rows<Scalar, Nvfp4Tile>,
        pack_even_odd,
        dot_product<Scalar>,
        add_scaled<Scalar>,
        combine_rows<Scalar>,
        softmax<Scalar>,
        gelu_tanh<Scalar>,
    };
    return kKernels;
}

DotKernelList available_dot_kernels() {
    DotKernelList list;
#if defined(__x86_64__)
    if (has_avx512()) list.set[list.count++] = &avx512_dot_kernels();
    if (has_avx2()) list.set[list.count++] = &avx2_dot_kernels();
#elif defined(__aarch64__)
    list.set[list.count++] = &neon_dot_kernels();
#endif
    list.set[list.count++] = &scalar_dot_kernels();
    return list;
}

const DotKernels& dot_kernels() {
    static const DotKernels& best = *available_dot_kernels().set[0];
    return best;
}

}  // namespace quern::cpu
