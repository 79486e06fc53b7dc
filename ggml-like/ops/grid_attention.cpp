#include "ggml-like/ops/grid_attention.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// Queries that share each pass over the keys.
constexpr int64_t kTile = 16;

/// cos and sin of one patch's angles.
class GridRotation {
  public:
    GridRotation(const int32_t* place, int64_t head_dim, float theta) {
        const int64_t quarter = head_dim / 4;
        for (int64_t j = 0; j < head_dim / 2; ++j) {
            const double at = place[j < quarter ? 0 : 1];
            const double angle = at * std::pow(double{theta}, -4.0 * static_cast<double>(j % quarter) /
                                                                  static_cast<double>(head_dim));
            cosine_.push_back(static_cast<float>(std::cos(angle)));
            sine_.push_back(static_cast<float>(std::sin(angle)));
        }
    }
    void apply(float* row) const {
        const size_t half = cosine_.size();
        for (size_t j = 0; j < half; ++j) {
            const float a = row[j], b = row[j + half];
            row[j] = a * cosine_[j] - b * sine_[j];
            row[j + half] = b * cosine_[j] + a * sine_[j];
        }
    }

  private:
    std::vector<float> cosine_, sine_;
};

struct Frame {
    int64_t begin, rows, heads, width;  // width of a head
    float *q, *k, *v;                   // [heads, rows, width], k [heads, width, rows]
};

/// Rotated queries, scaled, and keys, these with their rows along the last axis; values.
void spread(const Node& node, const Frame& f, cpu::Context& context) {
    const Tensor &qkv = *node.inputs[0], &place = *node.inputs[1];
    const float theta = node.params<GridAttentionParams>().theta,
                scale = 1.0f / std::sqrt(static_cast<float>(f.width));
    const int64_t columns = f.heads * f.width;
    context.pool.parallel_for(f.rows, 8, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(3 * columns));
        for (int64_t t = begin; t < end; ++t) {
            load_floats(qkv, (f.begin + t) * 3 * columns, 3 * columns, row.data());
            const GridRotation rotation(place.row<int32_t>(f.begin + t), f.width, theta);
            for (int64_t h = 0; h < f.heads; ++h) {
                float *q = row.data() + h * f.width, *k = q + columns, *v = k + columns;
                rotation.apply(q);
                rotation.apply(k);
                for (int64_t i = 0; i < f.width; ++i) {
                    f.q[(h * f.rows + t) * f.width + i] = q[i] * scale;
                    f.k[(h * f.width + i) * f.rows + t] = k[i];
                }
                std::copy_n(v, f.width, f.v + (h * f.rows + t) * f.width);
            }
        }
    });
}

/// Some rows of one head: all scores, softmax, then the values, to the rows from `to_row` on.
void attend(const Frame& f, const cpu::DotKernels& dot, int64_t head, int64_t first, int64_t rows,
            const Tensor& y, int64_t to_row) {
    std::vector<float> scores(static_cast<size_t>(rows * f.rows)), out(static_cast<size_t>(rows * f.width));
    const float* from[kTile];
    float* to[kTile];
    for (int64_t t = 0; t < rows; ++t) {
        from[t] = f.q + (head * f.rows + first + t) * f.width;
        to[t] = scores.data() + t * f.rows;
    }
    dot.combine_rows(f.k + head * f.width * f.rows, f.rows, f.rows, from, f.width, to, rows);
    for (int64_t t = 0; t < rows; ++t) {
        dot.softmax(to[t], f.rows);
        from[t] = to[t];
        to[t] = out.data() + t * f.width;
    }
    dot.combine_rows(f.v + head * f.rows * f.width, f.width, f.width, from, f.rows, to, rows);
    for (int64_t t = 0; t < rows; ++t)
        store_floats(y, (to_row + t) * y.shape[1] + head * f.width, f.width, to[t]);
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &qkv = *node.inputs[0], &start = *node.inputs[2], &y = *node.outputs[0];
    const auto& p = node.params<GridAttentionParams>();
    const int64_t heads = p.heads, width = y.shape[1] / heads;
    const int32_t* border = start.as<int32_t>();
    const int64_t frames = start.shape[0] - 1;
    CHECK(border[0] == 0 && border[frames] == qkv.shape[0],
          "[grid_attention] {}: frames end at {} of {} rows", node.name, border[frames], qkv.shape[0]);
    for (int64_t k = 0; k < frames; ++k) {
        const int64_t rows = border[k + 1] - border[k], elements = rows * y.shape[1];
        CHECK(rows > 0, "[grid_attention] {}: frame {} is empty", node.name, k);
        const Frame f{border[k],
                      rows,
                      heads,
                      width,
                      context.buffer(0, elements),
                      context.buffer(1, elements),
                      context.buffer(2, elements)};
        spread(node, f, context);
        const int64_t asked = p.rows > 0 ? p.rows : rows, tiles = (asked + kTile - 1) / kTile;
        context.pool.parallel_for(heads * tiles, 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t first = i % tiles * kTile;
                attend(f, context.dot, i / tiles, p.first + first, std::min(kTile, asked - first), y,
                       f.begin + first);
            }
        });
    }
}

/// As if all rows were of one frame.
Cost cost(const Node& node) {
    const Tensor &qkv = *node.inputs[0], &y = *node.outputs[0];
    return {.activation_bytes = cpu::dense_bytes(qkv) + cpu::dense_bytes(y),
            .flops = 4.0 * static_cast<double>(qkv.shape[0]) * static_cast<double>(y.elements())};
}

}  // namespace

const Op kGridAttention{"grid_attention", run, cost};

int64_t grid_attention_work_bytes(const Tensor& qkv, int heads) {
    return qkv.dtype == DType::F32 ? 1 : dtype_bytes(qkv.dtype, 2 * qkv.shape[0] * heads * kGridHead);
}

Tensor* grid_attention(Graph& g, std::string_view name, Tensor* qkv, Tensor* place, Tensor* start,
                       const GridAttentionParams& params) {
    CHECK(qkv->rank == 2 && qkv->contiguous() && qkv->shape[1] % (3 * 4 * params.heads) == 0,
          "[grid_attention] {}: qkv is {} of {} heads", name, describe(*qkv), params.heads);
    CHECK(place->dtype == DType::I32 && place->rank == 2 && place->shape[0] == qkv->shape[0] &&
              place->shape[1] == 4,
          "[grid_attention] {}: place is {}", name, describe(*place));
    CHECK(start->dtype == DType::I32 && start->rank == 1 && start->shape[0] >= 2,
          "[grid_attention] {}: start is {}", name, describe(*start));
    CHECK(params.rows == 0 || (start->shape[0] == 2 && params.rows > 0 && params.first >= 0 &&
                               params.first + params.rows <= qkv->shape[0]),
          "[grid_attention] {}: rows {} to {} of {}", name, params.first, params.first + params.rows,
          describe(*qkv));
    Tensor* y =
        g.scratch(name, qkv->dtype, {params.rows > 0 ? params.rows : qkv->shape[0], qkv->shape[1] / 3});
    Tensor* work =
        g.scratch(fmt::format("{}.work", name), DType::U8, {grid_attention_work_bytes(*qkv, params.heads)});
    g.add({.op = &kGridAttention,
           .name = std::string(name),
           .inputs = {qkv, place, start},
           .outputs = {y, work},
           .parameters = params});
    return y;
}

}  // namespace quern
