#!/usr/bin/env bash
# Builds targets with clang under AddressSanitizer and UndefinedBehaviorSanitizer in build-asan: sanitized_build.sh TARGET...
# Tests and fuzz targets share one build: most of its time goes into the libraries, which both need.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install-deps.sh
scripts/install-deps.sh clang libclang-rt-dev lld
cmake -S . -B build-asan -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS="-O1 -g1" -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld \
  -DQUERN_CUDA=OFF -DQUERN_FUZZ=ON -DQUERN_SANITIZE=address,undefined >/dev/null
cmake --build build-asan -j "${JOBS:-$(nproc)}" --target "$@"
