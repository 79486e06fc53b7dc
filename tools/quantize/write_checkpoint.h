// Writing a checkpoint so that a kill at any moment leaves the directory absent or complete.
//
// Files are made in DIR.partial/files, one after another; each is written under a temporary name, made
// durable, renamed, and its checksum noted in DIR.partial. When all are there, DIR.partial/files becomes DIR
// in one step. The same command continues an interrupted write: it keeps the files whose checksums agree. Bytes depend
// on the source, the recipe and the version of quern alone, not on threads, time or interruptions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/quantize/write_plan.h"

namespace quern {

struct WriteOptions {
    std::string directory;
    std::string recipe;  // empty: change nothing but the format
    CheckpointFormat format = CheckpointFormat::compressed_tensors;
    uint64_t shard_bytes = 5'000'000'000;
    int threads = 1;
};

struct WriteReport {
    std::string directory;
    int64_t quantized = 0, converted = 0, inexact = 0;
    uint64_t source_bytes = 0, bytes = 0;
    int64_t files = 0, reused = 0;  // weight files; those that were finished already
    double seconds = 0;
    std::vector<std::string> notes;
};

/// With a progress bar on stderr. Throws Error(usage) if DIR exists, is the source, or DIR.partial belongs to
/// another command or is being written; Error(model) for a source that cannot be read or whose result quern
/// would refuse; Error(runtime) if the disk is full or fails.
WriteReport write_checkpoint(const Checkpoint& source, const WriteOptions& options);

std::string describe(const WriteReport& report);
nlohmann::ordered_json to_json(const WriteReport& report);

}  // namespace quern
