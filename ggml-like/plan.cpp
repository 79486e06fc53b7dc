#include "ggml-like/plan.h"

#include <cstring>
#include <utility>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"

namespace quern {

Workspace::Workspace(Backend& backend, int64_t arena_bytes, int64_t input_bytes, int mark)
    : backend_(backend),
      arena_bytes_((arena_bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment),
      input_bytes_(input_bytes),
      mark_(mark) {
    device_ =
        static_cast<std::byte*>(backend_.alloc(arena_bytes_ + input_bytes_, "scratch and inputs of a step"));
    try {
        host_ = static_cast<std::byte*>(backend_.alloc_host(input_bytes_, "inputs of a step"));
    } catch (...) {
        backend_.free(device_);
        throw;
    }
    std::memset(host_, 0, static_cast<size_t>(input_bytes_));
}

Workspace::~Workspace() {
    backend_.free_host(host_);
    backend_.free(device_);
}

Plan::Plan(Graph graph, Backend& backend, Workspace& workspace, PlanUse use)
    : Plan(std::move(graph), backend, &workspace, use) {}

Plan::Plan(Graph graph, Backend& backend) : Plan(std::move(graph), backend, nullptr, PlanUse::repeatedly) {}

Plan::Plan(Graph graph, Backend& backend, Workspace* workspace, PlanUse use)
    : graph_(std::move(graph)),
      backend_(backend),
      use_(use),
      memory_(plan_memory(graph_)),
      own_(workspace != nullptr
               ? nullptr
               : std::make_unique<Workspace>(backend, memory_.arena_bytes, memory_.input_bytes)),
      workspace_(workspace != nullptr ? *workspace : *own_) {
    if (memory_.arena_bytes > workspace_.arena_bytes() || memory_.input_bytes > workspace_.input_bytes())
        FAIL(memory, "[plan] a step needs {} bytes of scratch and {} of inputs; {} and {} were set aside",
             memory_.arena_bytes, memory_.input_bytes, workspace_.arena_bytes(), workspace_.input_bytes());
    auto& tensors = graph_.tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
        if (memory_.offset[i] >= 0) tensors[i].data = workspace_.arena() + memory_.offset[i];
        if (memory_.input_offset[i] >= 0) tensors[i].data = workspace_.inputs() + memory_.input_offset[i];
    }
    for (Tensor& t : tensors)
        if (t.base >= 0)
            t.data = static_cast<std::byte*>(tensors[static_cast<size_t>(t.base)].data) + t.base_offset;
    backend_.prepare(*this);
}

Plan::~Plan() { captured.reset(); }

std::byte* Plan::host_input(const Tensor* t) {
    size_t index = 0;
    for (const Tensor& own : graph_.tensors()) {
        if (&own == t) break;
        ++index;
    }
    CHECK(index < memory_.input_offset.size() && memory_.input_offset[index] >= 0,
          "[plan] {} is not an input", describe(*t));
    return workspace_.host_inputs() + memory_.input_offset[index];
}

void Plan::copy_inputs(const Plan& from) {
    CHECK(memory_.input_bytes <= from.memory_.input_bytes, "[plan] {} bytes of inputs for {}",
          from.memory_.input_bytes, memory_.input_bytes);
    std::memcpy(workspace_.host_inputs(), from.workspace_.host_inputs(),
                static_cast<size_t>(memory_.input_bytes));
}

void Plan::run() {
    upload();
    backend_.run(*this);
}

void Plan::run_marked() {
    upload();
    mark_upload();
    backend_.run(*this);
}

void Plan::run_before(Plan& next) {
    CHECK(&workspace_ != &next.workspace_, "[plan] inputs of two plans are in one workspace");
    backend_.upload_between(inputs_copy(), next.inputs_copy());
    next.mark_upload();
    backend_.run(*this);
}

void Plan::run_uploaded() { backend_.run(*this); }

void Plan::await_inputs() {
    if (std::exchange(workspace_.marked_, false)) backend_.await_mark(workspace_.mark_);
}

InputCopy Plan::inputs_copy() const {
    return {workspace_.inputs(), workspace_.host_inputs(), memory_.input_bytes};
}

void Plan::upload() { backend_.upload(workspace_.inputs(), workspace_.host_inputs(), memory_.input_bytes); }

void Plan::mark_upload() {
    backend_.set_mark(workspace_.mark_);
    workspace_.marked_ = true;
}

}  // namespace quern
