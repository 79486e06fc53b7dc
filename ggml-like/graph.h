// Graph: a recording of one forward pass as a list of nodes in run order. No optimizer passes, no placement, no
// autograd.
#pragma once

#include <deque>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "ggml-like/op.h"
#include "ggml-like/tensor.h"

namespace quern {

class Graph {
  public:
    Graph() = default;
    Graph(Graph&&) = default;
    Graph& operator=(Graph&&) = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    /// A new scratch tensor; the planner gives it memory.
    Tensor* scratch(std::string_view name, DType dtype, std::initializer_list<int64_t> shape);
    /// The same, but all zeros when a run begins; shares its memory with no other tensor.
    Tensor* zeros(std::string_view name, DType dtype, std::initializer_list<int64_t> shape);
    /// A tensor filled by the caller before each run.
    Tensor* input(std::string_view name, DType dtype, std::initializer_list<int64_t> shape);
    /// A tensor whose memory exists already (weights, state).
    Tensor* external(const Tensor& tensor);
    /// `shape` elements of `base` from element `offset` on, with the given strides (elements).
    Tensor* view(std::string_view name, Tensor* base, int64_t offset, std::initializer_list<int64_t> shape,
                 std::initializer_list<int64_t> stride);
    /// Columns [begin, begin + count) of a matrix [rows, cols].
    Tensor* columns(std::string_view name, Tensor* base, int64_t begin, int64_t count);

    /// Declares that the caller reads `t` after the run.
    void output(Tensor* t);

    Node& add(Node node);
    /// Nodes added from now on belong to this layer (-1: none); for names and the bench.
    void set_layer(int layer) { layer_ = layer; }
    int layer() const { return layer_; }

    /// Tensor whose memory `t` uses: itself, or the base of a view.
    Tensor* root(Tensor* t);

    const std::deque<Tensor>& tensors() const { return tensors_; }
    std::deque<Tensor>& tensors() { return tensors_; }
    const std::vector<Node>& nodes() const { return nodes_; }
    const std::vector<Tensor*>& inputs() const { return inputs_; }
    const std::vector<Tensor*>& outputs() const { return outputs_; }

  private:
    Tensor* append(Tensor t);

    std::deque<Tensor> tensors_;  // stable addresses
    std::vector<Node> nodes_;
    std::vector<Tensor*> inputs_;
    std::vector<Tensor*> outputs_;
    int layer_ = -1;
};

}  // namespace quern
