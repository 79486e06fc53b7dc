// Packed pages to BF16 for a prompt step (unpacked.cuh), after attention_prepare_packed.
//
//   block    one after another of all K and V pages of the step's heads; a thread every so many 16-byte pieces of codes
//
// Bound: bytes, the packed page read and its BF16 written: 67 MB of a layer at 32K tokens, some 30 us, where attention takes
// milliseconds. Limits: head_dim 256.
#include "ggml-like/cuda/attention/packed.cuh"
#include "ggml-like/cuda/attention/unpacked.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kUnpackThreads = 256, kDim = kSplitHeadDim;

/// A piece of codes of a block's row: 16 or 32 elements.
__device__ __forceinline__ void unpack_piece(kv::Packing packing, const packed::Block& b, const char* block,
                                             int number, bf16* to) {
    const int row_pieces = packing == kv::Packing::fp8 ? 16 : 8, r = number / row_pieces,
              piece = number % row_pieces;
    const char* scales = block + b.scales_at + r * b.scales;
    uint32_t scale = *reinterpret_cast<const uint16_t*>(scales), of16 = 0;
    if (packing == kv::Packing::steps)
        scale |= uint32_t{*reinterpret_cast<const uint16_t*>(scales + 2)} << 16;
    if (packing == kv::Packing::nvfp4)
        of16 = *reinterpret_cast<const uint16_t*>(block + b.blocks_at + r * b.blocks + piece * 2);
    const uint4 codes = *reinterpret_cast<const uint4*>(block + number * 16);
    uint4* out = reinterpret_cast<uint4*>(to + r * kDim + piece * (kDim / row_pieces));
    packed::expand_piece(packing, codes, scale, of16, [&](int i, const uint4& x) { out[i] = x; });
}

__global__ void __launch_bounds__(kUnpackThreads)
    attention_unpack_kernel(const __grid_constant__ AttentionCall c,
                            const __grid_constant__ AttentionCall to) {
    allow_successor();
    wait_for_predecessor();
    if (!fits_unpacked(c)) return;
    const packed::Block k(c.k_layout), v(c.v_layout);
    int page = blockIdx.x;  // of the sequences from `sequence` on
    for (int sequence = 0, first = 0; sequence < c.sequences; ++sequence) {
        const int pages = pages_of(c, sequence);
        for (; page < pages; page += gridDim.x) {
            const bool values = blockIdx.y % 2 == 1;
            const int head = blockIdx.y / 2;
            const packed::Block& b = values ? v : k;
            const kv::Packing packing = values ? c.v_packing : c.k_packing;
            const int from = c.pages[sequence * c.page_row + page];
            const char* block = reinterpret_cast<const char*>(values ? c.v_cache : c.k_cache) +
                                (static_cast<int64_t>(from) * c.kv_heads + head) * b.bytes;
            bf16* out = (values ? to.v_cache : to.k_cache) +
                        (static_cast<int64_t>(first + page) * c.kv_heads + head) * kKeysPerPage * kDim;
            for (int i = threadIdx.x; i < kKeysPerPage * b.codes / 16; i += kUnpackThreads)
                unpack_piece(packing, b, block, i, out);
        }
        page -= pages, first += pages;
    }
}

}  // namespace

void attention_unpack(const AttentionCall& call, Context& context) {
    launch(context, "gated_attention unpack", attention_unpack_kernel,
           dim3(static_cast<unsigned>(2 * context.sms), static_cast<unsigned>(2 * call.kv_heads)),
           dim3(kUnpackThreads), 0, call, over_unpacked(call));
}

}  // namespace quern::cuda::attention
