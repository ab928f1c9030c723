#!/usr/bin/env bash
# The worked example of docs/add_an_op.md: the patch applies to a copy of this tree, what it touches compiles, and op_test walks
# the new op on the CPU, on emulated CUDA and on emulated Metal. All else comes from libraries that are built.
# usage: scripts/check_op_example.sh <C++ compiler> <library>...
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=$1
shift
patch=$PWD/docs/examples/add_an_op.patch
files=$(grep -c '^diff --git' "$patch")
grep -q "\*\*$files files\*\*" docs/add_an_op.md || { echo "docs/add_an_op.md: the patch touches $files files"; exit 1; }

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r cmake include src tests "$copy"
cd "$copy"
GIT_CEILING_DIRECTORIES=$(dirname "$copy") git apply "$patch"

compile() { "$compiler" -std=c++20 -O1 -fPIC -w -ffp-contract=off -U_FORTIFY_SOURCE "$@"; }
plain=(-Iinclude -Isrc -Itests -c)
objects=()
add() {  # source, flags
  objects+=("$copy/object$((${#objects[@]})).o")
  compile "${@:2}" "$1" -o "${objects[-1]}"
}
embed() {  # backend, files
  local names
  names=$(cd src && ls abi/*.h "${@:2}" | paste -sd,)
  cmake -DOUT="$copy/$1_sources.cpp" -DROOT="$copy/src" -DBACKEND="$1" -DFILES="$names" -P cmake/embed.cmake
}
embed cuda $(cd src && ls cuda/kernels/*.cu* cuda/kernels/attention/*.cu* cuda/kernels/attention/*/*.cu*)
embed metal $(cd src && ls metal/kernels/*.metal metal/kernels/*.h)
for source in src/ops/scale.cpp src/ops/table.cpp src/cpu/kernels/scale.cpp src/cpu/table.cpp src/cuda/table.cpp src/metal/table.cpp \
  cuda_sources.cpp metal_sources.cpp tests/op_test.cpp tests/scale/scale_op.cpp tests/metal_host/host_kernel.cpp \
  tests/metal_host/install_standin.cpp tests/metal_host/standin_driver.cpp tests/metal_host/standin_queue.cpp; do
  add "$source" "${plain[@]}"
done
for kernel in scale kv_copy hadamard; do  # the others are what the runner itself calls
  printf '#include "metal/kernels/%s.metal"\n\n#include "metal_host/metal_host.h"\n\nGYRE_METAL_KERNEL(%s)\n' $kernel $kernel > metal_$kernel.cpp
  add metal_$kernel.cpp -Itests/metal_host/include "${plain[@]}" -include metal_stdlib
done
"$compiler" "${objects[@]}" -Wl,--start-group "$@" -Wl,--end-group -ldl -lpthread -o op_test

printf '#include "cuda_host/kernel_list.h"\n#include "cuda/kernels/scale.cu"\nGYRE_HOST_KERNELS(GYRE_HOST(scale))\n' > cuda_scale.cpp
compile -shared -Itests/cuda_host/instructions -Iinclude -Isrc -Itests tests/cuda/fake_cuda.cpp tests/cuda/fake_nvrtc.cpp \
  tests/cuda_host/host_kernels.cpp tests/cuda_host/kernels/kv_copy.cpp cuda_scale.cpp -o libcuda.so.1
ln -s libcuda.so.1 libnvrtc.so.13

LD_LIBRARY_PATH=$copy XDG_CACHE_HOME=$copy ./op_test --gtest_filter='All/Ops.*/scale_*' | tee out
for device in cpu metal cuda_0; do
  grep -q "OK .*MatchTheReference/scale_$device" out || { echo "the op did not run on $device"; exit 1; }
done
! grep -q 'not emulated\|not supported' out
