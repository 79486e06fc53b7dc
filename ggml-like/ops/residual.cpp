#include "ggml-like/ops/residual.h"

#include "ggml-like/check.h"

namespace quern {
namespace {

/// Columns that one number of `squares` covers, if there are several (cuda/linear/epilogue.cuh has the same).
constexpr int64_t kAnswerColumns = 16, kPromptColumns = 8;

}  // namespace

Residual make_residual(Graph& g, const char* op, std::string_view name, int64_t tokens, int64_t width,
                       const NextNorm& next, bool in_parts) {
    CHECK(next.weight->rank == 1 && next.weight->dtype == DType::F32 && next.weight->shape[0] == width,
          "[{}] {}: the next norm {} should be F32 [{}]", op, name, describe(*next.weight), width);
    const bool prompt = next.kind == StepKind::prompt;
    const int64_t columns = !prompt ? kAnswerColumns : in_parts ? kPromptColumns : width;
    const int64_t parts = (width + columns - 1) / columns;
    return {.x = g.scratch(name, DType::F32, {tokens, width}),
            .h = g.scratch(fmt::format("{}.h", name), next.activation, {tokens, width}),
            .squares = g.scratch(fmt::format("{}.squares", name), DType::F32, {tokens, parts})};
}

/// I64 logits are added up by a GPU's blocks, so they begin at zero.
Tensor* make_router_logits(Graph& g, std::string_view name, int64_t tokens, const Weight& router,
                           const NextNorm& next) {
    const std::string own = fmt::format("{}.logits", name);
    const int64_t width = (router.rows + 7) / 8 * 8;
    if (next.kind == StepKind::answer && next.activation == DType::BF16)
        return g.zeros(own, DType::I64, {tokens, width});
    return g.scratch(own, DType::F32, {tokens, width});
}

void check_zeros(const char* op, std::string_view name, const Tensor* zeros, const Tensor& residual) {
    if (zeros == nullptr) return;
    CHECK(zeros->rank == 2 && zeros->dtype == DType::F32 && zeros->contiguous() &&
              zeros->shape[0] == residual.shape[0] && zeros->shape[1] == residual.shape[1],
          "[{}] {}: zeros {} should be like the residual {}", op, name, describe(*zeros), describe(residual));
}

void check_normed(const char* op, std::string_view name, const Residual& in, int64_t cols) {
    CHECK(in.h->rank == 2 && in.h->contiguous() && in.h->shape[1] == cols, "[{}] {}: h {} should be [T, {}]",
          op, name, describe(*in.h), cols);
    CHECK(in.squares->rank == 2 && in.squares->dtype == DType::F32 && in.squares->contiguous() &&
              in.squares->shape[0] == in.h->shape[0],
          "[{}] {}: squares {} do not fit h {}", op, name, describe(*in.squares), describe(*in.h));
}

}  // namespace quern
