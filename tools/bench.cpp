#include "tools/commands.h"
namespace quern { int cmd_bench(int, char**) { return 2; } }
