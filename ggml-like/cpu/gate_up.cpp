#include "ggml-like/cpu/gate_up.h"

#include <algorithm>

#include "ggml-like/ops/row_math.h"

namespace quern::cpu {
namespace {

/// Columns [begin, end) of a pair's result.
struct Chunk {
    const GateUp* pair = nullptr;
    int64_t begin = 0, end = 0;
};

void run_chunk(const Chunk& chunk, const DotKernels& dot) {
    const GateUp& pair = *chunk.pair;
    const int64_t width = chunk.end - chunk.begin, tokens = pair.x.count(), up_rows = pair.weight->rows / 2;
    std::vector<float> products(static_cast<size_t>(2 * width * tokens));
    std::vector<float*> gate, up;
    for (int64_t i = 0; i < tokens; ++i) {
        gate.push_back(products.data() + 2 * i * width);
        up.push_back(gate.back() + width);
    }
    weight_rows(dot, *pair.weight, chunk.begin, chunk.end, pair.x, gate.data());
    weight_rows(dot, *pair.weight, up_rows + chunk.begin, up_rows + chunk.end, pair.x, up.data());
    for (int64_t i = 0; i < tokens; ++i) {
        float* g = gate[static_cast<size_t>(i)];
        const float factor = pair.factor[static_cast<size_t>(i)];
        for (int64_t f = 0; f < width; ++f)
            g[f] = silu(g[f] * factor) * (up[static_cast<size_t>(i)][f] * factor);
        store_floats(*pair.out, pair.to[static_cast<size_t>(i)] + chunk.begin, width, g);
    }
}

}  // namespace

void gate_up(const std::vector<GateUp>& pairs, Context& context) {
    std::vector<Chunk> chunks;
    for (const GateUp& pair : pairs) {
        const Weight& w = *pair.weight;
        const int64_t width = w.rows / 2;
        const int64_t step = rows_per_chunk(width, 2 * w.bytes() / std::max<int64_t>(w.rows, 1),
                                            2 * w.cols * pair.x.count(), context.pool.size());
        for (int64_t f = 0; f < width; f += step) chunks.push_back({&pair, f, std::min(f + step, width)});
    }
    context.pool.parallel_for(static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) run_chunk(chunks[static_cast<size_t>(i)], context.dot);
    });
}

}  // namespace quern::cpu
