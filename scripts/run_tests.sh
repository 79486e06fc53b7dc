#!/usr/bin/env bash
# The cases of a doctest program in as many processes as there are cores, a few cases each: run_tests.sh PROGRAM [FILTER ...]
# Prints what failed, and one summary of all in doctest's words. QUERN_JOBS: another number of processes.
set -uo pipefail
each=6
count=$("$@" --count | grep -oE 'current filters: [0-9]+' | grep -oE '[0-9]+$')
[ "${count:-0}" -gt 0 ] || { echo "$1: no test case passes the filters"; exit 1; }
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# A process that crashes, or fails outside a case, says so by its exit code alone.
run_some() {  # first, last, log, program, filter ...
  local first=$1 last=$2 log=$3
  shift 3
  "$@" --first="$first" --last="$last" --duration=true >"$log" 2>&1 && return
  local bad
  bad=$(grep -aE '\[doctest\] test cases:' "$log" | grep -oE '[0-9]+ failed' | grep -oE '[0-9]+')
  [ "${bad:-0}" -gt 0 ] || { bad=1 && echo "ERROR: cases $first to $last ended without a result" >>"$log"; }
  echo "$bad" >"$log.failed"
}
export -f run_some

seq 1 "$each" "$count" | xargs -P "${QUERN_JOBS:-$(nproc)}" -I{} bash -c \
  'run_some "$2" "$(($2 + $3 - 1))" "$1/$2" "${@:4}"' - "$logs" {} "$each" "$@"

failed=0
for log in "$logs"/*.failed; do
  [ -e "$log" ] || continue
  grep -avE '^[0-9.]+ s: |^\[doctest\] (doctest version|run with)' "${log%.failed}"
  bad=$(cat "$log")
  failed=$((failed + ${bad:-1}))
done
# Each group ends with doctest's summary, or is among those above: xargs stops early if one of its shells is killed.
for first in $(seq 1 "$each" "$count"); do
  [ -e "$logs/$first.failed" ] || grep -aqE '\[doctest\] test cases:' "$logs/$first" 2>/dev/null && continue
  echo "ERROR: cases $first to $((first + each - 1)) did not run"
  failed=$((failed + 1))
done
echo "slowest:"
cat "$logs"/* | grep -aE '^[0-9.]+ s: ' | sort -rn | head -n 5
echo "[doctest] test cases: $count | $((count - failed)) passed | $failed failed"
[ "$failed" = 0 ]
