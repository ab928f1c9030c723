#!/usr/bin/env bash
# scripts/check_release.sh on a tree of two files: which tags it takes, and what it says of others.
# usage: check_release_test.sh FOLDER
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
rm -rf "$folder"
mkdir -p "$folder/scripts"
cp "$here/../../scripts/check_release.sh" "$folder/scripts/"

expect() {  # expect STATUS TAG [WORDS]
  local status=0
  "$folder/scripts/check_release.sh" "$2" >"$folder/output" 2>&1 || status=$?
  if [[ $status != "$1" || $(<"$folder/output") != *"${3:-}"* ]]; then
    echo "$2: wanted status $1 and '${3:-}', got status $status and"
    cat "$folder/output"
    exit 1
  fi
}

echo 'project(gyre VERSION 1.2.3 LANGUAGES CXX)' >"$folder/CMakeLists.txt"
printf '## Unreleased\n\n## 1.2.3 - 2030-01-31\n' >"$folder/CHANGELOG.md"
expect 0 v1.2.3
expect 1 v1.2.4 'the version in CMakeLists.txt 1.2.3'
expect 1 1.2.3 'the tag is 1.2.3'
printf '## Unreleased\n\n## 1.2.3\n## 1.2.30 - 2030-01-31\n## 1x2.3 - 2030-01-31\n' >"$folder/CHANGELOG.md"
expect 1 v1.2.3 "no section '## 1.2.3 - YYYY-MM-DD'"

# The file in the tree has the line that the script reads.
grep -qE '^project\(gyre VERSION [0-9]+\.[0-9]+\.[0-9]+ ' "$here/../../CMakeLists.txt"
