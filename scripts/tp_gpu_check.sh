#!/usr/bin/env bash
# One model on two GPUs, from prebuilt binaries, in under 10 minutes: a line for each check, exit 1 if one failed.
#
#   scripts/tp_gpu_check.sh [--bin DIR] [--out FILE] [CHECK...]
#
#   sums     sums over ranks bit for bit, what follows them, ranks that fail                      quern_tests
#   tokens   every format against the CPU; 64 answers of the demo alone, together, through host memory   quern_tests
#   crowd    the same through the server in the 35B's shape; turns that go on from kept states    scripts/serve_gpu_check.sh
#   speed    -tp 1 and -tp 2 on the same cards: answers of 1, 8 and 64 people, prompts of 8K and 32K, how many times as
#            fast, and one sum by itself                                                          quern bench
#   replicas 64 people, 100-token prompts and 200-token answers, through --data-parallel and through one: times, and the same
#            answers                                                                              scripts/serve_gpu_check.sh
#   layers   -sm layer: the bits of one GPU; answers of 1, 8 and 64 people and prompts by layers against one of the cards: times   both
#
# --bin: where quern and quern_tests are (build). --out: the report (tp-gpu-check.txt beside them). In the environment: SHAPE
# (qwen3.6-35b-a3b), MIX (aeon), RANKS (2), SPLIT (1,1), NGL (all), PROMPTS, ANSWER, PEOPLE, REPEATS. On a CPU, to try the script:
#
#   NGL=0 SHAPE=tiny PROMPTS=64,128 ANSWER=8 PEOPLE=1,2 REPEATS=1 scripts/tp_gpu_check.sh speed layers
#   NGL=0 SHAPE=tiny PEOPLE=4 ANSWER_TOKENS=20 CROWD=8 CROWD_ANSWER=8 REPLICAS_FACTOR=0.5 scripts/tp_gpu_check.sh replicas
set -u -o pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build out='' checks=()
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    -h|--help) sed -n '2,19p' "$0"; exit 0 ;;
    -*) echo "tp-gpu-check: unknown flag $1 (--help lists them)"; exit 2 ;;
    *) checks+=("$1"); shift ;;
  esac
done
[ ${#checks[@]} -gt 0 ] || checks=(sums tokens crowd speed replicas layers)
bin=$(cd "$bin" && pwd) || exit 2
out=${out:-$bin/tp-gpu-check.txt}
shape=${SHAPE:-qwen3.6-35b-a3b} mix=${MIX:-aeon} ranks=${RANKS:-2} ngl=${NGL:-all}
[ -x "$bin/quern" ] || { echo "tp-gpu-check: no $bin/quern; build it first, or name its directory with --bin"; exit 2; }
export QUERN_SOURCE_DIR=$root
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

tests() { timeout -k 5 300 "$bin/quern_tests" --no-colors -s -ts=cuda,gpus "$@"; }

# bench N: a line "test<tab>median" for each measurement with N ranks; what the group says of its sums goes to standard error.
bench() {
  timeout -k 5 300 "$bin/quern" bench --synthetic "$shape" --mix "$mix" -ngl "$ngl" -tp "$1" -v \
    -p "${PROMPTS:-8192,32768}" -n "${ANSWER:-64}" -np "${PEOPLE:-1,8,64}" -r "${REPEATS:-3}" |
    awk -F' *[|] *' '/±/ { print $7 "\t" $9 }'
}

# Both on the machine as it is now, the larger number first and last: a card that warms up shows.
speed() {
  if ! { bench "$ranks" >"$logs/several" && bench 1 >"$logs/one" && bench "$ranks" >"$logs/again"; } 2>"$logs/verbose"; then
    cat "$logs/verbose"
    return 1
  fi
  grep -m1 -oE 'added up in.*|[0-9]+ x .*' "$logs/verbose" | sed 's/^/group: /'
  printf '%-16s %12s %12s %12s %8s\n' test "-tp 1" "-tp $ranks" "again" times
  paste "$logs/one" "$logs/several" "$logs/again" | awk -F'\t' '
    { best = $4 > $6 ? $4 : $6; printf "%-16s %12.1f %12.1f %12.1f %8.2f\n", $1, $2, $4, $6, best / $2 }'
}

# by_layers ARGS: a line "test<tab>median<tab>hash of the tokens" for answers and prompts.
by_layers() {
  timeout -k 5 300 "$bin/quern" bench --synthetic "$shape" --mix "$mix" -ngl "$ngl" "$@" \
    -p "${PROMPTS:-8192,32768}" -n "${ANSWER:-64}" -np "${PEOPLE:-1,8,64}" -r "${REPEATS:-3}" -v 2>>"$logs/verbose" |
    awk -F' *[|] *' '/±/ { print $7 "\t" $9 "\t" $(NF - 1) }'
}

# Half of the layers on each of two cards against all on the first: the same tokens, and how fast.
layers() {
  if [ "$ngl" != 0 ]; then
    tests -tc="gpu stages:*" >"$logs/stages" || { cat "$logs/stages"; return 1; }
    grep -E '\[doctest\] (test cases|assertions)' "$logs/stages"
  fi
  : >"$logs/verbose"
  if ! { by_layers -ts "${SPLIT:-1,1}" >"$logs/split" && by_layers -ts 1 >"$logs/one" && [ -s "$logs/one" ]; }; then
    cat "$logs/verbose"
    return 1
  fi
  grep -m1 -oE '[0-9]+ devices by layers.*' "$logs/verbose" | sed 's/^/group: /'
  paste "$logs/one" "$logs/split" | awk -F'\t' '
    { same = $3 != "" && $3 == $6; all += !same
      printf "%-10s one %10.1f  by layers %10.1f  %6.2f times  tokens %s\n", $1, $2, $5, $5 / $2, same ? "equal" : "DIFFER" }
    END { exit all > 0 }'
}

run() {
  case $1 in
    sums) tests -tc="*all_reduce*,sums over ranks*,gpu ranks: one that fails*" ;;
    tokens) tests -tc="gpu ranks: the logits*,gpu ranks: answers alone*,gpu ranks: the same bits*" ;;
    crowd)
      SERVER="--synthetic $shape --mix $mix -ngl $ngl -tp $ranks -np 64 -c 40960 --cache-ram 16384" \
        "$root/scripts/serve_gpu_check.sh" --bin "$bin" follow-up crowd ;;
    speed) speed ;;
    replicas)
      SERVER="--synthetic $shape --mix $mix -ngl $ngl -np 64 -c 8192 --cache-ram 16384" REPLICAS=$ranks PEOPLE=${PEOPLE:-64} LIMIT=290 \
        "$root/scripts/serve_gpu_check.sh" --bin "$bin" replicas ;;
    layers) layers ;;
    *) echo "tp-gpu-check: unknown check '$1'"; return 2 ;;
  esac
}

# What of a check's output belongs below its line.
details() {
  case $1 in
    sums|tokens) grep -E 'MESSAGE|ERROR|values:|\[doctest\] (test cases|assertions)' | sed 's/^.*MESSAGE: //' ;;
    *) cat ;;
  esac
}

{
  echo "quern tp-gpu-check, $(date -u +%F\ %H:%M) UTC, $ranks ranks, $shape $mix"
  nvidia-smi --query-gpu=index,name,memory.total,driver_version,clocks.sm --format=csv,noheader 2>/dev/null
  nvidia-smi topo -m 2>/dev/null | head -12
} | tee "$out"
failed=0
for check in "${checks[@]}"; do
  at=$SECONDS
  run "$check" >"$logs/$check" 2>&1
  code=$?
  verdict=ok
  [ $code -eq 0 ] || { verdict="FAILED ($code)"; failed=1; }
  { echo "$check: $verdict, $((SECONDS - at)) s"; details "$check" <"$logs/$check" | tail -60; } | tee -a "$out"
done
exit $failed
