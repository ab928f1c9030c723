#!/usr/bin/env bash
# Compiles the kernels with address spaces as clang's attributes: pointers that Apple's compiler would refuse are
# errors. Then looks for what C++ has and Metal's language has not.
# usage: tests/metal_host/check_address_spaces.sh [clang++]
set -euo pipefail
cd "$(dirname "$0")/../.."

clang=${1:-clang++}
command -v "$clang" >/dev/null || { echo "skipped: no clang++"; exit 77; }
# Nothing is there before the text includes it, as on a Mac.
check=("$clang" -std=c++14 -x c++ -fsyntax-only -DGYRE_METAL_CHECK -D__METAL_VERSION__=310 -Wno-unknown-attributes
  -Wno-ignored-attributes -Wno-c++17-extensions -Wvla -Wdouble-promotion -Werror -Itests -Itests/metal_host/include -Isrc)

for kernel in src/metal/kernels/*.metal; do
  "${check[@]}" "$kernel"
done
# The check itself sees what it is for.
for bad in 'thread const uchar* wrong(device const uchar* p) { return p; }' \
  'device uchar* wrong(threadgroup uchar* p) { return p; }' \
  'uint wrong(thread uint& x); uint call(constant uint& x) { return wrong(x); }' \
  'threadgroup float* wrong(device uchar* p) { return reinterpret_cast<threadgroup float*>(p); }' \
  'float wrong(float x) { return x * 0.5; }' \
  'uint wrong(uint n) { uint x[n]; return x[0]; }'; do
  if echo "$bad" | "${check[@]}" -include metal_stdlib - 2>/dev/null; then
    echo "not refused: $bad" >&2
    exit 1
  fi
done
# What clang accepts all the same. The texts of src/abi that kernels include are in this; the standard library is not.
none=$(mktemp -d)
trap 'rm -r "$none"' EXIT
touch "$none/metal_stdlib"
text=("$clang" -std=c++14 -x c++ -E -P -D__METAL_VERSION__=310 -I"$none" -Isrc)
for kernel in src/metal/kernels/*.metal; do
  "${text[@]}" "$kernel" | tests/metal_host/check_text.py || { echo "not MSL: $kernel" >&2; exit 1; }
done
for bad in 'uint wrong(uint& x);' 'uint wrong(const uint* x, thread uint* y);' 'uint wrong(thread uint* y, float (&x)[8]);' \
  'void f() { uint* x = nullptr; }' 'uint wrong = 1;' 'struct A { uint x; }; A wrong;' 'float wrong[2] = {1, 2};' \
  'thread uint* f(uint x) { return reinterpret_cast<uint*>(x); }' 'void f() { static uint calls = 0; }' \
  'void f() { if constexpr (true) return; }' 'void f() { const auto g = [](uint x) { return x; }; }' 'double f();'; do
  if echo "namespace gyre { $bad }" | "${text[@]}" - | tests/metal_host/check_text.py > /dev/null; then
    echo "not refused: $bad" >&2
    exit 1
  fi
done
