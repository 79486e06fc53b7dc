#!/usr/bin/env bash
# The server's promises on a GPU, from a prebuilt binary, in under 4 minutes: one short table, exit 1 if one is broken.
#
#   scripts/serve_gpu_check.sh [--bin DIR] [--json FILE] [CHECK...]
#
#   follow-up   a turn after a long conversation: time to its first token, and the tokens of a cold run; the same after a
#               restart with --cache-dir
#   crowd       64 requests alone and together: the same answers and log-probabilities; greedy, and drawn with a seed; before it
#               4 of them alone twice, and 2 together; follow-ups that go on from the states that the crowd left: the
#               answers of a cold run
#   structure   what a JSON schema costs in tokens a second, 1 and 16 at once
#   load        people at once from 1 to 64 with short prompts: tokens a second, times to the first and between tokens
#   long        a long prompt that comes while 63 others are answered: the times between their tokens
#   requests    how many there were in all; none may fail
#   replicas    only if named, on several GPUs: people at once through --data-parallel and through one, how many times as fast; the
#               same answers, also to follow-ups
#
# --bin: where quern is (build). --json: also write what was measured there. Sizes and what is wanted can be set in the
# environment, for another card: SERVER (flags of quern serve), CONTEXT_TOKENS, LONG_TOKENS, PEOPLE, ANSWER_TOKENS, REQUESTS,
# REPLICAS, REPLICAS_FACTOR, CROWD, CROWD_PROMPT, CROWD_ANSWER, FORM_COST, FOLLOW_UP_MS, GAP_MS, TOKENS_A_SECOND. On a CPU:
#
#   SERVER="--synthetic tiny -np 8 -c 2048" CONTEXT_TOKENS=900 LONG_TOKENS=900 PEOPLE=1,4 ANSWER_TOKENS=20 REQUESTS=60 \
#     CROWD=24 CROWD_PROMPT=70,400 CROWD_ANSWER=16 FORM_COST=50 FOLLOW_UP_MS=1000 GAP_MS=1000 TOKENS_A_SECOND=1 scripts/serve_gpu_check.sh
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build json=/dev/null
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --json) json=$2; shift 2 ;;
    -*) sed -n '2,23p' "$0"; exit 2 ;;
    *) break ;;
  esac
done
[ -x "$bin/quern" ] || { echo "serve-gpu-check: no $bin/quern; build it first, or name its directory with --bin"; exit 2; }
exec timeout -k 5 "${LIMIT:-235}" python3 "$root/scripts/serve_gpu_check.py" "$bin/quern" "$json" "$@"
