#include "models/model.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/kv_format.h"
#include "ggml-like/ops/conv_gated_delta_net.h"

namespace quern {

int64_t StateSpec::bytes() const {
    if (role == StateRole::key || role == StateRole::value)
        return kv::page_bytes(dtype, role == StateRole::value, shape[0], static_cast<int>(shape[2]));
    int64_t elements = 1;
    for (int64_t size : shape) elements *= size;
    return dtype_bytes(dtype, elements);
}

void Model::keep_layers(const LayerRange&) {
    FAIL(usage, "--split-mode layer: {} cannot be split by layers", info().name);
}

ImagePart Model::read_image(Image image, const ImageSizes& sizes) const {
    CHECK(info().vision.has_value(), "[vision] this model was opened without its vision tower");
    const VisionInfo& vision = *info().vision;
    const ImageSize size = size_to_read({image.width, image.height}, vision.step, sizes);
    image = resize(std::move(image), size);
    return make_image_part({&image, 1}, vision);
}

std::vector<StateSpec> draft_specs(int layer) {
    return {{layer, StateRole::drafts, DType::I32, false, {2 * kMaxJournalEntries}},
            {layer, StateRole::chosen, DType::I32, false, {2}}};
}

Tensor flat(const Tensor& t) {
    Tensor out = make_tensor(t.name, t.dtype, t.place, {t.elements()});
    out.data = t.data;
    return out;
}

Tensor* draft_ids(Graph& g, const StateViews& state, int layer, std::initializer_list<int64_t> shape) {
    const int64_t columns = *(shape.end() - 1);
    return g.view("drafts", g.external(flat(state.find(layer, StateRole::drafts))), 0, shape, {columns, 1});
}

Batch declare_batch(Graph& g, const BatchShape& shape, int64_t width) {
    const int64_t tokens = shape.tokens, sequences = shape.sequences,
                  logit_rows = std::max<int64_t>(1, shape.logit_rows);
    Batch b{.kind = shape.kind,
            .token_ids = g.input("token_ids", DType::I32, {tokens}),
            .positions = g.input("positions", DType::I32, {tokens}),
            .row_sequence = g.input("row_sequence", DType::I32, {tokens}),
            .start = g.input("start", DType::I32, {sequences + 1}),
            .slots = g.input("slots", DType::I32, {sequences}),
            .pages = g.input("pages", DType::I32, {sequences, shape.pages}),
            .committed = g.input("committed", DType::I32, {sequences}),
            .journal = g.input("journal", DType::I32, {sequences}),
            .logit_rows = g.input("logit_rows", DType::I32, {logit_rows}),
            .temperature = g.input("temperature", DType::F32, {logit_rows})};
    if (shape.kind == StepKind::prompt) b.logits_from = g.input("logits_from", DType::I32, {sequences});
    if (width > 0) b.rope = g.input("rope", DType::I32, {3, tokens});
    if (width > 0 && shape.images) {
        b.image_source = g.input("image_source", DType::I32, {tokens});
        b.image_rows = g.input("image_rows", DType::F32, {image_row_limit(shape), width});
    }
    return b;
}

}  // namespace quern
