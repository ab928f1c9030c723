#!/usr/bin/env bash
# The shared library exports the C ABI, whole, and of C++ what GYRE_API marks; nothing else.
# usage: exports_test.sh <libgyre.so> <include/gyre>
set -euo pipefail
library=$1 headers=$2

status=0
wrong() { echo "$1"; status=1; }

exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sort -u)
c_exported=$(grep '^gyre_' <<< "$exported")
# Declarations may break after the type; a function's name stands before the first bracket.
c_declared=$(cat "$headers"/c/*.h | tr '\n' ' ' | grep -oP 'GYRE_API [^;(]*?\K\bgyre_\w+(?=\()' | sort -u)
[[ $(wc -l <<< "$c_declared") -gt 50 ]] || wrong "too few declarations found in $headers/c"
for name in $(comm -3 <(echo "$c_exported") <(echo "$c_declared")); do
  wrong "$name: exported or declared, not both"
done

classes=$(cat "$headers"/*.h | grep -oP '^class GYRE_API \K\w+')
marked=$(cat "$headers"/*.h | grep -oP '^ *GYRE_API .*?\K(\w+|operator<<)(?=\()')
while read -r symbol; do
  name=$(sed -E 's/^(vtable|typeinfo|typeinfo name) for //; s/\[abi:cxx11\]//; s/\(.*//' <<< "$symbol")
  case $name in
    gyre::*::*::*) wrong "$symbol: inside a class" ;;
    gyre::*::*)  # a member: its class is marked, or it is itself
      part=${name#gyre::}
      grep -qx "${part%%::*}" <<< "$classes" || grep -qx "${part##*::}" <<< "$marked" || wrong "$symbol: not public" ;;
    gyre::Error) ;;
    gyre::*) grep -qx "${name#gyre::}" <<< "$marked" || wrong "$symbol: not public" ;;
    *) wrong "$symbol: not of namespace gyre" ;;
  esac
done < <(grep -v '^gyre_' <<< "$exported" | c++filt)
echo "$(wc -l <<< "$exported") symbols, $(wc -l <<< "$c_exported") of them C"
exit "$status"
