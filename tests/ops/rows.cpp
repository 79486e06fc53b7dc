// embed and gather_rows.
#include "ggml-like/error.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/gather_rows.h"
#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

/// x, h and squares.
StepOutputs run_embed(const Device& device, StepKind kind, const Weight& table, const Norm& norm,
                      const std::vector<int32_t>& ids) {
    Graph g;
    Tensor* t = g.input("ids", DType::I32, {static_cast<int64_t>(ids.size())});
    const Residual e = embed(g, "e", table, t, norm.next(g, device, kind));
    for (Tensor* out : {e.x, e.h, e.squares}) g.output(out);
    return run_graph(device, std::move(g),
                     [&](Plan& p) { std::copy(ids.begin(), ids.end(), p.input<int32_t>(t)); });
}

void check_embed(const Device& device, StepKind kind, Form form, int64_t width) {
    CAPTURE(kind_name(kind));
    CAPTURE(shape_name({form}, {37}, width));
    WeightStore store(3);
    const Matrix m = random_matrix(store, {form}, {37}, width);
    const Weight table = placed(device, m.weight);
    const Norm norm(device, 4, width);
    const auto ids = [](const std::vector<int64_t>& rows) {
        std::vector<int32_t> all;
        for (const int64_t r : rows) all.push_back(static_cast<int32_t>((36 * (r + 1)) % 37));
        return all;
    };
    AloneRows alone({"x", "h", "squares"},
                    [&](const auto& rows) { return run_embed(device, kind, table, norm, ids(rows)); });
    for (const int64_t n : row_counts(device, kind)) {
        CAPTURE(n);
        const std::vector<int32_t> chosen = ids(step_rows(n));
        const StepOutputs out = alone.run(step_rows(n));
        for (int64_t t = 0; t < n; ++t) {
            CAPTURE(t);
            Expected e{width};
            for (int64_t c = 0; c < width; ++c) {
                const double v = m.values[static_cast<size_t>(chosen[static_cast<size_t>(t)] * width + c)];
                e.add(c, v, 1e-6 * std::fabs(v));
            }
            check_row(device, "x", out[0].data() + t * width, e);
        }
        check_deferred(device, kind, norm, n, out[0], out[1], out[2]);
        alone.check(n, out);
    }
}

void embed_forms(Device& device) {
    for (const StepKind kind : kKinds)
        for (const Form form : kForms)
            for (const int64_t width : {32, 144}) check_embed(device, kind, form, width);
    check_embed(device, StepKind::answer, Form::bf16, 5120);
    check_embed(device, StepKind::prompt, Form::bf16, 2048);
}

/// Rows 2 and `row` of three, h in the device's activation.
StepOutputs run_gather(const Device& device, int64_t width, int64_t parts, int32_t row) {
    Graph g;
    const Residual in{.h = g.input("h", device.activation, {3, width}),
                      .squares = g.input("s", DType::F32, {3, parts})};
    Tensor* rows = g.input("rows", DType::I32, {2});
    const Residual y = gather_rows(g, "y", in, rows);
    CHECK(y.x == nullptr);
    g.output(y.h);
    g.output(y.squares);
    return run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, in.h, Random(1).normals(3 * width));
        set_input(p, in.squares, Random(2).normals(3 * parts));
        p.input<int32_t>(rows)[0] = 2;
        p.input<int32_t>(rows)[1] = row;
    });
}

void gather_bits(Device& device) {
    for (const auto& [width, parts] : {std::pair{16, 1}, {144, 9}, {2048, 128}, {2048, 1}, {5120, 320}}) {
        const auto& this_width = width;
        CAPTURE(this_width);
        const auto& this_parts = parts;
        CAPTURE(this_parts);
        const auto pick = [](const std::vector<float>& v, int64_t each) {
            std::vector<double> two(v.begin() + 2 * each, v.end());
            two.insert(two.end(), v.begin(), v.begin() + each);
            return two;
        };
        const StepOutputs got = run_gather(device, width, parts, 0);
        CHECK(got[0] == pick(device.rounded(Random(1).normals(3 * width)), width));
        CHECK(got[1] == pick(Random(2).normals(3 * parts), parts));
    }
}

}  // namespace

DEVICE_TEST_CASE("embed reads every format", embed_forms)
DEVICE_TEST_CASE("gather_rows copies bits", gather_bits)

TEST_SUITE("cpu") {
    TEST_CASE("embed, gather_rows: ids and rows outside throw") {
        const Device device = cpu_device();
        WeightStore store(3);
        std::vector<double> values;
        const Weight table("t", {store.segment("t", Form::bf16, 9, 32, values)});
        const Norm norm(device, 4, 32);
        for (const StepKind kind : kKinds) {
            CHECK_THROWS_AS(run_embed(device, kind, table, norm, {9}), Error);
            CHECK_THROWS_AS(run_embed(device, kind, table, norm, {-1}), Error);
        }
        CHECK_THROWS_AS(run_gather(device, 16, 1, 3), Error);
        CHECK_THROWS_AS(run_gather(device, 16, 1, -1), Error);
    }
}
