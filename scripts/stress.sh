#!/usr/bin/env bash
# Runs every attack of tests/stress, for about so many seconds in all, and prints what was tried (docs/reliability.md).
# usage: scripts/stress.sh BUILD [SECONDS] [SEED]      SECONDS: 600 if not given; SEED: of the day if not given
set -uo pipefail
build=$1 seconds=${2:-600} seed=${3:-$(date +%Y%m%d)}
tests=$build/tests/stress
summary=()
status=0

attack() {  # attack NAME COMMAND...: its last line that says what was done goes into the summary
  local name=$1 begin=$SECONDS log
  shift
  log=$(mktemp)
  echo "== $name: $*"
  if "$@" 2>&1 | tee "$log"; then
    summary+=("ok      $((SECONDS - begin)) s  $name: $(grep -E '^(api_fuzz|life|[0-9]+ (steps|mutations)|\[  PASSED)' "$log" | head -n 1)")
  else
    summary+=("FAILED  $((SECONDS - begin)) s  $name: $(tail -n 1 "$log")")
    status=1
  fi
  rm -f "$log"
}

# Those with a fixed amount of work come first; what is left is shared by those without an end.
attack "files" "$tests/file_test" --gtest_brief=1
attack "snapshots" "$build/tests/fuzz/snapshot_fuzz_test"
attack "forks" "$build/tests/fork_test" --gtest_brief=1
attack "interrupts" "$build/tests/interrupt_test" --gtest_brief=1
stride=$((seconds >= 300 ? 1 : 301 - seconds))  # every allocation takes minutes
attack "allocations" env GYRE_STRESS_STRIDE=$stride "$tests/allocation_test" --gtest_brief=1
attack "allocations of the CUDA backend" \
  env LD_LIBRARY_PATH="$build/tests/fake_cuda:$build/tests/fake_nvrtc" "$tests/cuda_allocation_test" --gtest_brief=1
left=$((seconds - SECONDS))
part=$((left > 30 ? left / 3 : 10))
attack "random calls" "$tests/api_fuzz_test" --seconds $part --seed "$seed"
attack "a life with kills" "$tests/life_test" --seconds $part --seed "$seed"
attack "decode steps" env GYRE_SOAK_SECONDS=$part "$tests/soak_test" --gtest_brief=1
echo
echo "What was tried in $SECONDS s, seed $seed:"
printf '%s\n' "${summary[@]}"
exit $status
