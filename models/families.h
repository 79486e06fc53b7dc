// The kinds of models that can be run: one row for each in families.cpp, and its files beside it.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>

#include "models/chat_format.h"
#include "models/model.h"

namespace quern {

class Checkpoint;

struct ModelFamily {
    const char* architecture;  // model_type of config.json
    const char* text_type;     // model_type of its text_config, if it has one
    const char* examples;      // published models, for messages
    /// Throws as open_model.
    std::unique_ptr<Model> (*open)(const ModelFamily& family, Checkpoint checkpoint,
                                   const OpenOptions& options);
    /// The format for the checkpoint in this directory; empty, or without a template: the family's usual one. Never
    /// throws.
    ChatChoice (*chat)(const std::string& directory);
};

std::span<const ModelFamily> model_families();

/// The row of an architecture; there must be one.
const ModelFamily& find_family(std::string_view architecture);

/// The family that config.json names. `file`: its name for messages. Throws Error(model) if it is unknown, with a
/// list of the known ones, or if text_config belongs to another family.
const ModelFamily& family_of(const nlohmann::json& config, const std::string& file);

}  // namespace quern
