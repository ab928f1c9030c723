#!/usr/bin/env bash
# Tests what `make sanitize` has built: address and undefined-behaviour sanitizers, thread sanitizer, Valgrind. All of them run to their
# end, also if one finds something; a table of results and times is last.
# usage: scripts/sanitize.sh [arguments for ctest, such as -R 'pool|cache']
set -uo pipefail
cd "$(dirname "$0")/.."

summary=()
failed=0
run() {
  local name=$1 begin=$SECONDS result=ok
  shift
  echo "gyre: $name"
  "$@" || { result=FAILED; failed=1; }
  summary+=("$(printf '%-7s %5d s  %s' $result $((SECONDS - begin)) "$name")")
}

run 'address and undefined behaviour' ctest --preset asan "$@"
run 'threads' scripts/without_aslr.sh ctest --preset tsan "$@"
# Valgrind has its own list of programs.
(($# > 0)) || run 'Valgrind' scripts/valgrind.sh build/release
printf '%s\n' "${summary[@]}"
exit $failed
