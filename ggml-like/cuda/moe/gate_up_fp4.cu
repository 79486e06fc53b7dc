// moe_gate_up with NVFP4 weights: the choice of the kernel, and the stream.
//
//   rows of the step        kernel
//   1, answer               gate_up_fp4_one.cu
//   2 to 8, answers         gate_up_fp4_few.cu
//   9 to 64, answers        gate_up_fp4_stream<chooses>   every block chooses experts and makes groups (block_choice.cuh), then the
//                                                         stream; fewer where those do not fit
//   > 256 experts, 8 used   gate_up_fp4_stream<chosen>    choose_experts.cu has chosen; the stream
//   up to 64, prompts       gate_up_fp4_stream<prompt>    the same, with sums as gemm.h makes them
//
// A tile of 16 packed rows has 8 rows of gate and the same 8 of up, so the lane with a row's gate also has its up.
// Tiles and shared memory: fp4_stream.cuh; rows of x are requested before weights, as both can only be after the wait.
// The choice takes the same shared memory before.
//
// Traffic: the weights of each needed expert once (again, from L2, for an expert's groups after its first).
// Times of a step's kernels: PERFORMANCE.md.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/moe/block_choice.cuh"
#include "ggml-like/cuda/moe/choice_list.cuh"
#include "ggml-like/cuda/moe/fp4_stream.cuh"
#include "ggml-like/cuda/moe/gate_up_fp4.h"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"
namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// An answer step in which the kernel chooses experts; one in which they have been chosen; a prompt step.
enum class Mode { chooses, chosen, prompt };

/// A Work of stream_groups. scale[n]: the norm's factor of row n, in shared memory if the block chose.
template <Mode kMode>
struct GateUpWork {
    const GateUp& a;
    const float* scale;
    static constexpr bool kLate = false;
    static constexpr bool kPrompt = kMode == Mode::prompt;
    static constexpr bool kRowsFirst = true;  // both are requested late; the rows are fewer
    static constexpr bool kRowsAtPlaces = false, kTargetsAtPlaces = kPrompt;

    __device__ __forceinline__ int row_of(bool is_shared, int index) const {
        return is_shared ? index : quotient(index, a.used);
    }
    __device__ __forceinline__ const bf16* row(bool is_shared, int index) const {
        return a.h + static_cast<int64_t>(row_of(is_shared, index)) * a.columns;
    }
    __device__ __forceinline__ int width(bool) const { return a.columns; }
    __device__ __forceinline__ float weight(bool is_shared, int index) const {
        const float* from = scale + row_of(is_shared, index);
        return kMode == Mode::chooses ? *from : __ldcg(from);
    }
    struct Target {
        bf16* to;
        int width;
        float scale;
    };
    __device__ __forceinline__ Target target(bool is_shared, int index, float weight) const {
        const int width = (is_shared ? a.shared.rows : a.experts.rows) / 2;
        return {(is_shared ? a.shared_out : a.routed) + static_cast<int64_t>(index) * width, width, weight};
    }
    __device__ __forceinline__ void store(const Target& target, int tile, int r, float low, float high,
                                          float low_factor, float high_factor) const {
        const int at = tile * 8 + r;
        if (at >= target.width) return;
        constexpr float kLift = kRowLift<Kind::nvfp4>;
        if constexpr (kPrompt)
            target.to[at] = __float2bfloat16_rn(gated_prompt(low * (low_factor * kLift) * target.scale,
                                                             high * (high_factor * kLift) * target.scale));
        else
            target.to[at] = gated(low * low_factor * target.scale, high * high_factor * target.scale);
    }
};

/// The whole first block: what was chosen is complete, in memory.
__device__ __forceinline__ void tell_down(const GateUp& a, BlockChoice& choice) {
    if (a.rows == 1) return;  // choose_row told
    if (a.rows <= kFewStepRows) {
        tell_choices(a.choice, choice.told);
        __syncthreads();
    } else if (threadIdx.x == 0) {
        __threadfence();  // what the whole block wrote comes before the flag
        publish(a.choice.ready, {0, 0});
    }
}

template <int kEach, Mode kMode>
__global__ void __launch_bounds__(kThreads, 1) gate_up_fp4_stream(GateUp a, Stream s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamShared k;
    __shared__ float scale[kMaxFp4Rows];
    BlockChoice& choice = *reinterpret_cast<BlockChoice*>(shared);  // the stream uses its memory later
    if constexpr (kMode == Mode::chooses) begin_choice(choice);
    bring_near(a), bring_near(s);
    wait_for_predecessor();
    allow_successor();  // only now: before its own wait the successor reads what this kernel's predecessor wrote
    const int pairs = a.experts.tiles > 0 ? a.rows * a.used : 0,
              shared_rows = a.shared.tiles > 0 ? a.rows : 0;
    if constexpr (kMode == Mode::chooses) {
        choose_rows(a.choice, choice, scale);
        list_choice(a.choice, choice, k.list, pairs > 0, shared_rows);
        if (blockIdx.x == 0) __syncthreads(), tell_down(a, choice);
        fence_async_proxy();  // pieces come to where the choice lay
        __syncthreads();
    } else {
        list_groups(k.list, a.groups, a.experts.count, pairs, shared_rows);
    }
    const float* factors = kMode == Mode::chooses ? scale : a.factor;
    stream_groups<kEach>(GateUpWork<kMode>{a, factors}, s, k, shared);
}

template <Mode kMode>
void launch_stream(Context& c, const GateUp& a) {
    StreamShape shape(a.chunks, a.chunks, kMode == Mode::prompt ? 0 : kGateUpEach);
    fit_stream(shape, c.shared_bytes - kStatic);  // it does: the step was chosen
    const Stream stream(shape,
                        {a.experts.data, a.experts.factor, a.experts.expert_bytes, a.experts.tiles, a.chunks},
                        {a.shared.data, a.shared.factor, 0, a.shared.tiles, a.chunks});
    const int tiles = a.rows * a.shared.tiles + a.rows * a.used * a.experts.tiles;
    constexpr const char* kName = kMode == Mode::chooses  ? "moe_gate_up choosing stream"
                                  : kMode == Mode::chosen ? "moe_gate_up stream"
                                                          : "moe_gate_up prompt stream";
    const auto kernel = stream.whole ? gate_up_fp4_stream<kGateUpEach, kMode> : gate_up_fp4_stream<0, kMode>;
    const int bytes = max(shape.bytes(), kMode == Mode::chooses ? static_cast<int>(sizeof(BlockChoice)) : 0);
    launch(c, kName, kernel, min(c.sms, tiles), kThreads, bytes, a, stream);
}

}  // namespace

void gate_up_fp4(Context& c, MixtureProduct product, const GateUp& a) {
    if (product == MixtureProduct::one) return launch_gate_up_one(c, a);
    if (product == MixtureProduct::few) return launch_gate_up_few(c, a);
    product == MixtureProduct::choosing ? launch_stream<Mode::chooses>(c, a)
                                        : launch_stream<Mode::chosen>(c, a);
}

void gate_up_fp4_prompt(Context& c, const GateUp& a) { launch_stream<Mode::prompt>(c, a); }

}  // namespace quern::cuda::moe
