// draft_token: the tokens of norm_linear and best_token, whatever kernel makes them.
#include "ggml-like/ops/draft_token.h"

#include <set>

#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;

/// Ids by the two ops and by draft_token, from rows of random numbers.
StepOutputs run_both(const Device& device, const Weight& head, const TokenColumns& columns, int64_t rows) {
    const int64_t width = head.cols;
    Graph g;
    const Residual in{.h = g.input("h", device.activation, {rows, width}),
                      .squares = g.input("squares", DType::F32, {rows, (width + 15) / 16})};
    Tensor* logits = norm_linear(g, "logits", in, head, kEps, StepKind::answer, DType::F32);
    Tensor *two = g.scratch("two", DType::I32, {rows}), *one = g.scratch("one", DType::I32, {rows});
    best_token(g, "best", logits, columns, two);
    draft_token(g, "draft", in, head, columns, kEps, StepKind::answer, one);
    g.output(two);
    g.output(one);
    return run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, in.h, Random(8).normals(rows * width));
        std::vector<float> squares = Random(9).normals(rows * ((width + 15) / 16));
        for (float& s : squares) s *= s;
        set_input(p, in.squares, squares);
    });
}

void check_head(Device& device, Form form, int64_t tokens, int64_t width) {
    CAPTURE(shape_name({form}, {tokens}, width));
    WeightStore store(5);
    const Matrix m = random_matrix(store, {form}, {tokens}, width);
    const Weight head = placed(device, m.weight);
    // Some columns are of late tokens, of which some are beyond the vocabulary.
    const TokenColumns columns{.first = 32, .start = 4 * tokens, .vocab = 4 * tokens + 20};
    for (const int64_t rows : {1, 2, 7, 9}) {
        CAPTURE(rows);
        const StepOutputs ids = run_both(device, head, columns, rows);
        CHECK(ids[0] == ids[1]);
        if (rows == 9) CHECK(std::set(ids[0].begin(), ids[0].end()).size() > 4);
    }
}

void draft_tokens(Device& device) {
    for (const Form form : kForms)
        for (const int64_t width : {144, 2048}) check_head(device, form, 300, width);
    if (device.activation == DType::BF16) check_head(device, Form::nvfp4, 18'016, 2048);  // a GPU
}

}  // namespace

DEVICE_TEST_CASE("draft_token chooses what best_token does of norm_linear's logits", draft_tokens)
