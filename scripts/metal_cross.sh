#!/usr/bin/env bash
# Compiles the Metal backend, driver_apple.cpp too, to Mach-O objects for a Mac, on any machine. Needs two packages that pip
# fetches into the folder: metal-cpp's headers, which travel in mlx-metal's wheel for macOS, and ziglang, a clang with macOS's
# C library. Of Apple's frameworks two types are declared here; nothing is linked. Exit status 77: they cannot be had.
# usage: scripts/metal_cross.sh [--headers] [folder]     --headers: fetch metal-cpp alone and print where it is
set -euo pipefail
headers_only=
if [[ ${1:-} == --headers ]]; then headers_only=1; shift; fi
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/build/metal_cross}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

skip() { echo "skipped: $1" >&2; exit 77; }

# fetch <file that must be there> <what the wheel's name begins with> <pip's arguments>...
fetch() {
  local wanted=$1 wheel=$2
  shift 2
  [[ -e $folder/$wanted ]] && return
  python3 -m pip --version > /dev/null 2>&1 || skip "there is no pip"
  python3 -m pip download -q --disable-pip-version-check --retries 1 --timeout 20 --no-deps --only-binary=:all: -d "$folder" "$@" \
    > "$folder/pip.log" 2>&1 || skip "pip cannot fetch ${*: -1}: $(tail -n 1 "$folder/pip.log")"
  python3 -m zipfile -e "$folder/$wheel"*.whl "$folder"
  rm "$folder/$wheel"*.whl
  [[ -e $folder/$wanted ]] || skip "the wheel of ${*: -1} has no $wanted"
}

metal_cpp=mlx/include/metal_cpp
fetch $metal_cpp/Metal/Metal.hpp mlx_metal --platform macosx_14_0_arm64 mlx-metal
if [[ -n $headers_only ]]; then echo "$folder/$metal_cpp"; exit; fi
fetch ziglang/__main__.py ziglang ziglang
chmod +x "$folder/ziglang/zig"

mkdir -p "$folder/apple/CoreFoundation" "$folder/apple/IOSurface" "$folder/objects"
echo 'typedef double CFTimeInterval;' > "$folder/apple/CoreFoundation/CoreFoundation.h"
echo 'typedef struct __IOSurface* IOSurfaceRef;' > "$folder/apple/IOSurface/IOSurfaceRef.h"

count=0
for source in "$root"/src/metal/*.cpp "$root"/src/metal/*/*.cpp; do
  [[ -e $source ]] || continue
  object=$folder/objects/$(basename "${source%.cpp}").o
  # Its cache of the C library's headers stays in the folder.
  ZIG_GLOBAL_CACHE_DIR=$folder/cache ZIG_LOCAL_CACHE_DIR=$folder/cache "$folder/ziglang/zig" c++ -target aarch64-macos.14.0.0 \
    -std=c++20 -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers -Werror \
    -DGYRE_HAVE_METAL -I"$root/include" -I"$root/src" -isystem "$folder/apple" -isystem "$folder/$metal_cpp" \
    -c "$source" -o "$object"
  # Mach-O, 64 bits, little-endian.
  [[ $(od -An -tx1 -N4 "$object" | tr -d ' ') == cffaedfe ]] || { echo "$object is not Mach-O" >&2; exit 1; }
  count=$((count + 1))
done
[[ -e $folder/objects/driver_apple.o ]] || { echo "driver_apple.cpp was not compiled" >&2; exit 1; }
echo "$count files of src/metal compile for macOS 14 on Apple silicon"
