#!/usr/bin/env bash
# Compiles the Metal backend, driver_apple.cpp too, to Mach-O objects for a Mac, on any machine. Needs two packages that pip
# fetches into the folder: metal-cpp's headers, which travel in mlx-metal's wheel for macOS, and ziglang, a clang with macOS's
# C library. Of Apple's frameworks two types are declared here; nothing is linked. Exit status 77: they cannot be had.
# usage: scripts/metal_cross.sh [--headers|--library] [folder]     --headers: fetch metal-cpp alone and print where it is
#                                                                  --library: all of src, not the backend alone; minutes
set -euo pipefail
what=backend
if [[ ${1:-} == --headers || ${1:-} == --library ]]; then what=${1#--}; shift; fi
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
  # Moved when whole: a run that was stopped, or another one at the same time, leaves nothing half done.
  local part
  part=$(mktemp -d "$folder/part.XXXXXX")
  python3 -m pip download -q --disable-pip-version-check --retries 1 --timeout 20 --no-deps --only-binary=:all: -d "$part" "$@" \
    > "$part/pip.log" 2>&1 || { local why; why=$(tail -n 1 "$part/pip.log"); rm -r "$part"; skip "pip cannot fetch ${*: -1}: $why"; }
  python3 -m zipfile -e "$part/$wheel"*.whl "$part"
  [[ -e $part/$wanted ]] || { rm -r "$part"; skip "the wheel of ${*: -1} has no $wanted"; }
  if [[ $wheel == ziglang ]]; then chmod +x "$part/ziglang/zig"; fi
  [[ -e $folder/${wanted%%/*} ]] || mv "$part/${wanted%%/*}" "$folder"
  rm -r "$part"
}

metal_cpp=mlx/include/metal_cpp
fetch $metal_cpp/Metal/Metal.hpp mlx_metal --platform macosx_14_0_arm64 mlx-metal==0.32.4
if [[ $what == headers ]]; then echo "$folder/$metal_cpp"; exit; fi
fetch ziglang/zig ziglang ziglang==0.17.0

mkdir -p "$folder/apple/CoreFoundation" "$folder/apple/IOSurface" "$folder/objects"
echo 'typedef double CFTimeInterval;' > "$folder/apple/CoreFoundation/CoreFoundation.h"
echo 'typedef struct __IOSurface* IOSurfaceRef;' > "$folder/apple/IOSurface/IOSurfaceRef.h"

sources=("$root"/src/metal/*.cpp)
if [[ $what == library ]]; then
  # Headers that do not depend on the system. src/cpu/attention/isa has files of other processors and of Linux.
  mkdir -p "$folder/apple/hwy"
  [[ -e /usr/include/hwy/highway.h && -e /usr/include/xxhash.h ]] || skip "Highway and xxHash are not in /usr/include"
  cp -r /usr/include/hwy /usr/include/xxhash.h "$folder/apple"
  while read -r file; do sources+=("$file"); done < <(find "$root/src" -name '*.cpp' -not -path '*/metal/*' -not -path '*/isa/*')
fi
count=0
for source in "${sources[@]}"; do
  object=$folder/objects/$(tr / _ <<< "${source#"$root"/src/}").o
  # Its cache of the C library's headers stays in the folder.
  ZIG_GLOBAL_CACHE_DIR=$folder/cache ZIG_LOCAL_CACHE_DIR=$folder/cache "$folder/ziglang/zig" c++ -target aarch64-macos.14.0.0 \
    -std=c++20 -ffp-contract=off -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers -Werror \
    -DGYRE_HAVE_METAL "-DHWY_DISABLED_TARGETS=(HWY_SVE|HWY_SVE2|HWY_SVE_256|HWY_SVE2_128)" -I"$root/include" -I"$root/src" \
    -isystem "$folder/apple" -isystem "$folder/$metal_cpp" -c "$source" -o "$object"
  # Mach-O, 64 bits, little-endian.
  [[ $(od -An -tx1 -N4 "$object" | tr -d ' ') == cffaedfe ]] || { echo "$object is not Mach-O" >&2; exit 1; }
  count=$((count + 1))
done
[[ -e $folder/objects/metal_driver_apple.cpp.o ]] || { echo "driver_apple.cpp was not compiled" >&2; exit 1; }
echo "$count files of src compile for macOS 14 on Apple silicon"
