// Inspection: a checkpoint read as `run` reads it, but everything that is wrong is collected instead of thrown.
#pragma once

#include <map>
#include <string>
#include <utility>

#include "models/checkpoint.h"
#include "models/config_check.h"
#include "models/qwen3_6_moe.h"
#include "models/tensor_use.h"

namespace quern {

class Inspection {
  public:
    /// Matrices of one part of the model in one format.
    struct Group {
        int64_t matrices = 0;
        int64_t bytes = 0;
        double token_bytes = 0;  // read for one decoded token
    };
    using Groups = std::map<std::pair<std::string, std::string>, Group>;  // (part, format)

    /// ReadMode::headers reads no weights; ReadMode::values also reads and checks all scales that are floats, as a
    /// load does. Throws Error(model) if the files cannot be read as a checkpoint at all.
    Inspection(const std::string& path, ReadMode mode);
    Inspection(const Inspection&) = delete;
    Inspection& operator=(const Inspection&) = delete;

    bool clean() const { return failure.empty() && audit.ok(); }

    Checkpoint checkpoint;
    Qwen36MoeConfig config;
    TensorUse use;
    Qwen36MoeWeights weights;  // without layers if the text model could not be read
    Audit audit;
    Groups groups;
    std::string failure;  // why the text model could not be read; empty if it was

  private:
    void count(const char* what, const Weight& w, double share);
    void group(const Qwen36MoeWeights& w);
};

/// "NVFP4", "FP8 block 128", "BF16", ...
const char* format_name(const WeightSegment& segment);

}  // namespace quern
