// What a client needs to be told to use this server: environment variables or a configuration file.
#pragma once

#include <string>

#include "tools/serve/options.h"

namespace quern {

inline constexpr const char* kClientNames = "claude, codex, opencode, openwebui, cline, continue or zed";

/// Text to be evaluated by a shell or saved as the file that its first line names; JSON files, which have no comments,
/// are only the file. Limits of the context are in it if `options` has one. Throws Error(usage) for another client.
std::string client_config(const std::string& client, const ServeOptions& options);

}  // namespace quern
