// The gated delta rule over prompt rows, in chunks of 64: two kernels, products of BF16 operands with FP32 sums.
//
//   prefill_prepare.cu   unit = (key head, chunk), of blocks that take one after another
//
//     x = silu(conv u) for the heads of q, k and v; then for each value head of the key head two lower triangles:
//
//       [ A00             ]    A = (I + L)^-1 diag(beta)
//       [ A10 A11         ]    P = q k^T with decays
//       [ A20 A21 A22     ]    64 x 64 each, stored as 10 blocks of 16 x 16
//       [ A30 A31 A32 A33 ]
//
//   prefill_scan.cu      block = (sequence, value head, 32 columns of v), its chunks in order
//
//     2 warps keep S [16 v, 128 k] each in registers; 2 more compute o of the chunk before, from what those pass on
//
//   prefill_scan_warpgroups.cu   on sm_90a instead: 64 columns of v, the same bits; it begins while units of prepare are done
//
// With G the sums of log gates inside a chunk, n = 1 / |x_k|, m = 1 / (|x_q| sqrt(128)):
//
//   L_ij = beta_i exp(G_i - G_j) k_i.k_j (j < i)     P_ij = exp(G_i - G_j) q_i.k_j (j <= i)
//   U = A (V - diag(exp(G) n) X_k S^T)               o = diag(exp(G) m) X_q S^T + P U
//   S = exp(G_last) S + (diag(exp(G_last - G) n) U)^T X_k
//
// Source of the chunked form: "Gated Delta Networks" (Yang et al., 2024).
//
// Precision. x_q, x_k and V enter the products as they are; the norms go into the FP32 factors, so nothing is rounded
// twice. What feeds S enters as the sum of two BF16 numbers, which keeps S within 1e-5 of steps in FP32. Rounded to one
// BF16 number, A, its right operand or U would each cost 2e-3, and S itself 1e-3 where it hardly decays. o is rounded
// to BF16 in the end, so its products take the high parts only.
//
// Layout. Every product is computed transposed, with v along the rows: the registers of a sum are then the left operand
// of the next product as they stand, and all right operands come from tiles that all blocks of a key head share.
//
// A row's o has the same bits whatever finite rows follow it in its chunk, or none: sums of gates run forwards, A and P have
// zeros above the diagonal, and absent rows are zeros. (A row that is not finite also spoils rows before it: of its 16 by
// mma.sync, of its chunk by products of warpgroups.)
//
// Traffic a row and layer (nk 16, nv 32): u 16 KB, x 16 KB, records 8 KB written and read, o 8 KB; scan reads x through
// L2, q and k once for each of 8 blocks, or 4. Measured: prepare of 50 and 200 rows 12 and 13 us; of 8,192 rows prepare on all SMs 167, scan by
// warpgroups 233, by the other some 330 (H200, 2026-11). Limits: heads of 128, 4 taps, 98 KB of shared memory.
#include "ggml-like/cuda/delta/prefill.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::delta {

using namespace ptx;

void delta_prefill(Context& context, const DeltaStep& p) {
    if (p.tokens <= 0 || p.sequences <= 0) return;
    const bool told = launch_prepare(context, p, delta_chunks(p.tokens, p.sequences));
    if (choose_scan(context) == ScanProduct::warpgroups)
        launch_scan_warpgroups(context, p, told);
    else
        launch_scan(context, p);
}

}  // namespace quern::cuda::delta
