#!/usr/bin/env bash
# Includes go downwards only: main -> tools/<subcommand> -> tools/common -> tools/engine -> models -> ggml-like, and
# never sideways from one subcommand's folder into another's. Prints offenders.
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
forbid 'models/*' 'ggml-like/[a-z_]*backend\.h' 'of the models only weight_placement knows backends' '^models/weight_placement\.'
forbid 'tools/engine/*' 'tools/[a-z_]*\.h|tools/(common|run|serve|bench|inspect|quantize)/|ggml-like/cpu/|ggml-like/cuda/' \
  'the engine knows no subcommand and no device internals'
forbid 'tools/common/*' 'tools/[a-z_]*\.h|tools/(run|serve|bench|inspect|quantize)/' \
  'what subcommands share knows none of them'
beside() {  # subcommand, folders of the others
  forbid "tools/$1.cpp tools/$1/*" "tools/($2)/" 'what two subcommands need belongs into tools/common'
  forbid "tools/$1/*" 'tools/[a-z_]*\.h' 'a folder of a subcommand knows no table of subcommands'
}
beside run 'serve|bench|inspect|quantize'
beside serve 'run|bench|inspect|quantize'
beside bench 'run|serve|inspect|quantize'
beside inspect 'run|serve|bench|quantize'
beside quantize 'run|serve|bench|inspect'
beside quantize_inspect 'run|serve|bench'
forbid 'tools/*' 'ggml-like/cuda/' 'tools never see CUDA'
forbid 'tools/*' 'ggml-like/ops/' 'tools never see ops; the engine and the bench may' '^tools/(engine|bench)/'
forbid 'main.cpp' 'ggml-like/ops/|models/' 'main knows the subcommands only'
# Folders of kernels: ptx <- pack <- linear <- moe; attention, delta and comm stand on ptx alone; products add up over ranks.
forbid 'ggml-like/cuda/ptx/*' 'ggml-like/cuda/(pack|linear|moe|attention|delta|comm)/' 'instructions know no kernels'
forbid 'ggml-like/cuda/pack/*' 'ggml-like/cuda/(linear|moe|attention|delta|comm)/' 'packed weights know no products'
forbid 'ggml-like/cuda/linear/*' 'ggml-like/cuda/(moe|attention|delta)/' 'dense products know no other kernels'
forbid 'ggml-like/cuda/moe/*' 'ggml-like/cuda/(attention|delta)/' 'mixtures know no attention and no delta rule'
forbid 'ggml-like/cuda/attention/*' 'ggml-like/cuda/(pack|linear|moe|delta|comm)/' 'attention knows no other kernels'
forbid 'ggml-like/cuda/delta/*' 'ggml-like/cuda/(pack|linear|moe|attention|comm)/' 'the delta rule knows no other kernels'
forbid 'ggml-like/cuda/comm/*' 'ggml-like/cuda/(pack|linear|moe|attention|delta)/' 'sums over ranks know no other kernels'
# A kernel file includes its op's contract and the kernel headers, nothing heavy.
forbid '*.cu' 'vector|string|map|fmt/|nlohmann/|cub/|cooperative_groups' 'no heavy headers in .cu files'
exit $bad
