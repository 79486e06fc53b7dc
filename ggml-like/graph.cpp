#include "ggml-like/graph.h"

#include <algorithm>
#include <iterator>

#include "ggml-like/check.h"

namespace quern {

Tensor* Graph::append(Tensor t) {
    tensors_.push_back(t);
    return &tensors_.back();
}

Tensor* Graph::scratch(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) {
    return append(make_tensor(name, dtype, Place::scratch, shape));
}

Tensor* Graph::zeros(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor* t = scratch(name, dtype, shape);
    t->zeroed = true;
    return t;
}

Tensor* Graph::input(std::string_view name, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor* t = append(make_tensor(name, dtype, Place::input, shape));
    inputs_.push_back(t);
    return t;
}

Tensor* Graph::external(const Tensor& tensor) {
    CHECK(tensor.data != nullptr, "[graph] {} has no memory", describe(tensor));
    CHECK(tensor.place == Place::weight || tensor.place == Place::state,
          "[graph] {} is neither weight nor state", describe(tensor));
    return append(tensor);
}

Tensor* Graph::view(std::string_view name, Tensor* base, int64_t offset, std::initializer_list<int64_t> shape,
                    std::initializer_list<int64_t> stride) {
    CHECK(shape.size() == stride.size(), "[graph] view {}: {} sizes but {} strides", name, shape.size(),
          stride.size());
    Tensor t = make_tensor(name, base->dtype, base->place, shape);
    std::copy(stride.begin(), stride.end(), t.stride);
    Tensor* owner = root(base);
    t.base = static_cast<int32_t>(std::distance(
        tensors_.begin(),
        std::find_if(tensors_.begin(), tensors_.end(), [&](const Tensor& x) { return &x == owner; })));
    t.base_offset = base->base_offset + dtype_bytes(base->dtype, offset);
    CHECK(offset >= 0 && t.base_offset + t.bytes() <= owner->bytes(), "[graph] view {} reaches outside {}",
          describe(t), describe(*owner));
    if (owner->data != nullptr) t.data = static_cast<char*>(owner->data) + t.base_offset;
    return append(t);
}

Tensor* Graph::columns(std::string_view name, Tensor* base, int64_t begin, int64_t count) {
    CHECK(base->rank == 2, "[graph] columns of {}: not a matrix", describe(*base));
    CHECK(begin >= 0 && count > 0 && begin + count <= base->shape[1], "[graph] columns [{}, {}) of {}", begin,
          begin + count, describe(*base));
    return view(name, base, begin, {base->shape[0], count}, {base->stride[0], 1});
}

void Graph::output(Tensor* t) {
    CHECK(t->base < 0 && (t->place == Place::scratch || t->place == Place::output),
          "[graph] {} cannot be an output: only tensors that a node of this graph writes", describe(*t));
    if (t->place == Place::output) return;
    t->place = Place::output;
    outputs_.push_back(t);
}

Node& Graph::add(Node node) {
    node.layer = layer_;
    nodes_.push_back(std::move(node));
    return nodes_.back();
}

Tensor* Graph::root(Tensor* t) { return t->base < 0 ? t : &tensors_[static_cast<size_t>(t->base)]; }

std::string Graph::print() const {
    std::string text;
    const auto list = [&](const std::vector<Tensor*>& tensors) {
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (i > 0) text += ", ";
            text += describe(*tensors[i]);
        }
    };
    for (const Node& node : nodes_) {
        text += fmt::format("{:24} {:16} ", node.name, node.op->name);
        list(node.inputs);
        text += " -> ";
        list(node.outputs);
        if (!node.state.empty()) {
            text += "  state ";
            list(node.state);
        }
        text += '\n';
    }
    return text;
}

}  // namespace quern
