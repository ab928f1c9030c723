#!/usr/bin/env bash
# The worked example of docs/add_a_format.md: the document quotes the patch, the patch applies to a copy of this tree, and
# the codec, the unpackers of this machine and of CUDA, and the tests' reference compile with it. Nothing is linked or run.
# usage: scripts/check_format_example.sh [C++ compiler]
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=${1:-c++}
patch=$PWD/docs/examples/add_a_format.patch
document=docs/add_a_format.md

diff <(sed -n '/^```diff$/,/^```$/{/^```/!p}' "$document") "$patch" ||
  { echo "$document: its diff is not docs/examples/add_a_format.patch"; exit 1; }
files=$(grep -c '^diff --git' "$patch")
grep -q "\*\*$files files\*\*" "$document" || { echo "$document: the patch touches $files files"; exit 1; }

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r include src tests "$copy"
cd "$copy"
GIT_CEILING_DIRECTORIES=$(dirname "$copy") git apply "$patch"

flags=()
[[ $(uname -m) != x86_64 ]] || flags=(-mssse3)  # as the library is built
compile() { "$compiler" -std=c++20 "${flags[@]}" -fsyntax-only -DHWY_COMPILE_ONLY_STATIC -Itests/cuda_host/instructions -Iinclude -Isrc -Itests "$@"; }
case $(uname -m) in
  aarch64) compile -march=armv8.2-a+fp16fml+dotprod+i8mm src/cpu/attention/isa/i8mm.cpp ;;
  x86_64) compile -mavx2 -mfma src/cpu/attention/isa/avx2.cpp ;;
esac
for source in src/ops/kv_buffer.cpp src/cpu/kernels/write.cpp src/cpu/kernels/kv_dequantize.cpp src/cpu/attention/attention.cpp \
  tests/kv_codec/kv_tables_test.cpp tests/kv_codec/kv_distortion_test.cpp; do
  compile "$source"
done
# CUDA's text, as the host harness compiles it. -w: what is a warning there is the harness's business.
instantiate() {
  printf '#include "cuda_host/cuda_host.h"\n#include "cuda/kernels/%s"\nnamespace gyre {\n%s\n}\n' "$1" "$2" | compile -w -x c++ -
}
instantiate write.cu 'static_assert(abi::kv_is_native(abi::kTu4) && abi::kv_level(abi::kTu4, 15) == 15);
template void cuda::kv_quantize<float, abi::kTu4, abi::kTu4>(abi::WriteParams, cuda::Args);'
instantiate kv_dequantize.cu 'template void cuda::kv_dequantize<float, abi::kTu4>(abi::KvDequantizeParams, cuda::Args);'
instantiate attention/any/prefill.cu 'template void cuda::attention_prefill<abi::kTu4, abi::kTu4>(abi::AttentionParams, cuda::Args);'
instantiate attention/decode/decode.cu 'template void cuda::attention_decode<abi::kTu4, abi::kTu4, 128, 4, 1>(abi::AttentionParams, cuda::Args);'
