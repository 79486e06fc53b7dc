#!/usr/bin/env bash
# Images on a GPU, from prebuilt binaries, in some 3 minutes: a line for each thing that is measured, exit 1 if one falls short.
#
#   scripts/vision_gpu_check.sh [--bin DIR] [CHECK...]
#
#   tests    features and logits against transformers and its BF16, parts of large images, videos, FP8   quern_tests
#   tower    times of a full-size tower of random weights                                        quern_tests
#   first    time to the first token of a question about an image of 1024 x 1024 pixels, another one each time
#   gaps     the times between tokens of 31 answers while images of 1024 x 1024 pixels come, and one of 4096 x 4096
#
# --bin: where quern and quern_tests are (build). In the environment: SERVER (flags of quern serve), SIDE and LARGE (pixels), PEOPLE.
# On a CPU, where the times mean nothing:
#
#   SERVER="--synthetic tiny+vision -np 4 -c 8192 -ngl 0" SIDE=256 LARGE=512 PEOPLE=3 scripts/vision_gpu_check.sh first gaps
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    -*) sed -n '2,16p' "$0"; exit 2 ;;
    *) break ;;
  esac
done
[ -x "$bin/quern" ] || { echo "vision-gpu-check: no $bin/quern; build it first, or name its directory with --bin"; exit 2; }
exec python3 "$root/scripts/vision_gpu_check.py" "$bin" "$@"
