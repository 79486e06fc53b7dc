// Options of `quern run`, as the command line gives them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/chat_format.h"
#include "tools/common/doctor/flags.h"
#include "tools/common/loading.h"
#include "tools/common/vision_flags.h"

namespace quern {

enum class When { automatic, always, never };

struct RunOptions {
    std::string model;                    // empty: the demo checkpoint
    std::string synthetic, mix = "aeon";  // random weights in place of a checkpoint
    GpuOptions gpu = GpuOptions::automatic;
    DeviceChoice devices;
    int threads = 0;
    int64_t context = 0;
    int64_t step_tokens = 0;  // 0: what suits the backend
    std::string kv_type = "auto", kv_type_v;
    bool allow_loss = false;
    DenseFormat dense = DenseFormat::as_stored;
    int64_t cache_bytes = int64_t{1024} << 20;
    SpeculationOptions speculation;
    VisionOptions vision;

    std::optional<std::string> prompt;  // "-": standard input
    std::string prompt_file;
    std::vector<std::string> images;  // files; before the prompt's text, or for the image tokens of --ids
    std::vector<std::string> videos;  // patterns of the files of frames; likewise
    double fps = 2;                   // frames a second
    std::string system, system_file, tools_file;
    std::string tool_command;               // answers calls of tools; empty: they are only shown
    bool tool_yes = false;                  // without asking
    std::string json_schema, grammar_file;  // what answers must be; a file, or the schema itself
    bool raw = false;                       // plain completion, no chat format
    bool chat = false;                      // -cnv: go on interactively after the prompt
    bool single_turn = false;               // leave after the first answer
    ReasoningEffort effort = ReasoningEffort::unset;
    std::optional<bool> preserve_thinking = {};  // empty: as the format does it
    bool ignore_eos = false;
    /// Settings by name, in the order given; applied over the checkpoint's values when it is loaded.
    std::vector<std::pair<std::string, std::string>> settings;

    DoctorFlags doctor;
    std::string ids_file, logits_file, drafts_file, draft_logits_file;
    bool json = false;
    bool verbose = false;
    bool history = true;
    bool fail_on_truncation = false;
    double timeout = 0;         // seconds; 0: none
    std::optional<bool> stats;  // absent: when stderr is a terminal
    When color = When::automatic;
    When show_thinking = When::automatic;
};

/// False: --help or --version was printed. Throws Error(usage).
bool parse_run_options(int argc, char** argv, RunOptions& options);

}  // namespace quern
