// linear_add on the GPU: one row and few rows stream the weight (cuda/dense_one.cuh, cuda/dense_rows.cuh),
// many rows use the tiled product of cuda/gemm.h; all add the residual at the store. Up to 8 rows before a
// mixture of experts also do the work of its router (cuda/route_work.cuh).
#include "ggml-like/ops/linear_add.h"

#include "ggml-like/cuda/dense_one.cuh"
#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"
#include "ggml-like/cuda/route_work.cuh"

namespace quern::cuda {
namespace {

/// What comes after a sum: the residual; kRoutes: also the router that follows.
template <bool kRoutes>
struct After {
    AddResidual add;
    RouteWork work;
    int shared_bytes = 0;  // of the product

    /// Calls product(finish), all threads.
    template <typename Product>
    __device__ __forceinline__ void run(int rows, Product&& product) const {
        if constexpr (kRoutes) {
            extern __shared__ __align__(128) uint8_t shared[];
            __shared__ OwnRows own;
            const RouterTiles router(work, shared + shared_bytes);
            product(AddForRoute{add, work, own});
            __syncthreads();
            router.add(own, rows);
        } else {
            product(add);
        }
    }
};

template <Kind K, int NT, bool kDeep, bool kOne, bool kRoutes>
__global__ void __launch_bounds__(kThreads, 3 - NT)
    linear_add_few(Part part, int chunks, PlainRows<K, kOne ? 1 : 8> prologue, After<kRoutes> after) {
    after.run(prologue.rows, [&](const auto& finish) {
        dense_rows<K, NT, kDeep, kOne, false>(part, chunks, prologue.rows, prologue, finish);
    });
}

template <Kind K, bool kRoutes>
__global__ void __launch_bounds__(kThreads, 2)
    linear_add_one(Part part, OneShape<K, false> shape, PlainRows<K, 1> prologue, After<kRoutes> after) {
    after.run(1, [&](const auto& finish) { dense_one(part, shape, prologue, finish); });
}

struct Arguments {
    const Packed& w;
    const Part& part;
    const Tensor &x, &residual, &y;
    const RouteWork* route;  // null: no router follows, or one that does its work itself

    /// `c` with what its memory leaves to the product.
    Context room(Context c) const {
        if (route != nullptr) c.shared_bytes -= RouterTiles::bytes(*route);
        return c;
    }
    /// From row `row` on. shared_bytes: of the product; becomes all.
    template <bool kRoutes>
    After<kRoutes> after(int row, int& shared_bytes) const {
        After<kRoutes> after{{residual.as<float>() + row * residual.stride[0] + part.row_begin,
                              y.as<float>() + row * y.stride[0] + part.row_begin, y.stride[0]},
                             {}};
        if (kRoutes) {
            after.work = *route;
            after.work.x = route->x.from_row(row);
            after.shared_bytes = shared_bytes;
            shared_bytes += RouterTiles::bytes(*route);
        }
        return after;
    }
};

template <Kind K, bool kRoutes>
void one(Context& c, const Arguments& a) {
    const OneShape<K, false> shape(c, a.part, a.w.chunks);
    const PlainRows<K, 1> prologue{a.x.as<bf16>(), 0, a.w.cols, 1};
    int bytes = shape.bytes();
    const auto after = a.after<kRoutes>(0, bytes);
    launch(c, "linear_add", linear_add_one<K, kRoutes>, shape.grid, kThreads, bytes, a.part, shape, prologue,
           after);
}

template <Kind K, bool kRoutes>
void few(Context& c, const Arguments& a) {
    const int rows = static_cast<int>(a.x.shape[0]), chunks = a.w.chunks;
    const Context room = a.room(c);
    if (rows == 1 && dense_one_fits<K, false>(room, a.part, chunks)) return one<K, kRoutes>(c, a);
    const int grid = min(c.sms, dense_groups<K>(a.part.tiles, chunks));
    for (int first = 0, n = 0; first < rows; first += n) {
        n = dense_rows_at_once<K>(room, rows - first, chunks);
        dense_shape<K>(room, n, chunks, [&]<int NT, bool kDeep>() {
            const auto run = [&]<bool kOne>() {
                constexpr bool kRouted = kRoutes && NT == 1;
                const PlainRows<K, kOne ? 1 : 8> prologue{a.x.as<bf16>() + first * a.x.stride[0],
                                                          a.x.stride[0], a.w.cols, n};
                int bytes = dense_shared_bytes<K, NT, kDeep>(n, chunks);
                const auto after = a.after<kRouted>(first, bytes);
                launch(c, "linear_add", linear_add_few<K, NT, kDeep, kOne, kRouted>, grid, kThreads, bytes,
                       a.part, chunks, prologue, after);
            };
            if (NT == 1 && n == 1)
                run.template operator()<NT == 1>();
            else
                run.template operator()<false>();
        });
    }
}

template <Kind K>
void product(Context& c, const Arguments& a) {
    a.route != nullptr ? few<K, true>(c, a) : few<K, false>(c, a);
}

/// Whether blocks have tiles as route_work.cuh wants them: alone, few, and with room beside them.
bool has_route_tiles(Context c, const Packed& w) {
    c.shared_bytes -= kOwnTiles * kWarps * 512;
    if (!dense_takes(c, w, kDownFewRows)) return false;
    if (w.parts != 1) return false;
    const Kind kind = w.part[0].kind;
    const int pieces = kind == Kind::bf16  ? pieces_for<Kind::bf16>(w.chunks)
                       : kind == Kind::fp8 ? pieces_for<Kind::fp8>(w.chunks)
                                           : pieces_for<Kind::nvfp4>(w.chunks);
    return warps_per_tile(pieces) == kWarps && w.part[0].tiles <= kOwnTiles * c.sms;
}

}  // namespace

void linear_add(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &residual = *node.inputs[1];
    Tensor& y = *node.outputs[0];
    const Packed& w = *static_cast<const Packed*>(node.params<LinearAddParams>().weight->placed);
    const int rows = static_cast<int>(x.shape[0]);
    if (!dense_takes(c, w, rows))
        return gemm(c, w, x.data, x.stride[0], rows,
                    {y.data, y.stride[0], true, residual.as<float>(), residual.stride[0]});
    RouteWork route;
    const bool routes = has_route_tiles(c, w) && leave_route(c, y, route);
    for (int i = 0; i < w.parts; ++i) {
        const Part& part = w.part[i];
        const Arguments a{w, part, x, residual, y, routes ? &route : nullptr};
        if (part.kind == Kind::bf16) product<Kind::bf16>(c, a);
        if (part.kind == Kind::fp8) product<Kind::fp8>(c, a);
        if (part.kind == Kind::nvfp4) product<Kind::nvfp4>(c, a);
    }
}

}  // namespace quern::cuda
