#!/usr/bin/env bash
# Builds and tests with the address and undefined-behaviour sanitizers, with the thread sanitizer, and under Valgrind. All of them run
# to their end, also if one finds something. Last come what was left out and why, and a table of results and times.
# usage: scripts/sanitize.sh [arguments for ctest, such as -R 'pool|cache']
set -uo pipefail
cd "$(dirname "$0")/.."

summary=()
failed=0
run() {  # run NAME COMMAND...
  local name=$1 begin=$SECONDS result=ok log
  shift
  log=$(mktemp)
  echo "gyre: $name"
  "$@" 2>&1 | tee "$log" || { result=FAILED; failed=1; }
  summary+=("$(printf '%-7s %5d s  %s' $result $((SECONDS - begin)) "$name: $(grep -E 'tests passed|^valgrind:' "$log")")")
  rm -f "$log"
}
build() {  # build PRESET
  cmake --preset "$1" --log-level=NOTICE && cmake --build --preset "$1"
}

run 'address and undefined behaviour, build' build asan
run 'address and undefined behaviour, tests' ctest --preset asan -j "$(nproc)" "$@"
run 'threads, build' build tsan
run 'threads, tests' scripts/without_aslr.sh ctest --preset tsan -j "$(nproc)" "$@"
# Valgrind has its own list of programs.
if (($# == 0)); then
  cmake --preset release --log-level=NOTICE
  run 'Valgrind, build and tests' scripts/valgrind.sh build/release
fi

for preset in asan tsan; do
  echo "$preset:"
  sed 's/^/  /' build/$preset/sanitized.txt
done
printf '%s\n' "${summary[@]}"
printf '%-7s %5d s\n' all $SECONDS
exit $failed
