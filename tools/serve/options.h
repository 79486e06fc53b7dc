// Options of `quern serve`, as the command line gives them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tools/common/loading.h"
#include "tools/common/vision_flags.h"
#include "tools/serve/http_server.h"

namespace quern {

struct ServeOptions {
    std::string model;
    std::string synthetic, mix = "aeon";  // random weights in place of a checkpoint
    GpuOptions gpu = GpuOptions::automatic;
    DeviceChoice devices;
    int replicas = 1;  // engines, each on a device of its own
    int threads = 0;
    int64_t context = 0;
    int64_t sequences = 4;
    int64_t step_tokens = 0;  // 0: what suits the backend
    std::string kv_type = "auto", kv_type_v;
    bool allow_loss = false;
    DenseFormat dense = DenseFormat::as_stored;
    int64_t cache_bytes = int64_t{8192} << 20;
    SpeculationOptions speculation;
    VisionOptions vision;
    std::string cache_dir;  // keeps states over a restart; empty: they are lost

    std::string host = "127.0.0.1";
    int port = 8080;
    std::vector<std::string> keys;
    std::vector<std::string> hosts;         // Host names to accept beside addresses and localhost
    std::vector<std::string> cors_origins;  // "*": any
    bool allow_anonymous = false;
    HttpLimits limits;

    /// Aliases as given: name and settings, which are applied over `settings` (--temp and the like).
    std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> aliases;
    std::vector<std::pair<std::string, std::string>> settings;
    int64_t queue = 128;
    double timeout = 3600;      // seconds a request may take
    double drain_seconds = 10;  // after SIGTERM
    bool strict = false;        // unknown fields and models are errors
    bool web_page = true;
    bool doctor = false;  // examine the model before the first answer
    bool log_json = false, log_requests = true;
};

/// False: --help, --version or --print-config was printed. Throws Error(usage).
bool parse_serve_options(int argc, char** argv, ServeOptions& options);

}  // namespace quern
