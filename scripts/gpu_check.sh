#!/usr/bin/env bash
# Everything that needs a GPU, from prebuilt binaries, in some 15 minutes: one line a check, exit 1 if one failed.
#
#   scripts/gpu_check.sh [--bin DIR] [--out FILE] [--scratch DIR] [CHECK...]
#
#   ops      every op against the CPU's, same cases            quern_tests
#   small    the same with the shared memory of a card of sm_86, 89 or 120, and without products of warpgroups
#   parity   tiny checkpoints against transformers' vectors    quern_tests
#   demo     greedy answers to 200 prompts: the CPU's          quern_tests
#   alone    answers alone and beside others, op by op too; prompts in steps of 512 to 8,192 rows   quern_tests
#   drift    10,240 tokens in chunks and one by one            quern_tests
#   layouts  what the kernels cannot read as it is stored      quern_tests
#   doctor   sound on the demo, and red with every fault       quern_tests
#   logits   35B-shaped random weights against transformers    quern, python3 with torch and transformers
#   logits-nvidia, logits-fp8, logits-27b                      the same
#            in nvidia's mix, in Qwen's FP8, of the 27B in nvidia's mix
#   dense    8 layers of the 27B's shape, the same             quern, python3 with torch and transformers
#   wgmma    machine code: registers of products of warpgroups quern, python3, cuobjdump (else left out)
#   speed    the table of 35B-shaped random weights, 27B too   quern
#
# --bin: where quern and quern_tests are (build). --out: the report (gpu-check.txt beside them). --scratch: room for a
# checkpoint of 22 GB while `logits` runs, of 36 GB for `logits-fp8` (/dev/shm). PYTHON: the interpreter.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
bin=$root/build out='' scratch=/dev/shm checks=()
while [ $# -gt 0 ]; do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --scratch) scratch=$2; shift 2 ;;
    -h|--help) sed -n '2,22p' "$0"; exit 0 ;;
    -*) echo "gpu-check: unknown flag $1 (--help lists them)"; exit 2 ;;
    *) checks+=("$1"); shift ;;
  esac
done
[ ${#checks[@]} -gt 0 ] || checks=(ops small parity demo alone drift layouts doctor logits logits-nvidia
  logits-fp8 logits-27b dense wgmma speed)
bin=$(cd "$bin" && pwd) || exit 2
out=${out:-$bin/gpu-check.txt}
for program in quern quern_tests; do
  [ -x "$bin/$program" ] ||
    { echo "gpu-check: no $bin/$program; build it first, or name its directory with --bin"; exit 2; }
done
card=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader -i 0 2>/dev/null) ||
  { echo "gpu-check: nvidia-smi finds no GPU; run this on a GPU machine"; exit 5; }
export QUERN_SOURCE_DIR=$root PYTHONUNBUFFERED=1
logs=$(mktemp -d) checkpoint=
trap 'rm -rf "$logs" "$checkpoint"' EXIT

tests() { timeout -k 5 300 "$bin/quern_tests" --no-colors "$@"; }

# As many layers of the full width, `most` at best, as fit the card in float32, transformers' side. Units of 100 MB: a
# layer, and what does not depend on their number.
layers_that_fit() {
  local most=$1 layer=$2 beside=$3 mib layers
  mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits -i 0)
  layers=$(((mib * 1048576 / 100000000 - beside) / layer))
  [ "$layers" -gt "$most" ] && layers=$most
  [ "$layers" -lt 1 ] && layers=1
  echo "$layers"
}
moe_layers() { layers_that_fit 40 34 100; }
dense_layers() { layers_that_fit 64 16 165; }

# compare_bf16 SHAPE...: flags of make_synthetic_checkpoint.py
compare_bf16() {
  local python=${PYTHON:-python3} verdict=0
  checkpoint=$(mktemp -d "$scratch/quern-XXXXXX") || return 1
  "$python" "$root/scripts/make_synthetic_checkpoint.py" "$checkpoint" "$@" &&
    timeout -k 5 240 "$python" "$root/scripts/compare_bf16.py" "$checkpoint" --quern "$bin/quern" --extra -ngl all ||
    verdict=1
  rm -rf "$checkpoint"
  return "$verdict"
}

speed() {
  local bench=(timeout -k 5 120 "$bin/quern" bench --synthetic qwen3.6-35b-a3b -ngl all)
  "${bench[@]}" -p 2048,8192,32768 -n 64 -np 1,8,32,64 -r 3 &&
    "${bench[@]}" -p 0 -n 64 -d 32768 -r 2 &&
    "${bench[@]}" --mix xs -p 0 -n 64 -r 3 &&
    "${bench[@]}" --mix nvidia -p 2048 -n 64 -np 1,8 -r 3 &&
    "${bench[@]}" --mix qwen-fp8 -p 2048 -n 64 -np 1,8 -r 3 &&
    "${bench[@]/35b-a3b/27b-shape}" --mix nvidia -p 2048 -n 64 -np 1,8 -r 3 &&
    "${bench[@]/35b-a3b/27b-shape}" -p 2048 -n 64 -np 1,8 -r 3
}

run() {
  case $1 in
    ops) tests -ts=cuda -tce="gpu model*" ;;
    small) QUERN_TEST_SHARED_BYTES=101376 tests -ts=cuda -tce="gpu model*" ;;
    parity) tests -ts=cuda -tc="gpu model: parity*" ;;
    demo) tests -ts=cuda -tc="gpu model: greedy*" ;;
    alone) tests -ts=cuda -tc="gpu model: a sequence alone*,gpu model: every op*,gpu model: a prompt*" ;;
    drift) tests -ts=cuda -tc="gpu model: no drift*" ;;
    layouts) tests -ts=cuda -tc="gpu model: layouts*" ;;
    doctor) tests -ts=cuda -tc="gpu model: the doctor*" ;;
    logits) compare_bf16 --layers "$(moe_layers)" ;;
    logits-nvidia) compare_bf16 --mix nvidia --layers "$(moe_layers)" ;;
    logits-fp8) compare_bf16 --mix qwen-fp8 --layers "$(moe_layers)" ;;
    logits-27b) compare_bf16 --mix nvidia --dense --layers "$(dense_layers)" ;;
    dense) compare_bf16 --dense --layers 8 ;;
    wgmma) "${PYTHON:-python3}" "$root/scripts/check_wgmma.py" "$bin/quern" ;;
    speed) speed ;;
    *) echo "gpu-check: unknown check '$1'"; return 2 ;;
  esac
}

# What of a check's output belongs into its line; its details go into the report.
headline() {
  case $1 in
    ops|small|parity|layouts|doctor) grep -E '^\[doctest\] (test cases|assertions)' ;;
    demo|alone) grep -oE '[0-9]+ of [0-9]+ answers equal.*' ;;
    drift) grep -oE 'state error of the first layer at most .*' ;;
    logits*|dense) grep -E '^limits' ;;
    wgmma) grep -oE '^check-wgmma: .*' ;;
    speed) grep -cE '^\|.*±' | sed 's/$/ rows/' ;;
  esac | sed 's/^\[doctest\] //' | tr -s ' ' | paste -sd';'
}

details() {
  case $1 in
    logits*|dense) grep -vE '^\[|Warning' ;;
    speed) grep -E '^\|' ;;
    wgmma) cat ;;
    ops|small|parity|layouts|doctor) grep -E '^TEST CASE|ERROR|THREW|values:|logged|error <' | tail -60 ;;
    *) grep -oE '(MESSAGE|ERROR): .*' | tail -60 ;;
  esac
}

{
  echo "quern gpu-check, $(date -u +%F\ %H:%M) UTC"
  echo "card, memory, driver: $card"
  echo "$("$bin/quern" --version 2>/dev/null | head -1), $(git -C "$root" rev-parse --short HEAD 2>/dev/null)"
  nvidia-smi --query-gpu=temperature.gpu,clocks.sm,clocks_event_reasons.active,memory.used --format=csv,noheader -i 0 |
    sed 's/^/before: temperature, SM clock, throttle reasons, memory used: /'
} | tee "$out"
failed=0 skipped=0 begun=$SECONDS
for check in "${checks[@]}"; do
  at=$SECONDS
  run "$check" >"$logs/$check" 2>&1
  case $? in
    0) verdict=ok ;;
    77) verdict=skip skipped=$((skipped + 1)) ;;
    *) verdict=FAIL failed=$((failed + 1)) ;;
  esac
  line=$(headline "$check" <"$logs/$check")
  [ -n "$line" ] || line=$({ grep -E 'ERROR|error' "$logs/$check" || grep -v '^ *$' "$logs/$check"; } | tail -1)
  printf '%-4s %-13s %3d s  %s\n' "$verdict" "$check" $((SECONDS - at)) "$line" | tee -a "$out"
done
summary="$((${#checks[@]} - failed - skipped)) of ${#checks[@]} checks passed in $((SECONDS - begun)) s"
[ "$skipped" -eq 0 ] || summary="$summary, $skipped left out"
echo "$summary" | tee -a "$out"
for check in "${checks[@]}"; do
  printf '\n-- %s\n' "$check"
  details "$check" <"$logs/$check"
done >>"$out"
echo "report: $out"
[ "$failed" -eq 0 ]
