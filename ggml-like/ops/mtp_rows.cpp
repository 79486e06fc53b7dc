#include "ggml-like/ops/mtp_rows.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// y = x / sqrt(mean(x^2) + eps) * w
void norm_once(const float* x, const float* w, int64_t width, float eps, float* y) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += double{x[i]} * double{x[i]};
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + double{eps});
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * static_cast<float>(factor) * w[i];
}

void norm_twice(const float* x, const float* first, const float* second, int64_t width, float eps, float* y) {
    double squares = 0, weighted = 0;
    for (int64_t i = 0; i < width; ++i) {
        const double u = double{x[i]} * double{first[i]};
        squares += double{x[i]} * double{x[i]};
        weighted += u * u;
    }
    const auto columns = static_cast<double>(width);
    const double one = 1 / std::sqrt(squares / columns + double{eps});
    const double two = 1 / std::sqrt(weighted * one * one / columns + double{eps});
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * static_cast<float>(one * two) * first[i] * second[i];
}

struct Inputs {
    const Node& node;
    const MtpRowsParams& p = node.params<MtpRowsParams>();
    const Tensor& hidden = *node.inputs[1];
    const Tensor* rows = p.chosen ? node.inputs[5] : nullptr;
    const Tensor* source = p.images ? node.inputs[p.chosen ? 6 : 5] : nullptr;
    const Tensor* images = p.images ? node.inputs[p.chosen ? 7 : 6] : nullptr;

    const float* norm(size_t i) const { return node.inputs[2 + i]->as<float>(); }
    void embedding(int64_t t, float* to) const {
        const int32_t id = node.inputs[0]->as<int32_t>()[t];
        if (const int32_t image = source != nullptr ? source->as<int32_t>()[t] : -1; image >= 0) {
            CHECK(image < images->shape[0], "[mtp_rows] {}: row {} of {}", node.name, image,
                  describe(*images));
            std::copy_n(images->row<float>(image), p.table->cols, to);
            return;
        }
        CHECK(id >= 0 && id < p.table->rows, "[mtp_rows] {}: token id {} is outside the table of {} rows",
              node.name, id, p.table->rows);
        dequantize_row(*p.table, id, to);
    }
    const float* hidden_row(int64_t t) const {
        const int64_t from = rows != nullptr ? rows->as<int32_t>()[t] : t;
        CHECK(from >= 0 && from < hidden.shape[0], "[mtp_rows] {}: row {} of {}", node.name, from,
              describe(hidden));
        return hidden.row<float>(from);
    }
};

void run(const Node& node, cpu::Context& context) {
    const Inputs in{node};
    const Tensor& y = *node.outputs[0];
    const int64_t width = in.hidden.shape[1];
    context.pool.parallel_for(y.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        std::vector<float> embedded(static_cast<size_t>(width)), row(static_cast<size_t>(width));
        for (int64_t t = begin; t < end; ++t) {
            in.embedding(t, embedded.data());
            norm_once(embedded.data(), in.norm(0), width, in.p.eps, row.data());
            store_floats(y, 2 * t * width, width, row.data());
            norm_twice(in.hidden_row(t), in.norm(1), in.norm(2), width, in.p.eps, row.data());
            store_floats(y, (2 * t + 1) * width, width, row.data());
        }
    });
}

Cost cost(const Node& node) {
    const Weight& table = *node.params<MtpRowsParams>().table;
    return {.weight_bytes = static_cast<double>(table.bytes()) / static_cast<double>(table.rows) *
                            static_cast<double>(node.outputs[0]->shape[0]),
            .activation_bytes = 2 * cpu::dense_bytes(*node.outputs[0])};
}

}  // namespace

const Op kMtpRows{"mtp_rows", run, cost};

Tensor* mtp_rows(Graph& g, std::string_view name, const Weight& table, Tensor* ids, Tensor* hidden,
                 Tensor* rows, const MtpNorms& norms, const OtherRows& images, DType activation,
                 bool after_all) {
    const int64_t width = table.cols;
    CHECK(ids->rank == 1 && ids->dtype == DType::I32, "[mtp_rows] {}: ids are {}, not I32 [T]", name,
          describe(*ids));
    const int64_t tokens = ids->shape[0];
    CHECK(hidden->rank == 2 && hidden->dtype == DType::F32 && hidden->contiguous() &&
              hidden->shape[1] == width && (rows != nullptr || hidden->shape[0] == tokens),
          "[mtp_rows] {}: hidden states {} of {} rows beside a table of {} columns", name, describe(*hidden),
          tokens, width);
    for (const Tensor* w : {norms.embedding, norms.last, norms.hidden})
        CHECK(w->dtype == DType::F32 && w->elements() == width, "[mtp_rows] {}: norm {} of {} columns", name,
              describe(*w), width);
    CHECK(rows == nullptr || (rows->rank == 1 && rows->dtype == DType::I32 && rows->shape[0] == tokens),
          "[mtp_rows] {}: rows are {}", name, describe(*rows));
    Tensor* y = g.scratch(name, activation, {tokens, 2 * width});
    Node node{
        .op = &kMtpRows,
        .name = std::string(name),
        .inputs = {ids, hidden, norms.embedding, norms.last, norms.hidden},
        .outputs = {y},
        .parameters = MtpRowsParams{&table, norms.eps, rows != nullptr, images.source != nullptr, after_all}};
    if (rows != nullptr) node.inputs.push_back(rows);
    if (images.source != nullptr) {
        const Tensor &source = *images.source, &from = *images.rows;
        CHECK(source.dtype == DType::I32 && source.elements() == tokens && from.contiguous() &&
                  from.dtype == DType::F32 && from.rank == 2 && from.shape[1] == width,
              "[mtp_rows] {}: rows {} from {} do not fit", name, describe(source), describe(from));
        node.inputs.push_back(images.source);
        node.inputs.push_back(images.rows);
    }
    g.add(std::move(node));
    return y;
}

}  // namespace quern
