// Subcommands: argv[0] is the subcommand's name. Each returns the exit code of the process or throws Error.
#pragma once

namespace quern {

int cmd_run(int argc, char** argv);
int cmd_serve(int argc, char** argv);
int cmd_bench(int argc, char** argv);
int cmd_quantize_inspect(int argc, char** argv);

}  // namespace quern
