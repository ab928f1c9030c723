#!/usr/bin/env bash
# Compiles the kernels with address spaces as clang's attributes: pointers that Apple's compiler would refuse are errors.
# usage: tests/metal_host/check_address_spaces.sh [clang++]
set -euo pipefail
cd "$(dirname "$0")/../.."

clang=${1:-clang++}
command -v "$clang" >/dev/null || { echo "skipped: no clang++"; exit 77; }
# Nothing is there before the text includes it, as on a Mac.
check=("$clang" -std=c++14 -x c++ -fsyntax-only -DGYRE_METAL_CHECK -D__METAL_VERSION__=310 -Wno-unknown-attributes
  -Wno-ignored-attributes -Wno-c++17-extensions -Itests -Itests/metal_host/include -Isrc)

for kernel in src/metal/kernels/*.metal; do
  "${check[@]}" "$kernel"
done
# The check itself sees what it is for.
for bad in 'thread const uchar* wrong(device const uchar* p) { return p; }' \
  'device uchar* wrong(threadgroup uchar* p) { return p; }' \
  'uint wrong(thread uint& x); uint call(constant uint& x) { return wrong(x); }' \
  'threadgroup float* wrong(device uchar* p) { return reinterpret_cast<threadgroup float*>(p); }'; do
  if echo "$bad" | "${check[@]}" -include metal_stdlib - 2>/dev/null; then
    echo "not refused: $bad" >&2
    exit 1
  fi
done
# What C++ has and MSL has not; clang accepts it all the same.
if grep -nE '\bstd::|if constexpr|\bdouble\b|\[&\]|\[=\]|\bnew\b|\bthrow\b|dynamic_cast|\bvirtual\b' src/metal/kernels/*.metal src/metal/kernels/*.h |
  grep -vE ':[0-9]+: *//'; then
  echo "not MSL" >&2
  exit 1
fi
