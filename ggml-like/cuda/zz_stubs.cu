#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/delta.h"
#include "ggml-like/cuda/launch.cuh"
namespace quern::cuda {
void gemm(Context&, const Packed&, const void*, int64_t, int, const GemmOutput&) { unsupported("gemm","stub"); }
void gemm_paired(Context&, const Packed&, const void*, int64_t, int, void*, int64_t) { unsupported("gemm","stub"); }
void gemm_gate_up(Context&, const PackedExperts&, const void*, const int*, int, int, void*) { unsupported("gemm","stub"); }
void gemm_down(Context&, const PackedExperts&, const void*, const int*, int, int, void*) { unsupported("gemm","stub"); }
void delta_prefill(Context&, const DeltaStep&) { unsupported("delta","stub"); }
}
