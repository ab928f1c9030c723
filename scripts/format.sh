#!/usr/bin/env bash
# Runs clang-format with the given options over every C++ file of the tree.
set -euo pipefail
cd "$(dirname "$0")/.."

find include src integrations tools bench tests examples python/src \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
  sort -z | xargs -0 clang-format "$@"
