// The flags of the KV cache's format, for every subcommand that loads a model.
#pragma once

#include <string>

namespace quern {

class ArgParser;

/// -ctk, -ctv and --kv-cache-dtype, which is both, into `k` and `v` (EngineOptions::kv_type, kv_type_v).
void add_kv_flags(ArgParser& parser, std::string& k, std::string& v);
/// --allow-loss (LoadOptions::allow_loss).
void add_allow_loss_flag(ArgParser& parser, bool& allow);

}  // namespace quern
