// The gated delta rule over many rows: two kernels, chunks of 64 rows, products of BF16 operands with FP32
// sums.
//
//   delta_prefill_prepare.cu
//     block = (key head, chunk): x = silu(conv u) for its q, k and v heads; for each of its value heads
//     [ 64 x 64 lower triangle ] A = (I + L)^-1 diag(beta) and P = q k^T with decays, as 10 16x16 blocks each
//   delta_prefill_scan.cu
//     block = (sequence, value head, 32 v columns): chunks in order; 2 warps keep S [16 v x 128 k] each in
//     registers, 2 more compute o of the chunk before from what those pass on (no barrier inside a chunk)
//
// With G the sums of log gates inside a chunk, n = 1 / |x_k|, m = 1 / (|x_q| sqrt(128)):
//   L_ij = beta_i exp(G_i - G_j) k_i.k_j (j < i)     P_ij = exp(G_i - G_j) q_i.k_j (j <= i)
//   U = A (V - diag(exp(G) n) X_k S^T)               o = diag(exp(G) m) X_q S^T + P U
//   S = exp(G_last) S + (diag(exp(G_last - G) n) U)^T X_k
// x_q, x_k and V enter the products as they are: the norms go into the FP32 factors, so nothing is rounded
// twice. What feeds S enters as the sum of two BF16 numbers, which leaves S within 1e-5 of FP32 steps.
// Rounded to one instead, A, its right operand or U would each cost 2e-3, S itself 1e-3 where it hardly
// decays. o is rounded to BF16 in the end, so its products take the high parts only. Every product is
// computed transposed, with v along the rows: a sum's registers then are the next product's left operand as
// they stand, and all right operands come from tiles that all blocks of a key head share.
//
// A row's o has the same bits whatever rows follow it in its chunk, or none: sums of gates run forwards, A
// and P have zeros above the diagonal, and absent rows are zeros.
//
// Traffic a row and layer (nk 16, nv 32): u 16 KB and x 16 KB, records 8 KB written and read, o 8 KB; scan
// reads x through L2, q and k once for each of 8 blocks. Limits: heads of 128, 4 taps; 98 KB of shared
// memory.
#include "ggml-like/cuda/delta/prefill.cuh"

namespace quern::cuda::delta {

using namespace ptx;

void delta_prefill(Context& context, const DeltaStep& p) {
    if (p.tokens <= 0 || p.sequences <= 0) return;
    delta::launch_prepare(context, p, delta_chunks(p.tokens, p.sequences));
    delta::launch_scan(context, p);
}

}  // namespace quern::cuda::delta
