#include "ggml-like/ops/best_token.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

int32_t best_of(const float* logits, int64_t count, const TokenColumns& columns) {
    int64_t best = -1;
    for (int64_t c = 0; c < count; ++c) {
        if (logits[c] != logits[c] || columns.token(c) >= columns.vocab) continue;
        if (best < 0 || logits[c] > logits[best]) best = c;
    }
    return static_cast<int32_t>(best < 0 ? 0 : columns.token(best));
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &logits = *node.inputs[0], &ids = *node.outputs[0];
    context.pool.parallel_for(logits.shape[0], 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row)
            ids.as<int32_t>()[row] =
                best_of(logits.row<float>(row), logits.shape[1], node.params<TokenColumns>());
    });
}

Cost cost(const Node& node) { return {.activation_bytes = cpu::dense_bytes(*node.inputs[0])}; }

}  // namespace

const Op kBestToken{"best_token", run, cost};

void check_best(const char* op, std::string_view name, const TokenColumns& columns, int64_t count,
                const Tensor* ids, int64_t rows) {
    CHECK(columns.first <= count, "[{}] {}: the first {} of {} columns", op, name, columns.first, count);
    CHECK(ids->dtype == DType::I32 && ids->rank == 1 && ids->shape[0] == rows, "[{}] {}: ids {} of {} rows",
          op, name, describe(*ids), rows);
}

Tensor* best_token_work(Graph& g, std::string_view name, int64_t rows) {
    return g.scratch(fmt::format("{}.work", name), DType::I64, {rows, kBestBlocks});
}

void best_token(Graph& g, std::string_view name, Tensor* logits, const TokenColumns& columns, Tensor* ids) {
    CHECK(logits->rank == 2 && logits->dtype == DType::F32, "[best_token] {}: logits are {}", name,
          describe(*logits));
    check_best("best_token", name, columns, logits->shape[1], ids, logits->shape[0]);
    g.add({.op = &kBestToken,
           .name = std::string(name),
           .inputs = {logits},
           .outputs = {ids, best_token_work(g, name, logits->shape[0])},
           .parameters = columns});
}

}  // namespace quern
