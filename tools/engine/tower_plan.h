// What images take: between which sizes they are read, and the memory of the vision tower's steps.
#pragma once

#include "tools/engine/memory_plan.h"

namespace quern {

/// Patches of images that one step encodes together at most: as many tokens as it has rows of prompts beside answers.
int64_t tower_step_patches(const VisionInfo& vision, const StepLimits& steps);
/// Blocks that one step runs for an image of so many patches.
int64_t tower_step_blocks(const VisionInfo& vision, int64_t patches, int64_t step_patches);

/// Those of the model's preprocessor, and of the caller. Throws Error(usage).
ImageSizes image_sizes(const VisionInfo& vision, const Backend& backend, const EngineOptions& o);

/// Adds what the tower needs to a plan that has its steps and image sizes.
void count_tower(MemoryPlan& plan, const Model& model, const Backend& backend, const EngineOptions& o);

/// An arena's bytes and a little more: first fit is not monotonic, so a smaller step may need it.
int64_t with_slack(int64_t bytes);
/// To kPlanAlignment.
int64_t aligned_bytes(int64_t bytes);

}  // namespace quern
