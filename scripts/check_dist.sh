#!/usr/bin/env bash
# The packed binary answers from an empty folder with an empty environment: check_dist.sh ARCHIVE.
set -euo pipefail
archive=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
tar xzf "$archive"
root=$work/$(basename "$archive" .tar.gz)
failed=0
check() {  # what, command ...
  local what=$1
  shift
  if "$@"; then echo "ok: $what"; else echo "ERROR: $what"; failed=1; fi
}

answers() {
  local answer
  answer=$(env -i "$root/bin/quern" run -p 'What is 48 + 37?' --temp 0 2>errors) && [[ $answer == *85* ]] ||
    { echo "answer: $answer"; cat errors; return 1; }
}
sees() {
  local answer
  answer=$(env -i "$root/bin/quern" run --image "$root/share/quern/models/demo/drawing.png" -p 'What do you see?' --temp 0 2>errors) &&
    [[ $answer == 'An orange 4.' ]] || { echo "answer: $answer"; cat errors; return 1; }
}
needs_libc_only() {
  local others
  others=$(ldd "$root/bin/quern" | awk '{print $1}' | grep -vE '^(linux-vdso|libc|libm)\.so|/ld-linux' || true)
  [ -z "$others" ] || { echo "it needs: $others"; return 1; }
}
is_complete() {
  local file
  for file in README.md LICENSE licenses/{cpp-httplib,libfmt-dev,libpcre2-dev,libedit-dev,libjs-katex} \
    share/quern/models/demo/{model.safetensors,model_vision.safetensors,drawing.png,tokenizer.json}; do
    [ -s "$root/$file" ] || { echo "it lacks $file"; return 1; }
  done
  grep -q 'GCC RUNTIME LIBRARY EXCEPTION' "$root/licenses/libstdc++-and-libgcc"
}

check "answers with the demo that it brings" answers
check "sees the picture that it brings" sees
check "needs libc and libm only" needs_libc_only
check "demo and licences are complete" is_complete
exit $failed
