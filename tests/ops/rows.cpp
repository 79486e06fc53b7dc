// embed and gather_rows.
#include "ggml-like/error.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/gather_rows.h"
#include "ops/harness.h"
#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

std::vector<double> run_embed(const Device& device, const Weight& table, const std::vector<int32_t>& ids) {
    Graph g;
    Tensor* t = g.input("ids", DType::I32, {static_cast<int64_t>(ids.size())});
    g.output(embed(g, "e", table, t, DType::F32));
    return run_graph(device, std::move(g),
                     [&](Plan& p) { std::copy(ids.begin(), ids.end(), p.input<int32_t>(t)); })[0];
}

void embed_forms(Device& device) {
    for (const Form form : kForms) {
        for (const int64_t width : {32, 144}) {
            CAPTURE(std::string(form_name(form)));
            WeightStore store(3);
            std::vector<double> values;
            const Weight table = placed(device, Weight("t", {store.segment("t", form, 37, width, values)}));
            const std::vector<int32_t> ids = {36, 0, 3, 3, 16};
            std::vector<double> expected;
            for (const int32_t id : ids) {
                const auto row = rows_of(values, width, id, 1);
                expected.insert(expected.end(), row.begin(), row.end());
            }
            CHECK(relative_error(run_embed(device, table, ids), expected) < device.bound(1e-6));
        }
    }
}

std::vector<double> run_gather(const Device& device, int32_t row) {
    Graph g;
    Tensor *x = g.input("x", DType::F32, {3, 5}), *rows = g.input("rows", DType::I32, {2});
    g.output(gather_rows(g, "y", x, rows));
    return run_graph(device, std::move(g), [&](Plan& p) {
        for (int i = 0; i < 15; ++i) p.input<float>(x)[i] = static_cast<float>(i) + 0.1f;
        p.input<int32_t>(rows)[0] = 2;
        p.input<int32_t>(rows)[1] = row;
    })[0];
}

void gather_bits(Device& device) {
    std::vector<double> expected;
    for (const int i : {10, 11, 12, 13, 14, 0, 1, 2, 3, 4}) expected.push_back(static_cast<float>(i) + 0.1f);
    CHECK(run_gather(device, 0) == expected);
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
        CHECK_THROWS_AS(run_embed(device, table, {9}), Error);
        CHECK_THROWS_AS(run_embed(device, table, {-1}), Error);
        CHECK_THROWS_AS(run_gather(device, 3), Error);
        CHECK_THROWS_AS(run_gather(device, -1), Error);
    }
}
