#!/usr/bin/env bash
# One tool of compute-sanitizer over op cases on the GPU, in as many processes as there are cores. Ends with the totals;
# any error, any warning, any case that did not run and any process that did not come to its end is a failure.
# usage: scripts/gpu_sanitize.sh TOOL OP_TEST LAUNCHED LOGS
#   TOOL      memcheck, racecheck, synccheck or initcheck
#   OP_TEST   the program
#   LAUNCHED  the folder that op_test wrote as GYRE_LAUNCHED: the smallest case of each class of variants is taken
#   LOGS      a folder for the logs
# GYRE_SANITIZE_PROCESSES (default: cores) and GYRE_SANITIZE_SECONDS (default: 480; 0 or less: none is left) set the limits.
set -uo pipefail
tool=$1 op_test=$2 launched=$3 logs=$4
processes=${GYRE_SANITIZE_PROCESSES:-$(nproc)}
seconds=${GYRE_SANITIZE_SECONDS:-480}
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
rm -rf "$logs/$tool".*
if ((seconds <= 0)); then
  echo "$tool: did not run, no time is left for it"
  exit 1
fi
cases=$logs/$tool.cases
mkdir -p "$logs/$tool.launched"

# Lines are class, bytes, case.
cat "$launched"/cuda_* | sort -t $'\t' -k1,1 -k2,2n | awk -F '\t' '!seen[$1]++ { print $3 }' | sort -u >"$cases"
count=$(wc -l <"$cases")
if [[ $count == 0 ]]; then
  echo "$tool: no cases in $launched"
  exit 1
fi

options=()
if [[ $tool == racecheck ]]; then
  options=(--racecheck-report all)
  # Other barriers, for its sake: docs/notes/racecheck-many-rows.md, and reports with lines.
  export GYRE_NVRTC_OPTIONS="-DGYRE_RACECHECK -lineinfo"
fi
for ((i = 0; i < processes; ++i)); do
  (
    GYRE_CASE_LIST=$cases GYRE_CASES=$i/$processes GYRE_LAUNCHED=$logs/$tool.launched timeout -k 10 "$seconds" \
      "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 1000 "${options[@]}" \
      "$op_test" --gtest_filter='*MatchTheReference*cuda*' >"$logs/$tool.$i.log" 2>&1
    echo $? >"$logs/$tool.$i.status"
  ) &
done
wait

# numbers WORD: the sum of "N word" or "N words" in the summaries; "1 hazard displayed (1 error, 0 warnings)".
numbers() {
  grep -hE '^=+ (RACECHECK|ERROR) SUMMARY' "$logs/$tool".*.log | grep -oE "[0-9]+ $1s?\b" |
    awk '{ sum += $1 } END { print sum + 0 }'
}
errors=$(numbers error)
warnings=$(($(numbers warning) + $(grep -hE '^=+ Warning' "$logs/$tool".*.log | grep -cvE 'Race reported')))
summaries=$(grep -lE '^=+ (RACECHECK|ERROR) SUMMARY' "$logs/$tool".*.log | wc -l)
ran=$(find "$logs/$tool.launched" -type f -exec cut -f 3 {} + | sort -u | wc -l)
passed=$(grep -h '^\[  *PASSED' "$logs/$tool".*.log | wc -l)
failed=$(grep -lvx 0 "$logs/$tool".*.status | wc -l)
echo "$tool: $errors errors, $warnings warnings over $ran of $count cases in $processes processes;" \
  "$summaries ended with a summary, $passed passed, $failed with another status than 0"
late=$(grep -lxE '124|137' "$logs/$tool".*.status | wc -l)
[[ $late == 0 ]] || echo "$tool: $late of $processes processes did not end within $seconds s"
[[ $errors == 0 && $warnings == 0 && $failed == 0 && $ran == "$count" && $summaries == "$processes" && $passed == "$processes" ]]
status=$?
if [[ $status != 0 ]]; then
  grep -hE -A12 '^=+ (Error|Warning|Invalid|Barrier|Uninitialized|Race)|Failure' "$logs/$tool".*.log | head -n 60
fi
exit $status
