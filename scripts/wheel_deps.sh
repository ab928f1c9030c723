#!/usr/bin/env bash
# Puts a static Highway and xxHash's header into a folder, for wheels built where neither is packaged (manylinux images).
# usage: scripts/wheel_deps.sh FOLDER      then build with -DGYRE_DEPS=FOLDER
# The versions are Debian 12's, which the tests run with. A tag can be moved, a commit cannot: both are named.
set -euo pipefail
folder=$(realpath -m "${1:?usage: scripts/wheel_deps.sh FOLDER}")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# clone NAME REPOSITORY TAG COMMIT
clone() {
  git -c advice.detachedHead=false clone --quiet --depth 1 --branch "$3" "$2" "$work/$1"
  local got
  got=$(git -C "$work/$1" rev-parse HEAD)
  [[ $got == "$4" ]] || { echo "gyre: $2: tag $3 is $got, not $4" >&2; exit 1; }
}

clone highway https://github.com/google/highway.git 1.0.3 58746ca5b9f9444a2a3549704602ecc6239f8f41
clone xxhash https://github.com/Cyan4973/xxHash.git v0.8.1 35b0373c697b5f160d3db26b1cbb45a0d5ba788c

cmake -S "$work/highway" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$folder" \
  -DCMAKE_INSTALL_LIBDIR=lib -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_CXX_VISIBILITY_PRESET=hidden \
  -DHWY_ENABLE_CONTRIB=OFF -DHWY_ENABLE_EXAMPLES=OFF -DHWY_ENABLE_TESTS=OFF -DBUILD_TESTING=OFF
cmake --build "$work/build" --target install
# This version installs no CMake package of its own; Debian's does.
mkdir -p "$folder/lib/cmake/hwy"
cat >"$folder/lib/cmake/hwy/hwy-config.cmake" <<'END'
get_filename_component(hwy_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
add_library(hwy::hwy STATIC IMPORTED)
set_target_properties(hwy::hwy PROPERTIES IMPORTED_LOCATION "${hwy_prefix}/lib/libhwy.a" INTERFACE_INCLUDE_DIRECTORIES "${hwy_prefix}/include")
END
install -D -m 644 "$work/xxhash/xxhash.h" "$folder/include/xxhash.h"
