#!/usr/bin/env bash
# Runs the tests of a build that counts lines, then prints line coverage of src/, file by file with the lines that did not
# run. Kernels that another compiler takes (CUDA, Metal) are no part of it, emulated or not; headers count where the
# library includes them.
# usage: scripts/coverage.sh BUILD      what is printed is also in BUILD/coverage.txt
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
find "$build" -name '*.gcda' -delete
ctest --preset coverage || echo "coverage: some tests failed; lines are counted all the same"
gcovr --root . --filter 'src/' --exclude 'src/(cuda|metal)/kernels/' --exclude-throw-branches --gcov-ignore-parse-errors \
  --object-directory "$build" --txt "$build/coverage.txt" --print-summary "$build" | grep -E '^lines' || true
cat "$build/coverage.txt"
