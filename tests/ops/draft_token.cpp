// draft_token: the tokens of norm_linear and best_token, whatever kernel makes them.
#include "ggml-like/ops/draft_token.h"

#include <cmath>
#include <limits>
#include <set>

#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;

/// What the rows are: random numbers, as the device rounds them.
std::vector<float> hidden(const Device& device, int64_t rows, int64_t width) {
    return device.rounded(Random(8).normals(rows * width));
}

/// Ids by draft_token and by the two ops that it stands for.
StepOutputs run_both(const Device& device, const Weight& head, const TokenColumns& columns, int64_t rows,
                     const std::vector<float>& h) {
    const int64_t width = head.cols, parts = (width + 15) / 16;
    Graph g;
    const Residual in{.h = g.input("h", device.activation, {rows, width}),
                      .squares = g.input("squares", DType::F32, {rows, parts})};
    Tensor* logits = norm_linear(g, "logits", in, head, kEps, StepKind::answer, DType::F32);
    Tensor *one = g.scratch("one", DType::I32, {rows}), *two = g.scratch("two", DType::I32, {rows});
    draft_token(g, "draft", in, head, columns, kEps, StepKind::answer, one);
    best_token(g, "best", logits, columns, two);
    g.output(one);
    g.output(two);
    return run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, in.h, h);
        set_input(p, in.squares, std::vector<float>(static_cast<size_t>(rows * parts), 1.0f));
    });
}

/// Whether no column that may win has a product in double that is higher than that of `token`, but for rounding.
bool is_best(const Matrix& m, int64_t width, const TokenColumns& columns, const float* h, double token) {
    double highest = -1e30, own = -1e30, size = 0;
    for (int64_t c = 0; c < static_cast<int64_t>(m.values.size()) / width; ++c) {
        if (columns.token(c) >= columns.vocab) continue;
        double sum = 0;
        for (int64_t i = 0; i < width; ++i)
            sum += double{m.values[static_cast<size_t>(c * width + i)]} * double{h[i]};
        highest = std::max(highest, sum), size = std::max(size, std::fabs(sum));
        if (static_cast<double>(columns.token(c)) == token) own = sum;
    }
    return own >= highest - 1e-4 * size;
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
        const std::vector<float> h = hidden(device, rows, width);
        const StepOutputs ids = run_both(device, head, columns, rows, h);
        CHECK(ids[0] == ids[1]);
        for (int64_t r = 0; r < std::min<int64_t>(rows, 2); ++r)
            CHECK(is_best(m, width, columns, h.data() + r * width, ids[0][static_cast<size_t>(r)]));
        if (rows == 9) CHECK(std::set(ids[0].begin(), ids[0].end()).size() > 4);
    }
}

/// Each row of the head twice; no logit is a number; no token may win.
void check_special(Device& device, int64_t tokens, int64_t width) {
    WeightStore store(6);
    const Matrix m = random_matrix(store, {Form::nvfp4}, {tokens}, width);
    const Weight head = placed(device, Weight("twice", {m.weight.segments[0], m.weight.segments[0]}));
    const std::vector<float> h = hidden(device, 1, width);
    const StepOutputs ids = run_both(device, head, {0, 0, 2 * tokens}, 1, h);
    CHECK(ids[0][0] < static_cast<double>(tokens));
    CHECK(ids[0] == ids[1]);
    const StepOutputs late = run_both(device, head, {tokens, tokens, 2 * tokens}, 1, h);
    CHECK(late[0][0] == ids[0][0] + static_cast<double>(tokens));
    const std::vector<float> nan(static_cast<size_t>(width), std::numeric_limits<float>::quiet_NaN());
    CHECK(run_both(device, head, {0, 0, 2 * tokens}, 1, nan)[0] == std::vector<double>{0});
    CHECK(run_both(device, head, {0, 0, 0}, 1, h)[0] == std::vector<double>{0});
}

void draft_tokens(Device& device) {
    for (const Form form : kForms)
        for (const int64_t width : {144, 2048}) check_head(device, form, 300, width);
    check_special(device, 160, 2048);
    if (device.activation != DType::BF16) return;
    // On a GPU: what one kernel does.
    check_head(device, Form::nvfp4, 18'016, 2048);
    check_special(device, 9'008, 2048);
}

}  // namespace

DEVICE_TEST_CASE("draft_token chooses what best_token does of norm_linear's logits", draft_tokens)
