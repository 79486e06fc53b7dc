#include "tools/engine/tower_plan.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/planner.h"

namespace quern {
namespace {

constexpr int64_t kMostTokens = 1216;  // of a step
constexpr int64_t kRowUnit = 128;      // queries of a tile of grid_attention

/// Operations of a block, in units of what a patch costs another one in attention: for each patch the products with weights, of
/// which queries, keys and values are the first part, and all other patches.
struct BlockWork {
    explicit BlockWork(const VisionInfo& vision) : width(static_cast<double>(vision.inner_width)) {}
    double of(double patches) const { return patches * (6 * width + patches); }
    /// Rows of a block of which all queries, keys and values are computed.
    double rows_within(double work, double patches) const {
        return (work - 1.5 * width * patches) / (4.5 * width + patches);
    }

    double width;
};

double step_work(const VisionInfo& vision, int64_t step_patches) {
    return static_cast<double>(vision.blocks) * BlockWork(vision).of(static_cast<double>(step_patches));
}

/// Blocks of an image that fit a step.
int64_t blocks_within(const VisionInfo& vision, int64_t patches, int64_t step_patches) {
    return static_cast<int64_t>(step_work(vision, step_patches) /
                                BlockWork(vision).of(static_cast<double>(patches)));
}

/// Rows of a block that fit a step, about as many in each.
int64_t rows_of_steps(const VisionInfo& vision, int64_t patches, int64_t step_patches) {
    const double most =
        BlockWork(vision).rows_within(step_work(vision, step_patches), static_cast<double>(patches));
    const int64_t rows = std::max(static_cast<int64_t>(most) / kRowUnit, int64_t{1}) * kRowUnit;
    const int64_t parts = (patches + rows - 1) / rows;
    return ((patches + parts - 1) / parts + kRowUnit - 1) / kRowUnit * kRowUnit;
}

/// The most patches of an image of which a block fits a step.
int64_t most_of_whole_blocks(const VisionInfo& vision, int64_t largest, int64_t step_patches) {
    int64_t patches = step_patches;
    for (int64_t by = largest; by >= 4; by /= 2)
        while (patches + by / 4 * 4 <= largest &&
               blocks_within(vision, patches + by / 4 * 4, step_patches) > 0)
            patches += by / 4 * 4;
    return patches;
}

/// The steps that need most memory: several small images; those of the largest that run whole blocks, and of the largest of all.
std::vector<VisionShape> tower_shapes(const VisionInfo& vision, int64_t largest, int64_t together) {
    static char nowhere[2] = {};  // a plan needs an address, and touches nothing
    std::vector<VisionShape> shapes = {
        {.patches = together, .images = together / (vision.merge * vision.merge)}};
    if (largest <= together) return shapes;
    for (const int64_t patches : {most_of_whole_blocks(vision, largest, together), largest}) {
        const std::vector<TowerStep> steps = tower_steps(vision, patches, together);
        Tensor between = make_tensor("between", DType::F32, Place::state, {patches, vision.inner_width});
        between.data = &nowhere[0];
        for (const size_t i : {size_t{0}, std::min<size_t>(1, steps.size() - 1), steps.size() - 1}) {
            const TowerStep& step = steps[i];
            shapes.push_back({.patches = patches,
                              .images = 1,
                              .begin = step.begin,
                              .end = step.end,
                              .first = step.first,
                              .rows = step.rows});
            if (i > 0) shapes.back().from = between;
            if (i + 1 < steps.size()) {
                shapes.back().to = between;
                if (step.rows > 0) shapes.back().to.data = &nowhere[1];
            }
        }
    }
    return shapes;
}

}  // namespace

int64_t aligned_bytes(int64_t bytes) {
    return (bytes + kPlanAlignment - 1) / kPlanAlignment * kPlanAlignment;
}
int64_t with_slack(int64_t bytes) { return aligned_bytes(bytes + bytes / 32); }

int64_t tower_step_patches(const VisionInfo& vision, const StepLimits& steps) {
    return vision.merge * vision.merge * std::min(steps.gap_rows, kMostTokens);
}

std::vector<TowerStep> tower_steps(const VisionInfo& vision, int64_t patches, int64_t step_patches) {
    if (patches <= step_patches) return {{0, vision.blocks}};
    std::vector<TowerStep> steps;
    if (const int64_t blocks = blocks_within(vision, patches, step_patches); blocks > 0) {
        for (int64_t begin = 0; begin < vision.blocks; begin += blocks)
            steps.push_back({begin, std::min(begin + blocks, vision.blocks)});
        return steps;
    }
    steps.push_back({0, 0});
    const int64_t rows = rows_of_steps(vision, patches, step_patches);
    for (int64_t block = 0; block < vision.blocks; ++block)
        for (int64_t first = 0; first < patches; first += rows)
            steps.push_back({block, block + 1, first, std::min(rows, patches - first)});
    return steps;
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
        plan.between = 2 * aligned_bytes(largest * vision.inner_width * int64_t{sizeof(float)});
    plan.features = std::min(o.cache_bytes / 4, kMaxFeatures);
}

}  // namespace quern
