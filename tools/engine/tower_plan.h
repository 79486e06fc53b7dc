// What images take: between which sizes they are read, and the memory of the vision tower's steps.
#pragma once

#include <vector>

#include "tools/engine/memory_plan.h"

namespace quern {

/// Patches of images that one step encodes together at most: as many tokens as it has rows of prompts beside answers, or as an
/// H200 encodes in 25 ms with the tower of the 35B.
int64_t tower_step_patches(const VisionInfo& vision, const StepLimits& steps);

/// Blocks begin .. end-1 of an image, all their rows or those of one, as VisionShape has it.
struct TowerStep {
    int64_t begin, end;
    int64_t first = 0, rows = 0;
};

/// The steps for an image of so many patches, in their order. None has more floating-point operations than one for an image of
/// `step_patches`, attention included: the whole; or some blocks each; or first the patches, then each block for some rows at a time.
std::vector<TowerStep> tower_steps(const VisionInfo& vision, int64_t patches, int64_t step_patches);

/// Those of the model's preprocessor, and of the caller. Throws Error(usage).
ImageSizes image_sizes(const VisionInfo& vision, const Backend& backend, const EngineOptions& o);

/// Adds what the tower needs to a plan that has its steps and image sizes.
void count_tower(MemoryPlan& plan, const Model& model, const Backend& backend, const EngineOptions& o);

/// An arena's bytes and a little more: first fit is not monotonic, so a smaller step may need it.
int64_t with_slack(int64_t bytes);
/// To kPlanAlignment.
int64_t aligned_bytes(int64_t bytes);

}  // namespace quern
