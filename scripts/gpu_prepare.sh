#!/usr/bin/env bash
# Gathers what a build needs from Debian's packages into a folder, for a machine where nothing can be installed:
# headers of Highway, CLI11, nlohmann-json and xxHash, and GoogleTest's sources. Run it on a Debian machine, copy the
# repository with the folder to the GPU's, and run scripts/gpu_check.sh there.
# usage: scripts/gpu_prepare.sh [FOLDER]      build/deps if not given
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
folder=${1:-build/deps}
rm -rf "$folder"
mkdir -p "$folder"/{include,src,share/cmake}
cp -r /usr/include/{hwy,CLI,nlohmann} "$folder/include/"
cp /usr/include/xxh*.h "$folder/include/"
cp -r /usr/src/googletest "$folder/src/"
cp -r /usr/share/cmake/{CLI11,nlohmann_json} "$folder/share/cmake/"
echo "gyre: $folder is ready ($(du -sh "$folder" | cut -f1))"
