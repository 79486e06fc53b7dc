// Flags of speculation, the same for run, serve and bench; with llama.cpp's and vLLM's names beside our own.
#pragma once

#include <string>

#include "tools/engine/speculation_options.h"

namespace quern {

class ArgParser;

/// auto, none, lookup, mtp, dflash, or vLLM's ngram for lookup. `what` names the value in the message. Throws Error(usage).
DrafterKind parse_drafter(const std::string& value, const std::string& what);
/// vLLM's --speculative-config: {"method": "ngram", "num_speculative_tokens": 5}. Throws Error(usage), for keys that would
/// have no effect too.
void apply_speculative_config(const std::string& json, SpeculationOptions& options);

/// -md: the drafter's checkpoint; with no other choice of drafters it is the one that drafts. Throws Error(usage).
void name_draft_model(const std::string& path, SpeculationOptions& options);

/// Adds --spec, --draft-max, --draft-head, --model-draft and --speculative-config, which write to `options`.
void add_speculation_flags(ArgParser& parser, SpeculationOptions& options);
void add_draft_head_flag(ArgParser& parser, SpeculationOptions& options);

/// Names and help of these flags.
inline constexpr const char* kDraftModelNames = "-md,--model-draft";
inline constexpr const char* kDraftModelHelp =
    "a DFlash drafter for this checkpoint: a directory or a repository id; drafts with --spec dflash or "
    "auto, and "
    "without --spec";
inline constexpr const char* kSpecNames = "--spec-type,--spec";
inline constexpr const char* kDraftMaxNames = "--draft,--draft-n,--num-speculative-tokens,--draft-max";

}  // namespace quern
