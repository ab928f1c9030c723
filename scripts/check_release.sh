#!/usr/bin/env bash
# Whether a tag fits the tree: v and the version in CMakeLists.txt, and a dated section of that version in CHANGELOG.md.
# usage: scripts/check_release.sh v1.2.3
set -euo pipefail
cd "$(dirname "$0")/.."

tag=${1:?usage: scripts/check_release.sh TAG}
version=$(sed -nE 's/^project\(gyre VERSION ([0-9.]+) .*/\1/p' CMakeLists.txt)
[[ $tag == "v$version" ]] || { echo "gyre: the tag is $tag, the version in CMakeLists.txt ${version:-missing}" >&2; exit 1; }
grep -qE "^## ${version//./\\.} - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
  { echo "gyre: CHANGELOG.md has no section '## $version - YYYY-MM-DD'" >&2; exit 1; }
