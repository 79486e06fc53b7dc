// Flags of speculation, the same for run, serve and bench; with llama.cpp's and vLLM's names beside our own.
#pragma once

#include <string>

#include "tools/engine/speculation_options.h"

namespace quern {

class ArgParser;

/// auto, none, lookup, mtp, or vLLM's ngram for lookup. `what` names the value in the message. Throws Error(usage).
DrafterKind parse_drafter(const std::string& value, const std::string& what);
/// vLLM's --speculative-config: {"method": "ngram", "num_speculative_tokens": 5}. Throws Error(usage), for keys that would
/// have no effect too.
void apply_speculative_config(const std::string& json, SpeculationOptions& options);

/// Adds --spec, --draft-max and --speculative-config, which write to `options`.
void add_speculation_flags(ArgParser& parser, SpeculationOptions& options);

/// Names and help of these flags.
inline constexpr const char* kSpecNames = "--spec-type,--spec";
inline constexpr const char* kDraftMaxNames = "--draft,--draft-n,--num-speculative-tokens,--draft-max";

}  // namespace quern
