#!/usr/bin/env bash
# Compiles attention's kernels as a Mac does, first without their Spec, then with it, and fails where an array is left in
# memory: running sums belong in registers. By clang's optimizer in place of Apple's.
# usage: tests/metal_host/check_registers.sh [clang++]
set -euo pipefail
cd "$(dirname "$0")/../.."

clang=${1:-clang++}
command -v "$clang" >/dev/null || { echo "skipped: no clang++"; exit 77; }
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
# GPUs have no calls: everything is inlined.
optimize=(-O2 -fno-exceptions -fno-vectorize -fno-slp-vectorize -mllvm -inline-threshold=1000000 -Wno-pass-failed -S -emit-llvm)

# text <kernel>: without the Spec
text() {
  "$clang" -std=c++14 -x c++ -DGYRE_METAL_CHECK -D__METAL_VERSION__=310 -Wno-unknown-attributes -Wno-ignored-attributes \
    -Wno-c++17-extensions -ffp-contract=off -Itests -Itests/metal_host/include -Isrc "${optimize[@]}" \
    "src/metal/kernels/$1.metal" -o "$folder/$1.ll"
}
# left <kernel> <low> <high>: arrays in memory, for a Spec
left() {
  sed -E -e "s/^@spec_low = .* global i32 0/@spec_low = internal addrspace(2) constant i32 $2/" \
    -e "s/^@spec_high = .* global i32 0/@spec_high = internal addrspace(2) constant i32 $3/" "$folder/$1.ll" > "$folder/spec.ll"
  [[ $(grep -cE '^@spec_(low|high) = internal' "$folder/spec.ll") == 2 ]] || { echo "the Spec was not found" >&2; exit 1; }
  "$clang" -x ir "${optimize[@]}" "$folder/spec.ll" -o "$folder/out.ll"
  grep -c alloca "$folder/out.ll" || true
}
failed=0
expect_none() {
  local count
  count=$(left "$1" "$2" "$3")
  [[ $count == 0 ]] || { echo "$1, Spec $2 $3: $count arrays in memory" >&2; failed=1; }
}

text attention_decode
# K's and V's format, rows, paged, head dim
while read -r k v rows paged dim; do
  expect_none attention_decode $((k | v << 8 | rows << 16 | 1 << 24)) $((paged | dim << 16))
done <<< "18 18 4 0 128
1 1 8 1 128
21 17 6 1 80
17 19 4 0 512
35 35 8 0 256"
text attention_many_rows
for spec in "18 128" "1 256"; do
  read -r format dim <<< "$spec"
  expect_none attention_many_rows $((format | format << 8)) $((dim | dim << 16))
done
# The check sees what it is for: dims that only the call knows.
text attention
[[ $(left attention $((18 << 16 | 18 << 24)) 0) != 0 ]] || { echo "attention of any shape has no arrays?" >&2; failed=1; }
exit $failed
