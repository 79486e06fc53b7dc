#!/usr/bin/env bash
# Includes go downwards only: main -> tools -> tools/engine -> models -> ggml-like. Prints offenders.
set -u
cd "$(dirname "$0")/.."
bad=0
forbid() {  # files, include pattern that they must not have, reason, files to leave out
  local hits
  hits=$(git ls-files $1 | grep -vE "${4:-^$}" | xargs -r grep -nHE "^#include [\"<]($2)" 2>/dev/null)
  [ -z "$hits" ] && return
  printf '%s\n%s\n' "$3:" "$hits"
  bad=1
}
forbid 'ggml-like/*' 'models/|tools/' 'the graph library knows no model and no tool'
forbid 'models/*' 'tools/|ggml-like/cpu/|ggml-like/cuda/' 'models know no tool, no CPU or CUDA internals'
forbid 'tools/engine/*' 'tools/[a-z_]*\.h|tools/run/|ggml-like/cpu/|ggml-like/cuda/' \
  'the engine knows no subcommand and no device internals'
forbid 'tools/[a-z_]*.cpp tools/run/* tools/serve/*' 'ggml-like/ops/|ggml-like/cuda/' 'tools never see ops or CUDA; the bench may' '^tools/(engine|bench)/'
forbid 'main.cpp' 'ggml-like/ops/|models/' 'main knows the subcommands only'
# A kernel file includes its op's contract and the kernel headers, nothing heavy.
forbid '*.cu' 'vector|string|map|fmt/|nlohmann/|cub/|cooperative_groups' 'no heavy headers in .cu files'
exit $bad
