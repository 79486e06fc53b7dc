#!/usr/bin/env bash
# Builds the libFuzzer targets with clang and runs each for the given number of seconds. Fails on the first finding.
set -euo pipefail
seconds=${1:-60}
cd "$(dirname "$0")/.."
scripts/install-deps.sh clang
cmake -S . -B build-fuzz -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS="-O1 -g1" -DCMAKE_CXX_COMPILER=clang++ -DQUERN_FUZZ=ON \
  -DQUERN_TESTS=OFF -DQUERN_CUDA=OFF -DQUERN_SANITIZE=address,undefined >/dev/null
cmake --build build-fuzz -j "$(nproc)" --target fuzzers
status=0
for target in build-fuzz/fuzz_*; do
  [ -x "$target" ] && [ -f "$target" ] || continue
  name=$(basename "$target")
  mkdir -p "build-fuzz/corpus/$name"
  seeds=tests/fuzz/seeds/$name
  echo "== $name, $seconds s"
  "$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=3000 -max_len=65536 -print_final_stats=0 \
    -verbosity=0 -artifact_prefix=build-fuzz/ "build-fuzz/corpus/$name" $([ -d "$seeds" ] && echo "$seeds") ||
    { echo "$name found something: see build-fuzz/crash-*"; status=1; }
done
exit $status
