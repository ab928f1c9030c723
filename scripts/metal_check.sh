#!/usr/bin/env bash
# Everything on a Mac with Apple silicon: builds with the Metal backend, runs all op cases on the GPU, eager and replayed, the
# backend's own tests, all tests there are, and the benchmarks, which give each op's bytes per second beside a copy's. Ends with
# one table; it and the benchmarks are also in build/metal_check.txt, the file to send back.
# Needs Xcode's command line tools and, from Homebrew: bash cmake ninja highway xxhash googletest cli11 nlohmann-json
# usage: scripts/metal_check.sh
# GYRE_METAL_STEPS chooses from: ops backend tests bench
# GYRE_METAL_OPTIONAL=1: that there is no GPU to use is no failure (virtual machines)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
if [[ $(uname -s) != Darwin ]]; then
  echo "gyre: metal_check.sh needs a Mac; on Linux \`make test\` runs the same cases on a stand-in" >&2
  exit 77
fi
steps=${GYRE_METAL_STEPS:-ops backend tests bench}
build=build/metal
report=build/metal_check.txt
jobs=$(sysctl -n hw.ncpu)
mkdir -p build
: > $report
failed=

note() { printf '%-34s %-8s %6s s\n' "$1" "$2" "$3" >> $report; }
step() {  # step NAME COMMAND...
  local name=$1 begin=$SECONDS status=ok
  shift
  echo "== $name"
  "$@" || { status=FAILED; failed=1; }
  note "$name" "$status" $((SECONDS - begin))
  [[ $status == ok ]]
}
wanted() { [[ " $steps " == *" $1 "* ]]; }
finish() {
  echo
  cat $report
  echo
  echo "this table is in $report"
  [[ -z $failed ]]
  exit
}

configure() {
  local headers
  headers=$(scripts/metal_cross.sh --headers) || return 1
  cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGYRE_METAL_CPP="$headers" \
    -DCMAKE_PREFIX_PATH="$(brew --prefix 2> /dev/null)" > /dev/null
}
has_device() { $build/tools/gyre devices | tee /dev/stderr | grep -E '^metal +yes' > /dev/null; }
# Apple's compiler by itself, which needs no GPU; Xcode has it, its command line tools have not.
has_compiler() { xcrun -sdk macosx -f metal > /dev/null 2>&1; }
kernels() {
  local file status=0
  for file in src/metal/kernels/*.metal; do
    xcrun -sdk macosx metal -std=metal3.1 -fno-fast-math -Wno-c++17-extensions -Isrc -c "$file" -o $build/kernel.air || status=1
  done
  return $status
}
# A part of the cases for each core. Failures are printed, and how far from the reference each op is.
ops() {
  local pids="" status=0 i pid
  for ((i = 0; i < jobs; ++i)); do
    GYRE_CASES=$i/$jobs $build/tests/op_test --gtest_filter='*MatchTheReference*metal*' > $build/ops.$i.log 2>&1 &
    pids="$pids $!"
  done
  for pid in $pids; do wait "$pid" || status=1; done
  grep -h -B4 -A8 "Failure" $build/ops.*.log | head -n 100
  grep -h "^NMSE of" $build/ops.*.log | sort -t: -k1,1 -k2,2gr | awk -F: '!seen[$1]++' | tee -a $report
  # What did not run is said, too.
  {
    echo "runs that passed: $(cat $build/ops.*.log | grep -c '^\[       OK \]'), that failed: $(cat $build/ops.*.log |
      grep -c '^\[  FAILED  \].* ms)'), cases that the GPU does not support: $(cat $build/ops.*.log | grep -c '^skipped, not supported')"
  } | tee -a $report
  return $status
}
bench() { $build/tools/gyre bench --device metal | tee -a $report; return "${PIPESTATUS[0]}"; }

{
  echo "gyre $(git describe --always --dirty 2> /dev/null), macOS $(sw_vers -productVersion), $(sysctl -n machdep.cpu.brand_string)"
  system_profiler SPDisplaysDataType 2> /dev/null | grep -E 'Chipset Model|Total Number of Cores|Metal Support' | sed 's/^ */  /'
} >> $report
step "configure" configure || finish
# First what the GPU's checks need: a test that does not build on a Mac must not stand in their way.
step "build" cmake --build $build --target gyre_cli op_test metal_device_gpu_test metal_barriers_gpu_test kv_cache_random_test || finish
if wanted tests; then step "build of all tests" cmake --build $build; fi
if has_compiler; then step "Apple's compiler" kernels; else echo "no Metal compiler by itself (Xcode has one)" >> $report; fi
if ! has_device; then
  $build/tools/gyre devices | grep '^metal' >> $report
  [[ -n ${GYRE_METAL_OPTIONAL:-} ]] || failed=1
  wanted tests && step "tests" ctest --test-dir $build --output-on-failure -j "$jobs" --timeout 600
  finish
fi
if wanted ops; then step "ops on the GPU" ops; fi
if wanted backend; then
  step "the backend on the GPU" $build/tests/metal/metal_device_gpu_test --gtest_brief=1
  step "barriers on the GPU" $build/tests/metal/metal_barriers_gpu_test --gtest_brief=1
  step "KvCache on the GPU" env GYRE_TEST_DEVICE=metal $build/tests/kv_cache_random_test --gtest_brief=1
fi
if wanted tests; then step "tests" ctest --test-dir $build --output-on-failure -j "$jobs" --timeout 600; fi
if wanted bench; then step "benchmarks" bench; fi
finish
