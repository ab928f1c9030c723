#!/usr/bin/env bash
# scripts/gpu_sanitize.sh with a stand-in for compute-sanitizer: which cases it takes, and what it fails for.
# usage: gpu_sanitize_test.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/launched"
cp "$here/fake_compute_sanitizer.sh" "$folder/bin/compute-sanitizer"
chmod +x "$folder/bin/compute-sanitizer"
export PATH=$folder/bin:$PATH GYRE_SANITIZE_PROCESSES=2

# Two files, as two processes write them; the smaller case of a class is taken, a case once.
printf 'attention_decode rows=4\t900\tattention#1 large\nattention_decode rows=8\t50\tattention#2 both\n' >"$folder/launched/cuda_0.1"
printf 'attention_decode rows=4\t70\tattention#3 small\nattention_decode k=tq4\t50\tattention#2 both\n' >"$folder/launched/cuda_0.2"
printf 'attention rows=4\t1\tattention#9 of the cpu\n' >"$folder/launched/cpu_NEON_1_threads.3"

run() {  # run TOOL: the exit status
  local status=0
  "$here/../../scripts/gpu_sanitize.sh" "$1" true "$folder/launched" "$folder/logs" >"$folder/output" 2>&1 || status=$?
  echo $status
}
expect() {  # expect WHAT WANTED GOT
  if [[ $2 != "$3" ]]; then
    echo "$1: wanted $2, got $3"
    cat "$folder/output"
    exit 1
  fi
}

expect "clean memcheck" 0 "$(run memcheck)"
expect "the cases" "attention#2 both,attention#3 small" "$(cut -f 3 "$folder"/logs/memcheck.launched/* | sort | paste -sd,)"
expect "the totals" 1 "$(grep -c '^memcheck: 0 errors, 0 warnings over 2 of 2 cases in 2 processes' "$folder/output")"
expect "kernels as they are" "options: " "$(grep -h '^options' "$folder"/logs/memcheck.*.log | sort -u)"
expect "clean racecheck" 0 "$(run racecheck)"
expect "kernels for racecheck" "options: -DGYRE_RACECHECK -lineinfo" "$(grep -h '^options' "$folder"/logs/racecheck.*.log | sort -u)"

export FAKE_SKIP='attention#3 small'
expect "a case that did not run" 1 "$(run memcheck)"
expect "the cases left" 1 "$(grep -c 'over 1 of 2 cases' "$folder/output")"
unset FAKE_SKIP

passed='[  PASSED  ] 3 tests.'
export FAKE_PART=1
FAKE_LINES="$passed"$'\n''========= ERROR SUMMARY: 1 error' FAKE_STATUS=99
export FAKE_LINES FAKE_STATUS
expect "an error" 1 "$(run memcheck)"
expect "its total" 1 "$(grep -c '^memcheck: 1 errors' "$folder/output")"
FAKE_STATUS=0
expect "an error without a status" 1 "$(run memcheck)"
FAKE_LINES="$passed"$'\n''========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)'
expect "warnings of racecheck" 1 "$(run racecheck)"
expect "their total" 1 "$(grep -c '^racecheck: 0 errors, 2 warnings' "$folder/output")"
FAKE_LINES="$passed"$'\n''========= Warning: something else'$'\n''========= ERROR SUMMARY: 0 errors'
expect "another warning" 1 "$(run synccheck)"
FAKE_LINES="$passed"
expect "no summary" 1 "$(run synccheck)"
FAKE_LINES='========= ERROR SUMMARY: 0 errors'
expect "tests that did not pass" 1 "$(run synccheck)"
FAKE_LINES="$passed"$'\n''========= ERROR SUMMARY: 0 errors' FAKE_STATUS=1
expect "a test that failed" 1 "$(run synccheck)"
FAKE_LINES="$passed"$'\n''========= ERROR SUMMARY: 0 errors' FAKE_STATUS=0
expect "the same in time" 0 "$(run synccheck)"
export FAKE_SECONDS=60 GYRE_SANITIZE_SECONDS=1
expect "a process that takes too long" 1 "$(run synccheck)"
expect "its reason" 1 "$(grep -c '^synccheck: 1 of 2 processes did not end within 1 s' "$folder/output")"
FAKE_SECONDS=0 GYRE_SANITIZE_SECONDS=-3
expect "no time left" 1 "$(run synccheck)"
expect "that it did not run" 1 "$(grep -c '^synccheck: did not run' "$folder/output")"
unset GYRE_SANITIZE_SECONDS
FAKE_PART=none
rm "$folder/launched"/cuda_*
expect "no cases" 1 "$(run memcheck)"
