#!/usr/bin/env bash
# Builds the libFuzzer targets with clang and runs each for the given number of seconds, as many at a time as there are
# processors. Fails if one finds something. What was learnt stays in build-asan/corpus for the next time.
set -euo pipefail
seconds=${1:-60}
cd "$(dirname "$0")/.."
scripts/sanitized_build.sh fuzzers

run_target() {  # name, seconds
  local name=$1 log=build-asan/$1.log
  mkdir -p "build-asan/corpus/$name"
  if "build-asan/$name" -max_total_time="$2" -timeout=10 -rss_limit_mb=3000 -max_len=65536 -print_final_stats=1 \
    -verbosity=0 -artifact_prefix="build-asan/$name-" "build-asan/corpus/$name" "tests/fuzz/seeds/$name" >"$log" 2>&1
  then
    echo "$name: $2 s, $(awk '/number_of_executed_units/ {print $2}' "$log") inputs, nothing found"
  else
    tail -n 40 "$log"
    echo "$name FOUND SOMETHING. Again: build-asan/$name build-asan/$name-*"
    return 1
  fi
}
export -f run_target

for source in tests/fuzz/fuzz_*.cpp; do basename "$source" .cpp; done |
  xargs -P "$(nproc)" -I{} bash -c "run_target {} $seconds"
