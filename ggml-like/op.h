// Op and Node: what a graph is made of.
#pragma once

#include <any>
#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/tensor.h"

namespace quern {

struct Node;
namespace cpu {
struct Context;
}

/// What a node moves and computes at its shapes, for the bench. Bytes as if nothing were cached.
struct Cost {
    double weight_bytes = 0;
    double state_bytes = 0;
    double activation_bytes = 0;
    double flops = 0;
};

/// One kind of computation. Each op's .cpp defines one constant; the CUDA backend keeps its own table by
/// address.
struct Op {
    const char* name;
    void (*run_cpu)(const Node& node, cpu::Context& context);
    Cost (*cost)(const Node& node);
};

/// One call of an op. Not a tensor: it may have several outputs, and state that it changes in place.
struct Node {
    const Op* op = nullptr;
    std::string name;             // "L12.moe.gate_up"
    std::vector<Tensor*> inputs;  // order and meaning: the op's header
    std::vector<Tensor*> outputs;
    std::vector<Tensor*> state;  // read and written
    std::any parameters;         // the op's parameter struct
    int layer = -1;

    template <typename P>
    const P& params() const {
        return std::any_cast<const P&>(parameters);
    }
};

}  // namespace quern
