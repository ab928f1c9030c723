#!/usr/bin/env bash
# Runs clang-tidy over every file that a configured build compiles, one process per core.
# usage: scripts/tidy.sh <build folder> [files...]
set -euo pipefail
cd "$(dirname "$0")/.."

build=$1
shift
if [[ $# -eq 0 ]]; then
  mapfile -t files < <(sed -n 's/^ *"file": "\(.*\)".*$/\1/p' "$build/compile_commands.json" | sort -u)
else
  files=("$@")
fi

# Output is held back per file, so that parallel reports do not mix and clean files say nothing but their name.
# Kernels: one SIMD target is enough, the others are the same source again; and no path analysis, which takes half a
# minute a file there and has nothing to find in code without ownership.
check() {
  local report status=0 options=()
  if grep -q '"hwy/foreach_target.h"' "$2"; then
    options=(--extra-arg=-DHWY_COMPILE_ONLY_STATIC '--checks=-clang-analyzer-*')
  fi
  report=$(clang-tidy -p "$1" --quiet "${options[@]}" "$2" 2>&1) || status=$?
  if [[ $status -ne 0 ]]; then
    printf '%s\n' "$report" | grep -v ' warnings\? generated\.$\|^Suppressed ' || true
    echo "tidy: FAILED ${2#"$PWD"/}"
  else
    echo "tidy: ok ${2#"$PWD"/}"
  fi
  return "$status"
}
export -f check

printf '%s\0' "${files[@]}" | xargs -0 -P "$(nproc)" -I{} bash -c 'check "$0" "$1"' "$build" {}
