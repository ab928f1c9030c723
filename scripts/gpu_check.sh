#!/usr/bin/env bash
# Everything on a machine with an NVIDIA GPU, a C++ compiler, CMake, Ninja and the CUDA toolkit: builds, runs all tests
# (those of ops on the GPU, eager and replayed, every class of kernel variants among them), one case of each class under
# compute-sanitizer, the benchmarks, and ends with one table. Nothing is installed: see scripts/gpu_prepare.sh.
# usage: scripts/gpu_check.sh [FOLDER]      what gpu_prepare.sh made; build/deps if not given
# GYRE_GPU_STEPS chooses from: tests sanitize bench
# GYRE_GPU_TOOLS chooses from: memcheck racecheck synccheck initcheck
# GYRE_SANITIZE_SECONDS (480): for all these tools together. One that does not end in time, or does not begin, has failed.
set -uo pipefail
cd "$(dirname "$0")/.."
deps=$(realpath "${1:-build/deps}")
steps=${GYRE_GPU_STEPS:-tests sanitize bench}
build=build/gpu
launched=$build/launched
results=()

note() {  # note NAME STATUS SECONDS
  results+=("$(printf '%-28s %-8s %6s s' "$1" "$2" "$3")")
}
step() {  # step NAME COMMAND...
  local name=$1 begin=$SECONDS status=ok
  shift
  echo "== $name"
  "$@" || status=FAILED
  note "$name" "$status" $((SECONDS - begin))
  [[ $status == ok ]]
}
wanted() { [[ " $steps " == *" $1 "* ]]; }
finish() {
  echo
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  printf '%s\n' "${results[@]}"
  [[ "${results[*]}" != *FAILED* ]]
  exit
}

configure_gtest() {
  cmake -S "$deps/src/googletest" -B $build/gtest -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX="$PWD/$build/prefix" >/dev/null && cmake --build $build/gtest --target install >/dev/null
}
configure() {
  cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGYRE_HWY_STATIC=ON -DGYRE_DEPS="$deps" \
    -DCMAKE_PREFIX_PATH="$deps;$PWD/$build/prefix" -DCMAKE_CXX_FLAGS="${GYRE_GPU_CXXFLAGS:--march=native}" >/dev/null
}
# Building kernels takes longest the first time: as many processes as cores, each with its share of the cases. Each notes
# which classes of kernel variants it launched.
ops() {
  local parts pids=() status=0
  parts=$(nproc)
  rm -rf $launched && mkdir -p $launched
  for ((i = 0; i < parts; ++i)); do
    GYRE_LAUNCHED=$launched GYRE_CASES=$i/$parts $build/tests/op_test --gtest_filter='*MatchTheReference*cuda*' \
      >$build/ops.$i.log 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  grep -h -B4 -A8 "Failure" $build/ops.*.log | head -n 60
  grep -h "^NMSE of" $build/ops.*.log | sort -t: -k1,1 -k2,2gr | awk -F: '!seen[$1]++'
  return $status
}
# All classes that the GPU's planner can choose, over what the processes noted.
variants() { GYRE_LAUNCHED=$launched $build/tests/op_test --gtest_filter='*EachClassIsLaunched*cuda*'; }

step "GoogleTest" configure_gtest || finish
step "configure" configure || finish
step "build" cmake --build $build || finish
step "devices" $build/tools/gyre devices
if wanted tests; then
  step "ops on the GPU" ops
  step "classes of variants" variants
  step "KvCache on the GPU" env GYRE_TEST_DEVICE=cuda:0 $build/tests/kv_cache_random_test --gtest_brief=1
  step "tests" ctest --test-dir $build --output-on-failure -j "$(nproc)" --timeout 300
fi
if wanted sanitize; then
  [[ -d $launched ]] || step "ops on the GPU" ops
  end=$((SECONDS + ${GYRE_SANITIZE_SECONDS:-480}))
  for tool in ${GYRE_GPU_TOOLS:-memcheck racecheck synccheck initcheck}; do
    step "compute-sanitizer $tool" env GYRE_SANITIZE_SECONDS=$((end - SECONDS)) \
      scripts/gpu_sanitize.sh "$tool" $build/tests/op_test $launched $build/sanitize
  done
fi
if wanted bench; then
  step "benchmarks" $build/tools/gyre bench --device cuda:0
fi
finish
