#include "tools/common/kv_flags.h"

#include "tools/common/cli_args.h"
#include "tools/common/cli_values.h"
#include "tools/engine/kv_types.h"

namespace quern {

void add_kv_flags(ArgParser& parser, std::string& k, std::string& v) {
    const auto named = [](const std::string& value, const char* flag) {
        check_kv_type(printable(value), flag);
        return value;
    };
    parser.value("-ctk,--cache-type-k", "TYPE", kKvTypesHelp,
                 [&k, named](const std::string& value) { k = named(value, "-ctk"); });
    parser.value("-ctv,--cache-type-v", "TYPE", "of values alone; left out: as keys",
                 [&v, named](const std::string& value) { v = named(value, "-ctv"); });
    parser.value("--kv-cache-dtype", "TYPE", "of both", [&k, &v, named](const std::string& value) {
        k = named(value, "--kv-cache-dtype");
        v.clear();
    });
}

void add_allow_loss_flag(ArgParser& parser, bool& allow) {
    parser.toggle("--allow-loss",
                  "run even if the KV cache's format changes the model by more than 0.1 nats a token",
                  [&allow](bool value) { allow = value; });
}

}  // namespace quern
