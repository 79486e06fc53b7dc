#include "ggml-like/plan.h"

#include <cstring>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"

namespace quern {

Plan::Plan(Graph graph, Backend& backend)
    : graph_(std::move(graph)), backend_(backend), memory_(plan_memory(graph_)) {
    input_host_.assign(static_cast<size_t>(memory_.input_bytes), std::byte{0});
    arena_ = backend_.alloc(memory_.arena_bytes, "scratch of a plan");
    try {
        input_device_ = backend_.alloc(memory_.input_bytes, "inputs of a plan");
        auto& tensors = graph_.tensors();
        for (size_t i = 0; i < tensors.size(); ++i) {
            if (memory_.offset[i] >= 0) tensors[i].data = static_cast<std::byte*>(arena_) + memory_.offset[i];
            if (memory_.input_offset[i] >= 0)
                tensors[i].data = static_cast<std::byte*>(input_device_) + memory_.input_offset[i];
        }
        for (Tensor& t : tensors)
            if (t.base >= 0)
                t.data = static_cast<std::byte*>(tensors[static_cast<size_t>(t.base)].data) + t.base_offset;
        backend_.prepare(*this);
    } catch (...) {
        backend_.free(input_device_);
        backend_.free(arena_);
        throw;
    }
}

Plan::~Plan() {
    captured.reset();
    backend_.free(input_device_);
    backend_.free(arena_);
}

std::byte* Plan::host_input(const Tensor* t) {
    size_t index = 0;
    for (const Tensor& own : graph_.tensors()) {
        if (&own == t) break;
        ++index;
    }
    CHECK(index < memory_.input_offset.size() && memory_.input_offset[index] >= 0,
          "[plan] {} is not an input", describe(*t));
    return input_host_.data() + memory_.input_offset[index];
}

void Plan::run() {
    backend_.upload(input_device_, input_host_.data(), memory_.input_bytes);
    backend_.run(*this);
}

}  // namespace quern
