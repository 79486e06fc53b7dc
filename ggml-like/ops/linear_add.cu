// linear_add on the GPU: x' = residual + x W^T, h and squares of it (cuda/linear/epilogue.cuh), a router's logits.
//   answers: cuda/linear/dense_one.cuh, dense_rows.cuh, step_product.h: the same bits a row (the choice: cuda/variants.h).
//     Up to 8 rows a block that has whole columns to itself also does the router's work (cuda/moe/route_work.cuh); else a
//     kernel for the logits follows. Over ranks the product's blocks add up (cuda/comm/tile_sums.cuh), or a kernel after it does
//   prompts: the tiled product of cuda/linear/gemm.h, which also makes h and squares if a router reads them and the sum is not over
//     ranks, else a kernel does; then the logits' product
#include "ggml-like/ops/linear_add.h"

#include "ggml-like/cuda/comm/tile_sums.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_one.cuh"
#include "ggml-like/cuda/linear/dense_rows.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/step_product.h"
#include "ggml-like/cuda/moe/route_logits.h"
#include "ggml-like/cuda/moe/route_work.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/parts_of_ranks.h"

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

    __device__ __forceinline__ void early(Loaded& before, int row, int) const {
        before.norm = defer.norm[row_begin + row];
    }
    __device__ __forceinline__ void load(Loaded& before, int row, int n) const {
        before.residual = __ldcg(residual + n * ld + row);
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

/// The same of the sum over ranks.
struct AddOverRanks {
    static constexpr bool kPaired = false;
    struct Loaded {
        AddDeferred::Loaded before;
        comm::LinePart line;
    };
    const AddDeferred& add;
    comm::TileSums sums;

    __device__ __forceinline__ void early(Loaded& loaded, int row, int n) const {
        add.early(loaded.before, row, n);
    }
    __device__ __forceinline__ void load(Loaded& loaded, int row, int n) const {
        add.load(loaded.before, row, n);
        loaded.line = sums.part(row / kTileRows, n, row % kTileRows);
    }
    __device__ __forceinline__ void store(int row, int n, const Loaded& loaded, float sum) const {
        add.store(row, n, loaded.before, sums.sum(loaded.line, sum));
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
    linear_add_few(Part part, DenseLaunch dense, RowsOfX x, After after) {
    after.run(x.rows, after.shared_bytes > 0,
              [&](const auto& finish) { dense_rows<K>(part, dense, FewRows<K>(x), finish); });
}

/// Compiled for a router, which may have no tiles: with 48 registers instead of 56 three neighbours fit an SM, and one sequence
/// gets 2 % fewer tokens.
template <Kind K>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_one(Part part, OneShape<K, false, Extent::few, false> shape, RowOfX x, After after) {
    after.run(1, true, [&](const auto& finish) {
        shape.whole ? dense_one<true>(part, shape, SingleRow<K>(x), finish)
                    : dense_one<false>(part, shape, SingleRow<K>(x), finish);
    });
}

/// Over ranks.
template <Kind K>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_few_of_ranks(const __grid_constant__ comm::Peers peers, Part part, DenseLaunch dense,
                            RowsOfX x, After after) {
    after.run(x.rows, after.shared_bytes > 0, [&](const AddDeferred& add) {
        dense_rows<K>(part, dense, FewRows<K>(x), AddOverRanks{add, comm::TileSums(peers)});
    });
}

template <Kind K>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_one_of_ranks(const __grid_constant__ comm::Peers peers, Part part,
                            OneShape<K, false, Extent::few, false> shape, RowOfX x, After after) {
    after.run(1, true, [&](const AddDeferred& add) {
        const AddOverRanks finish{add, comm::TileSums(peers)};
        shape.whole ? dense_one<true>(part, shape, SingleRow<K>(x), finish)
                    : dense_one<false>(part, shape, SingleRow<K>(x), finish);
    });
}

struct Arguments {
    const Packed& w;
    const Part& part;
    const Tensor &x, &residual, &y;
    const Defer& defer;
    const RouteWork* route;    // null: the product's blocks do nothing for a router
    const comm::Peers* peers;  // null: the sum is not over ranks

    int rows() const { return static_cast<int>(x.shape[0]); }
    ReadOnce weights() const { return {part.data, weight_bytes(part, w.chunks)}; }
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
    const OneShape<K, false, Extent::few, false> shape(one);
    const RowOfX x{a.x.as<bf16>(), a.w.cols};
    int bytes = one.bytes(K, false, Extent::few);
    const After after = a.after(bytes);
    const bool routes = a.route != nullptr;
    if constexpr (K != Kind::fp8)
        if (a.peers != nullptr)
            return launch(c, routes ? "linear_add one of ranks with router" : "linear_add one of ranks",
                          linear_add_one_of_ranks<K>, one.grid, kThreads, bytes, *a.peers, a.part, shape, x,
                          after);
    launch(c, routes ? "linear_add one with router" : "linear_add one", linear_add_one<K>, one.grid, kThreads,
           bytes, a.part, shape, x, after);
}

template <Kind K>
void few(Context& c, const Arguments& a) {
    const int rows = a.rows(), chunks = a.w.chunks;
    const RowsOfX x{a.x.as<bf16>(), a.x.stride[0], a.w.cols, rows};
    int bytes = dense_shared_bytes(K, dense_is_deep(c), rows, chunks);
    const After after = a.after(bytes);
    const bool routes = a.route != nullptr;
    const unsigned grid = min(c.sms, dense_groups(K, a.part.tiles, chunks));
    const DenseLaunch dense{chunks, rows};
    if constexpr (K != Kind::fp8)
        if (a.peers != nullptr)
            return launch_reading(
                c, a.weights(), routes ? "linear_add few of ranks with router" : "linear_add few of ranks",
                linear_add_few_of_ranks<K>, grid, kThreads, bytes, *a.peers, a.part, dense, x, after);
    launch_reading(c, a.weights(), routes ? "linear_add few with router" : "linear_add few",
                   linear_add_few<K>, grid, kThreads, bytes, a.part, dense, x, after);
}

template <Kind K>
void product(Context& c, const Arguments& a, AnswerProduct chosen) {
    chosen == AnswerProduct::one ? one<K>(c, a) : few<K>(c, a);
}

AnswerShape shape_of(const Packed& w, int rows) {
    return {.kind = w.part[0].kind, .rows = rows, .tiles = w.part[0].tiles, .chunks = w.chunks};
}
/// Whether the product's blocks do the router's work.
bool routes_in_product(const Context& c, const Packed& w, const Packed& router, int rows) {
    if (w.parts != 1 || router.parts != 1 || router.part[0].kind != Kind::bf16) return false;
    return product_routes(c, shape_of(w, rows), router.part[0].tiles);
}
/// Whether they add up over ranks. route: whose work they do, or null.
bool sums_in_product(const Context& c, const Packed& w, int rows, const RouteWork* route) {
    if (w.parts != 1) return false;
    AnswerShape shape = shape_of(w, rows);
    shape.beside = route != nullptr ? RouterTiles::bytes(*route) : 0;
    return product_sums(c, shape);
}

void add_prompt(const Node& node, Context& c, const Packed& w, const Defer& defer) {
    const Tensor &x = *node.inputs[0], &residual = *node.inputs[1], &y = *node.outputs[0];
    const auto& p = node.params<LinearAddParams>();
    const int rows = static_cast<int>(x.shape[0]);
    const bool in_product = squares_in_parts(p);
    if (p.sums != Sums::none && c.peers != nullptr) {
        gemm(c, w, x.data, x.stride[0], rows, {.y = defer.h, .ld = defer.columns}, Split::by_matrix);
        add_parts_of_prompt(c, residual.as<float>(), y.as<float>(), defer, y.elements(),
                            p.sums == Sums::whole);
    } else {
        gemm(c, w, x.data, x.stride[0], rows,
             {.y = y.data,
              .ld = y.stride[0],
              .f32 = true,
              .residual = residual.as<float>(),
              .residual_ld = residual.stride[0],
              .defer = in_product ? defer : Defer{}},
             Split::by_matrix);
        if (!in_product) defer_rows(c, y.as<float>(), defer, rows);
    }
    if (p.router == nullptr) return;
    const Packed& router = *static_cast<const Packed*>(p.router->placed);
    const Tensor& logits = *node.outputs[3];
    gemm(c, router, defer.h, defer.columns, rows, {.y = logits.data, .ld = logits.stride[0], .f32 = true},
         Split::by_matrix);
}

void add_answer(const Node& node, Context& c, const Packed& w, const Defer& defer) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const auto& p = node.params<LinearAddParams>();
    const int rows = static_cast<int>(x.shape[0]);
    RouteWork route{};
    bool routes = false;
    if (p.router != nullptr) {
        const Packed& router = *static_cast<const Packed*>(p.router->placed);
        const Tensor& logits = *node.outputs[3];
        route = {router.part[0], router.chunks, router.rows, logits.as<int64_t>(),
                 static_cast<int>(logits.stride[0])};
        routes = routes_in_product(c, w, router, rows);
    }
    const bool over_ranks = p.sums != Sums::none && c.peers != nullptr,
               sums = over_ranks && sums_in_product(c, w, rows, routes ? &route : nullptr);
    // A sum that follows is of this rank's part without the residual.
    const bool sum_follows = over_ranks && !sums;
    const Tensor& residual = *node.inputs[sum_follows ? 3 : 1];
    routes = routes && !sum_follows;
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        const Arguments a{
            w, part, x, residual, y, defer, routes ? &route : nullptr, sums ? c.peers : nullptr};
        const AnswerProduct chosen = choose(c, a.shape());
        if (takes_step_product(chosen))
            step_product(c, chosen, part, w, {x.as<bf16>(), x.stride[0], rows},
                         {.y = y.as<float>() + part.row_begin,
                          .ld = y.stride[0],
                          .f32 = true,
                          .residual = residual.as<float>() + part.row_begin,
                          .row_begin = part.row_begin,
                          .defer = defer},
                         a.peers);
        else if (part.kind == Kind::bf16)
            product<Kind::bf16>(c, a, chosen);
        else if (part.kind == Kind::fp8)
            product<Kind::fp8>(c, a, chosen);
        else
            product<Kind::nvfp4>(c, a, chosen);
    }
    if (sum_follows)
        add_parts_of_answer(c, y.as<float>(), node.inputs[1]->as<float>(), y.as<float>(), defer,
                            y.elements());
    if (p.router != nullptr && !routes)
        route_logits(c, *static_cast<const Packed*>(p.router->placed), defer.h, rows, route.sums,
                     route.pitch);
}

}  // namespace

void linear_add(const Node& node, Context& c) {
    const auto& p = node.params<LinearAddParams>();
    const Packed& w = *static_cast<const Packed*>(p.weight->placed);
    const Defer defer = defer_of(*node.inputs[2], *node.outputs[1], *node.outputs[2]);
    p.kind == StepKind::prompt ? add_prompt(node, c, w, defer) : add_answer(node, c, w, defer);
}

}  // namespace quern::cuda
