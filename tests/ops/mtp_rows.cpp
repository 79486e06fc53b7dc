// mtp_rows: embeddings beside hidden states, both normed, against double precision.
#include "ggml-like/ops/mtp_rows.h"

#include "ggml-like/error.h"
#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;
constexpr int64_t kTableRows = 37, kHiddenRows = 5, kImages = 3;

struct Case {
    int64_t width;
    std::vector<int32_t> ids, rows, source;  // rows, source: or none

    std::vector<float> hidden() const { return Random(1).normals(kHiddenRows * width); }
    std::vector<float> images() const { return Random(6).normals(kImages * width); }
    std::vector<float> norm(uint64_t seed) const {
        std::vector<float> w = Random(seed).normals(width);
        for (float& v : w) v = 1 + v / 4;
        return w;
    }
};

std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& weight) {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double rms = std::sqrt(squares / static_cast<double>(x.size()) + double{kEps});
    std::vector<double> y;
    for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] / rms * double{weight[i]});
    return y;
}

std::vector<double> expected(const Case& c, const Matrix& table) {
    const auto row_of = [&](const auto& values, int64_t row) {
        return std::vector<double>(values.begin() + row * c.width, values.begin() + (row + 1) * c.width);
    };
    std::vector<double> all;
    for (size_t t = 0; t < c.ids.size(); ++t) {
        const int32_t image = c.source.empty() ? -1 : c.source[t];
        const auto token = image >= 0 ? row_of(c.images(), image) : row_of(table.values, c.ids[t]);
        const auto hidden = row_of(c.hidden(), c.rows.empty() ? static_cast<int64_t>(t) : c.rows[t]);
        for (const auto& half : {normed(token, c.norm(2)), normed(normed(hidden, c.norm(3)), c.norm(4))})
            all.insert(all.end(), half.begin(), half.end());
    }
    return all;
}

std::vector<double> run_rows(const Device& device, const Case& c, const Weight& table) {
    std::vector<std::unique_ptr<Guarded>> norms;
    for (const uint64_t seed : {2, 3, 4}) {
        norms.push_back(std::make_unique<Guarded>(device, "norm", DType::F32, Place::weight,
                                                  std::initializer_list<int64_t>{c.width}));
        norms.back()->set(c.norm(seed));
    }
    const auto tokens = static_cast<int64_t>(c.ids.size());
    Graph g;
    Tensor* ids = g.input("ids", DType::I32, {tokens});
    Tensor* hidden = g.input("hidden", DType::F32, {kHiddenRows, c.width});
    Tensor* rows = c.rows.empty() ? nullptr : g.input("rows", DType::I32, {tokens});
    OtherRows images;
    if (!c.source.empty())
        images = {g.input("source", DType::I32, {tokens}), g.input("images", DType::F32, {kImages, c.width})};
    const MtpNorms w{g.external(norms[0]->tensor()), g.external(norms[1]->tensor()),
                     g.external(norms[2]->tensor()), kEps};
    g.output(mtp_rows(g, "y", table, ids, hidden, rows, w, images, device.activation));
    return run_graph(device, std::move(g), [&](Plan& p) {
        std::copy(c.ids.begin(), c.ids.end(), p.input<int32_t>(ids));
        set_input(p, hidden, c.hidden());
        if (rows != nullptr) std::copy(c.rows.begin(), c.rows.end(), p.input<int32_t>(rows));
        if (images.source == nullptr) return;
        std::copy(c.source.begin(), c.source.end(), p.input<int32_t>(images.source));
        set_input(p, images.rows, c.images());
    })[0];
}

void check_rows(Device& device, Form form, const Case& c) {
    CAPTURE(shape_name({form}, {kTableRows}, c.width));
    CAPTURE(c.rows.size());
    CAPTURE(c.source.size());
    WeightStore store(3);
    const Matrix table = random_matrix(store, {form}, {kTableRows}, c.width);
    const auto got = run_rows(device, c, placed(device, table.weight));
    CHECK(relative_error(got, expected(c, table)) < device.bound(1e-6));
}

void mtp_forms(Device& device) {
    for (const Form form : kForms)
        for (const int64_t width : {32, 144, 2048, 5120}) {
            check_rows(device, form, {width, {36, 0, 17, 17, 5}, {}, {}});
            check_rows(device, form, {width, {3, 36, 16}, {4, 0, 4}, {}});
            check_rows(device, form, {width, {1, 2, 3, 4, 5}, {}, {-1, 2, 0, -1, 1}});
            check_rows(device, form, {width, {9, 8}, {1, 3}, {2, -1}});
        }
}

}  // namespace

DEVICE_TEST_CASE("mtp_rows norms embeddings and hidden states, in every form", mtp_forms)

TEST_SUITE("cpu") {
    TEST_CASE("mtp_rows: ids and rows outside throw") {
        const Device device = cpu_device();
        WeightStore store(3);
        const Matrix table = random_matrix(store, {Form::bf16}, {kTableRows}, 32);
        const Weight weight = placed(device, table.weight);
        const std::vector<int32_t> fine = {0, 36};
        CHECK_NOTHROW(run_rows(device, {32, fine, {4, 0}, {}}, weight));
        for (const int32_t row : {-1, 5})
            CHECK_THROWS_AS(run_rows(device, {32, fine, {0, row}, {}}, weight), Error);
        for (const int32_t id : {-1, 37})
            CHECK_THROWS_AS(run_rows(device, {32, {0, id}, {0, 1}, {}}, weight), Error);
        CHECK_THROWS_AS(run_rows(device, {32, fine, {0, 1}, {-1, 3}}, weight), Error);
    }
}
