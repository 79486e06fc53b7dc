// linear_add on the GPU: x' = residual + x W^T, h and squares of it (cuda/linear/epilogue.cuh), a router's logits.
//   answers: cuda/linear/dense_one.cuh, dense_rows.cuh, step_product.h: the same bits a row (the choice: cuda/variants.h).
//     Up to 8 rows a block that has whole columns to itself also does the router's work (cuda/moe/route_work.cuh); else a
//     kernel for the logits follows
//   prompts: the tiled product of cuda/linear/gemm.h, then a kernel for h and squares, then the logits' product
#include "ggml-like/ops/linear_add.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/linear/dense_rows.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/step_product.h"
#include "ggml-like/cuda/moe/route_logits.h"
#include "ggml-like/cuda/moe/route_work.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;
using namespace moe;

namespace {

/// x'[n][row] = residual[n][row] + sum, and h and squares of it. own: h of the block's tiles is kept for the router.
struct AddDeferred {
    static constexpr bool kPaired = false;
    struct Loaded {
        float residual, norm;
    };
    const float* residual;
    float* y;
    int64_t ld;
    int row_begin;  // of the part
    Defer defer;
    OwnRows* own;  // or null

    __device__ __forceinline__ Loaded load(int row, int n) const {
        return {__ldcg(residual + n * ld + row), defer.norm[row_begin + row]};
    }
    /// By 16 neighbouring lanes for the 16 rows of a tile.
    __device__ __forceinline__ void store(int row, int n, const Loaded& before, float sum) const {
        const float x = add_residual(before.residual, sum);
        y[n * ld + row] = x;
        const bf16 h = defer_column(defer, n, row_begin + row, x, before.norm);
        if (own == nullptr) return;
        const int tile = row / kTileRows;
        own->h[tile == static_cast<int>(blockIdx.x) ? 0 : 1][n][row % kTileRows] = h;
    }
};

/// What comes after a sum.
struct After {
    AddDeferred add;
    RouteWork work;
    int shared_bytes;  // of the product, before the router's tiles; 0: the block does nothing for a router

    /// Calls product(finish), all threads. routes: unless shared_bytes is 0; or always, of a router without tiles then,
    /// and what is in `own` is of no use.
    template <typename Product>
    __device__ __forceinline__ void run(int rows, bool routes, Product&& product) const {
        extern __shared__ __align__(128) uint8_t shared[];
        __shared__ OwnRows own;
        const RouterTiles router(work, shared + shared_bytes, routes);
        AddDeferred finish = add;
        finish.own = routes ? &own : nullptr;
        product(finish);
        if (!routes) return;
        __syncthreads();
        router.add(own, rows, add.defer.columns);
    }
};

template <Kind K>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_few(Part part, DenseLaunch dense, PlainRows<K> prologue, After after) {
    after.run(prologue.rows, after.shared_bytes > 0,
              [&](const auto& finish) { dense_rows<K>(part, dense, prologue, finish); });
}

/// Compiled for a router, which may have no tiles: with 48 registers instead of 56 three neighbours fit an SM, and one sequence
/// gets 2 % fewer tokens.
template <Kind K>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_one(Part part, OneShape<K, false, Extent::few, false> shape, PlainRows<K, 1> prologue,
                   After after) {
    after.run(1, true, [&](const auto& finish) {
        shape.whole ? dense_one<true>(part, shape, prologue, finish)
                    : dense_one<false>(part, shape, prologue, finish);
    });
}

struct Arguments {
    const Packed& w;
    const Part& part;
    const Tensor &x, &residual, &y;
    const Defer& defer;
    const RouteWork* route;  // null: the product's blocks do nothing for a router

    int rows() const { return static_cast<int>(x.shape[0]); }
    int beside() const { return route != nullptr ? RouterTiles::bytes(*route) : 0; }
    AnswerShape shape() const {
        return {
            .kind = part.kind, .rows = rows(), .tiles = part.tiles, .chunks = w.chunks, .beside = beside()};
    }
    /// shared_bytes: of the product; becomes all.
    After after(int& shared_bytes) const {
        After after{{residual.as<float>() + part.row_begin, y.as<float>() + part.row_begin, y.stride[0],
                     part.row_begin, defer, nullptr},
                    {},
                    0};
        if (route != nullptr) after.work = *route, after.shared_bytes = shared_bytes;
        shared_bytes += beside();
        return after;
    }
};

template <Kind K>
void one(Context& c, const Arguments& a) {
    const OneLaunch one(c, K, a.part.tiles, a.w.chunks);
    const PlainRows<K, 1> prologue{a.x.as<bf16>(), 0, a.w.cols, 1};
    int bytes = one.bytes(K, false, Extent::few);
    const After after = a.after(bytes);
    const bool routes = a.route != nullptr;
    launch(c, routes ? "linear_add one with router" : "linear_add one", linear_add_one<K>, one.grid, kThreads,
           bytes, a.part, OneShape<K, false, Extent::few, false>(one), prologue, after);
}

template <Kind K>
void few(Context& c, const Arguments& a) {
    const int rows = a.rows(), chunks = a.w.chunks;
    const PlainRows<K> prologue{a.x.as<bf16>(), a.x.stride[0], a.w.cols, rows};
    int bytes = dense_shared_bytes(K, dense_is_deep(c), rows, chunks);
    const After after = a.after(bytes);
    launch(c, a.route != nullptr ? "linear_add few with router" : "linear_add few", linear_add_few<K>,
           min(c.sms, dense_groups(K, a.part.tiles, chunks)), kThreads, bytes, a.part,
           DenseLaunch{chunks, rows}, prologue, after);
}

template <Kind K>
void product(Context& c, const Arguments& a, AnswerProduct chosen) {
    chosen == AnswerProduct::one ? one<K>(c, a) : few<K>(c, a);
}

/// Whether the product's blocks do the router's work.
bool routes_in_product(const Context& c, const Packed& w, const Packed& router, int rows) {
    if (w.parts != 1 || router.parts != 1 || router.part[0].kind != Kind::bf16) return false;
    const Part& part = w.part[0];
    return product_routes(c, {.kind = part.kind, .rows = rows, .tiles = part.tiles, .chunks = w.chunks},
                          router.part[0].tiles);
}

void add_prompt(const Node& node, Context& c, const Packed& w, const Defer& defer) {
    const Tensor &x = *node.inputs[0], &residual = *node.inputs[1], &y = *node.outputs[0];
    const auto& p = node.params<LinearAddParams>();
    const int rows = static_cast<int>(x.shape[0]);
    gemm(c, w, x.data, x.stride[0], rows,
         {.y = y.data,
          .ld = y.stride[0],
          .f32 = true,
          .residual = residual.as<float>(),
          .residual_ld = residual.stride[0]},
         Split::by_matrix);
    defer_rows(c, y.as<float>(), defer, rows);
    if (p.router == nullptr) return;
    const Packed& router = *static_cast<const Packed*>(p.router->placed);
    const Tensor& logits = *node.outputs[3];
    gemm(c, router, defer.h, defer.columns, rows, {.y = logits.data, .ld = logits.stride[0], .f32 = true},
         Split::by_matrix);
}

}  // namespace

void linear_add(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &residual = *node.inputs[1], &y = *node.outputs[0];
    const auto& p = node.params<LinearAddParams>();
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const int rows = static_cast<int>(x.shape[0]);
    const Defer defer = defer_of(*node.inputs[2], *node.outputs[1], *node.outputs[2]);
    if (p.kind == StepKind::prompt) return add_prompt(node, c, w, defer);
    RouteWork route{};
    bool routes = false;
    if (p.router != nullptr) {
        const Packed& router = *static_cast<const Packed*>(p.router->placed);
        const Tensor& logits = *node.outputs[3];
        route = {router.part[0], router.chunks, router.rows, logits.as<int64_t>(),
                 static_cast<int>(logits.stride[0])};
        routes = routes_in_product(c, w, router, rows);
    }
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        const Arguments a{w, part, x, residual, y, defer, routes ? &route : nullptr};
        const AnswerProduct chosen = choose(c, a.shape());
        if (takes_step_product(chosen))
            step_product(c, chosen, part, w, {x.as<bf16>(), x.stride[0], rows},
                         {.y = y.as<float>() + part.row_begin,
                          .ld = y.stride[0],
                          .f32 = true,
                          .residual = residual.as<float>() + part.row_begin,
                          .row_begin = part.row_begin,
                          .defer = defer});
        else if (part.kind == Kind::bf16)
            product<Kind::bf16>(c, a, chosen);
        else if (part.kind == Kind::fp8)
            product<Kind::fp8>(c, a, chosen);
        else
            product<Kind::nvfp4>(c, a, chosen);
    }
    if (p.router != nullptr && !routes)
        route_logits(c, *static_cast<const Packed*>(p.router->placed), defer.h, rows, route.sums,
                     route.pitch);
}

}  // namespace quern::cuda
