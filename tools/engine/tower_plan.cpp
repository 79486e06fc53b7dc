#include "tools/engine/tower_plan.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/planner.h"

namespace quern {
namespace {

/// The steps of the tower: several small images, or the first, a middle and the last part of one of the largest size.
std::vector<VisionShape> tower_shapes(const VisionInfo& vision, int64_t largest, int64_t together) {
    std::vector<VisionShape> shapes = {
        {.patches = together, .images = together / (vision.merge * vision.merge)}};
    if (largest <= together) return shapes;
    const int64_t blocks = tower_step_blocks(vision, largest, together);
    VisionShape part{.patches = largest, .images = 1};
    static char nowhere = 0;  // a plan needs an address, and touches nothing
    part.between = make_tensor("between", DType::F32, Place::state, {largest, vision.inner_width});
    part.between.data = &nowhere;
    for (const int64_t begin : {int64_t{0}, blocks, (vision.blocks - 1) / blocks * blocks}) {
        part.begin = begin, part.end = std::min(begin + blocks, vision.blocks);
        if (part.begin < part.end) shapes.push_back(part);
    }
    return shapes;
}

}  // namespace

int64_t aligned_bytes(int64_t bytes) {
    return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment;
}
int64_t with_slack(int64_t bytes) { return aligned_bytes(bytes + bytes / 32); }

int64_t tower_step_patches(const VisionInfo& vision, const StepLimits& steps) {
    return vision.merge * vision.merge * steps.gap_rows;
}

int64_t tower_step_blocks(const VisionInfo& vision, int64_t patches, int64_t step_patches) {
    // Products with weights and attention, by the patch: in units of what a patch costs another one in attention.
    const auto work = [&](int64_t n) {
        return static_cast<double>(n) * static_cast<double>(6 * vision.inner_width + n);
    };
    if (patches <= step_patches) return vision.blocks;
    const double share = work(step_patches) / work(patches);
    return std::max<int64_t>(1, static_cast<int64_t>(share * static_cast<double>(vision.blocks)));
}

ImageSizes image_sizes(const VisionInfo& vision, const Backend& backend, const EngineOptions& o) {
    constexpr int64_t kCpuTokens = 1024;
    ImageSizes sizes = vision.sizes;
    const int64_t pixels = vision.token_pixels();
    if (o.image_min_tokens < 0 || o.image_max_tokens < 0 ||
        (o.image_max_tokens > 0 && o.image_min_tokens > o.image_max_tokens))
        FAIL(usage, "images of {} to {} tokens; choose positive numbers that rise", o.image_min_tokens,
             o.image_max_tokens);
    if (o.image_min_tokens > 0) sizes.fewest = o.image_min_tokens * pixels;
    if (o.image_max_tokens > 0)
        sizes.most = std::min(sizes.most, o.image_max_tokens * pixels);
    else if (!backend.captures())
        sizes.most = std::min(sizes.most, kCpuTokens * pixels);
    sizes.fewest = std::min(sizes.fewest, sizes.most);
    return sizes;
}

void count_tower(MemoryPlan& plan, const Model& model, const Backend& backend, const EngineOptions& o) {
    constexpr int64_t kMaxFeatures = 256 << 20;
    const VisionInfo& vision = *model.info().vision;
    const int64_t each = vision.merge * vision.merge, together = tower_step_patches(vision, plan.steps);
    const int64_t largest = plan.image_sizes.most / vision.token_pixels() * each;
    for (const VisionShape& shape : tower_shapes(vision, largest, together)) {
        const ArenaPlan arena = plan_memory(model.build_vision(shape, backend.activation_dtype()).graph);
        plan.arena = std::max(plan.arena, with_slack(arena.arena_bytes));
        plan.inputs = std::max(plan.inputs, arena.input_bytes);
    }
    if (largest > together)
        plan.between = aligned_bytes(largest * vision.inner_width * int64_t{sizeof(float)});
    plan.features = std::min(o.cache_bytes / 4, kMaxFeatures);
}

}  // namespace quern
