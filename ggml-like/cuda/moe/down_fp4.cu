// moe_down with NVFP4 weights and up to 64 rows: the choice of the kernel.
//
//   rows of the step     kernel
//   1, answer            down_fp4_one.cu     a block a tile of 16 output rows, a warp a split of every term
//   2 to 8, answers      down_fp4_few.cu     a block a tile of 16 output rows, a warp two splits of the groups' terms
//   9 to 64, answers     down_fp4_terms.cu   the stream of fp4_stream.cuh writes terms; a second kernel adds them
//   up to 64, prompts    down_fp4_terms.cu   the stream writes terms as gemm.h makes them; ops/moe_down.cu adds them
//
// A term (one expert's result for one row) depends on its row alone, and a row's terms are added in the order of its
// choices. No atomics.
#include "ggml-like/cuda/moe/down_fp4.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

void down_fp4(Context& c, MixtureProduct product, const Down& a, const comm::Peers* peers) {
    if (product == MixtureProduct::one) return launch_down_one(c, a, peers);
    if (product == MixtureProduct::few) return launch_down_few(c, a, peers);
    Down arguments = a;
    if (!ready_is_flag(a.rows, a.used)) arguments.ready = nullptr;
    launch_down_stream(c, arguments, peers);
}

}  // namespace quern::cuda::moe
