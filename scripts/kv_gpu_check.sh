#!/usr/bin/env bash
# Packed KV caches on a GPU, from prebuilt binaries, in some 6 minutes: a line for each thing that is measured, exit 1 if one falls
# short of what is wanted beside BF16 on the same card.
#
#   scripts/kv_gpu_check.sh [--bin DIR] [--json FILE] [CHECK...]
#
#   ops      attention over packed caches against double precision, planted keys up to 262,144 tokens   quern_tests
#   decode   one answer after 32K, 128K and 250K tokens
#   together 32 answers at once, each after 12K tokens
#   prefill  a prompt of 32K tokens
#   drafts   the same 256 tokens with drafts and without, and how many drafts are accepted
#   crowd    64 requests alone and together, and their next turns (serve_gpu_check.sh crowd), in each format
#
# --bin: where quern and quern_tests are (build). In the environment, for another model or card: MODEL (flags of quern bench), DEPTHS
# (three), TOGETHER (answers, depth), PROMPT, SERVER (flags of quern serve, for crowd), TYPES. On a CPU, where the speeds mean nothing:
#
#   MODEL="--synthetic tiny -ngl 0" DEPTHS=64,128,256 TOGETHER=4,64 PROMPT=256 scripts/kv_gpu_check.sh decode together prefill drafts
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build json=/dev/null
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --json) json=$2; shift 2 ;;
    -*) sed -n '2,20p' "$0"; exit 2 ;;
    *) break ;;
  esac
done
[ -x "$bin/quern" ] || { echo "kv-gpu-check: no $bin/quern; build it first, or name its directory with --bin"; exit 2; }
exec python3 "$root/scripts/kv_gpu_check.py" "$bin" "$json" "$@"
