#!/usr/bin/env bash
# Builds Gyre's Python package for machines with an x86-64 CPU with AVX2 and packs it for run.sh: pack_gyre.sh FOLDER
# PYTHON is an interpreter of the GPU machine's version with nanobind, python3.12 if not set.
set -euo pipefail
folder=$(realpath "$1")
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3.12}
build=build/vllm_gpu

cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGYRE_HWY_STATIC=ON -DGYRE_DEPS="$PWD/build/deps" -DCMAKE_CXX_FLAGS=-march=x86-64-v3 \
  -DGYRE_BUILD_TESTS=OFF -DGYRE_BUILD_TOOLS=OFF -DGYRE_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF \
  -DGYRE_PYTHON=ON -DPython_EXECUTABLE="$(command -v "$python")" >$build.log
cmake --build $build --target _gyre
package=$(mktemp -d)/gyre
mkdir -p "$package"
cp -r python/gyre "$package/gyre"
find "$package" -name __pycache__ -prune -exec rm -rf {} +
install -s $build/python/gyre/_gyre*.so "$package/gyre/"
# vLLM finds the plugin by its entry point.
version=$(sed -n 's/^project(gyre VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
info=$package/gyre_kv-$version.dist-info
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: gyre-kv\nVersion: %s\n' "$version" >"$info/METADATA"
printf '[vllm.general_plugins]\ngyre = gyre.integrations.vllm:register\n' >"$info/entry_points.txt"
tar -cJf "$folder/gyre.tar.xz" -C "$(dirname "$package")" gyre
rm -r "$(dirname "$package")"
ls -l "$folder/gyre.tar.xz"
