// Flags about images that run and serve share.
#pragma once

#include <cstdint>

#include "ggml-like/requantize.h"

namespace quern {

class ArgParser;

struct VisionOptions {
    bool on = true;  // read the checkpoint's vision tower, if it has one
    DenseFormat format = DenseFormat::as_stored;
    int64_t min_tokens = 0, max_tokens = 0;  // of an image; 0: as the checkpoint says
};

/// --vision, --no-vision, --mmproj, --image-min-tokens, --image-max-tokens.
void add_vision_flags(ArgParser& parser, VisionOptions& options);

}  // namespace quern
