#!/usr/bin/env bash
# Stands in for compute-sanitizer over op_test: prints what FAKE_LINES says for the part of the cases that FAKE_PART names, a
# clean summary for all others, and notes the cases it was given as op_test does; those that FAKE_SKIP names it leaves out.
# That part takes FAKE_SECONDS.
while [[ $# -gt 0 && $1 == --* ]]; do
  [[ $1 == --tool ]] && tool=$2
  [[ $1 == --error-exitcode || $1 == --print-limit || $1 == --tool || $1 == --racecheck-report ]] && shift
  shift
done
part=${GYRE_CASES%/*} parts=${GYRE_CASES#*/}
awk -v part="$part" -v parts="$parts" -v skip="${FAKE_SKIP:-}" -v OFS='\t' \
  '(NR - 1) % parts == part && $0 != skip { print "class", 1, $0 }' "$GYRE_CASE_LIST" >"$GYRE_LAUNCHED/cuda_0.$$"
echo "========= COMPUTE-SANITIZER"
[[ $part != "${FAKE_PART:-none}" ]] || sleep "${FAKE_SECONDS:-0}"
echo "options: ${GYRE_NVRTC_OPTIONS:-}"
if [[ $part == "${FAKE_PART:-none}" ]]; then
  printf '%s\n' "$FAKE_LINES"
  exit "${FAKE_STATUS:-0}"
fi
echo "[  PASSED  ] 3 tests."
if [[ $tool == racecheck ]]; then
  echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
else
  echo "========= ERROR SUMMARY: 0 errors"
fi
