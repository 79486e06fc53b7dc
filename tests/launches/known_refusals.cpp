#include "launches/known_refusals.h"

#include "launches/step_list.h"

namespace quern::test {
namespace {

struct Refusal {
    int device;
    const char* message;
    bool (*is)(const ModelChoice& model, const BatchShape& step);
};

bool is_35b(const ModelChoice& model) { return model.shape == "qwen3.6-35b-a3b"; }

/// Checkpoints with experts of BF16 or F16.
bool has_wide_experts(const ModelChoice& model) {
    const std::string name = name_of(model);
    return model.mix.empty() && !name.starts_with("dense") && name.ends_with("f16");
}

constexpr Refusal kRefusals[] = {
    // A split product of BF16 has no shape of so little shared memory: the router's, and the out_proj of DeltaNet.
    {cuda_stand_in::kRtx5090, "[gemm] the GPU kernels do not support a card with so little shared memory",
     [](const ModelChoice& model, const BatchShape& step) {
         return is_35b(model) && step.kind == StepKind::prompt && step.tokens > 64;
     }},
    // Whether the router's tiles fit is asked with other sizes than those of the launch.
    {cuda_stand_in::kA100, "[linear_add] the GPU kernels do not support a card with so little shared memory",
     [](const ModelChoice& model, const BatchShape& step) {
         return is_35b(model) && model.mix != "xs" && step.kind == StepKind::answer && step.tokens == 5;
     }},
    // The sizes of up to 8 rows leave out 3200 bytes of static shared memory.
    {cuda_stand_in::kRtx5090, "bytes of shared memory beside 3200 static ones",
     [](const ModelChoice& model, const BatchShape& step) {
         return has_wide_experts(model) && step.kind == StepKind::answer && (step.tokens - 1) % 16 < 8;
     }},
};

}  // namespace

std::string known_refusal(const PlacedModel& model, const BatchShape& step) {
    for (const Refusal& r : kRefusals)
        if (r.device == model.device() && r.is(model.choice(), step)) return r.message;
    return {};
}

}  // namespace quern::test
