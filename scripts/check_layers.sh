#!/usr/bin/env bash
# Includes of src/ may only point down: each folder lists what it may include. src/devices.cpp, the composition root, lies
# in no folder and may include all of them. tests/layers checks what runtime/ links, and that each rule finds a wrong line.
# Then the CUDA kernels: a room of attention includes itself and common/, chains of includes are short, functions too.
# usage: scripts/check_layers.sh [root of a source tree]
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

declare -A allowed=(
  [abi]='abi'
  [runtime]='runtime|abi/kernel[.]h|gyre/(custom_kernel|device|dtype|encoder|error|fence|graph|tensor|trace|version)[.]h'
  [ops]='ops|runtime|abi|gyre'
  [files]='files|runtime'
  [steps]='steps|runtime|abi'
  [cache]='cache|files|steps|ops|runtime|abi|gyre'
  [serving]='serving|cache|files|steps|ops|runtime|abi|gyre'
  [prepare]='prepare|serving|cache|ops|runtime|abi|gyre'
  [c_api]='c_api|runtime|gyre'
  [cpu]='cpu|runtime|abi|gyre|hwy'
  [cuda]='cuda|runtime|abi|gyre'
  [metal]='metal|runtime|abi|gyre'
)

status=0
for folder in src/*/; do
  folder=$(basename "$folder")
  [[ -n ${allowed[$folder]:-} ]] || { echo "src/$folder: not in the list of layers"; status=1; continue; }
  # Quoted paths are the project's and Highway's; <...> are the system's, except the SDKs of backends.
  wrong=$(grep -rnE '^ *# *include *("|<(cuda|nvrtc|hwy|Metal)[/._])' "src/$folder" |
    grep -vE "include *(\"(${allowed[$folder]})(/|\")|<${folder^}/)" || true)
  [[ -z $wrong ]] || { printf '%s\n' "$wrong" | sed "s/\$/  <- src\/$folder may not include this/"; status=1; }
done
# Ops and what is built on them know no backend: they ask neither which device it is nor for what only one of them has.
for folder in abi ops steps cache serving; do
  [[ -d src/$folder ]] || continue
  wrong=$(grep -rnE 'stream\(\)|info\(\)\.name|"(cpu|cuda|metal)"' "src/$folder" || true)
  [[ -z $wrong ]] || { printf '%s\n' "$wrong" | sed "s/\$/  <- src\/$folder knows no backend/"; status=1; }
done

# A phase of attention includes its own folder, common/ and what all kernels share; common/ no phase.
kernels=src/cuda/kernels
for room in "$kernels"/attention/*/; do
  [[ -d $room ]] || continue
  room=$(basename "$room")
  wrong=$(grep -rnE '^#include "cuda/kernels/attention/[^"]*/' "$kernels/attention/$room" |
    grep -vE "include \"cuda/kernels/attention/($room|common)/" || true)
  [[ -z $wrong ]] || { printf '%s\n' "$wrong" | sed "s/\$/  <- attention\/$room includes itself and common only/"; status=1; }
done
# Headers of kernels below a kernel's file, at most; the deepest chain is printed. many_rows.cu has more: its drafts load
# queries as its prompts do.
[[ ! -d $kernels ]] || { grep -rH '^#include "cuda/kernels/' "$kernels" --include='*.cu*' || true; } | awk -F'[:"]' -v limit=6 '
  BEGIN { known["cuda/kernels/attention/many_rows/many_rows.cu"] = 8 }
  { sub("^src/", "", $1); includes[$1] = includes[$1] " " $3 }
  function depth(file,    parts, count, i, below) {
    if (file in depths) return depths[file]
    depths[file] = 0
    count = split(includes[file], parts, " ")
    for (i = 1; i <= count; ++i) {
      below = depth(parts[i]) + 1
      if (below > depths[file]) { depths[file] = below; next_of[file] = parts[i] }
    }
    return depths[file]
  }
  END {
    for (file in includes) {
      if (file !~ /[.]cu$/ || depth(file) <= (file in known ? known[file] : limit)) continue
      printf "src/%s:1: include depth %d:", file, depth(file)
      for (at = file; at in next_of; at = next_of[at]) printf " %s", next_of[at]
      printf "  <- at most %d\n", limit
      bad = 1
    }
    exit bad
  }' || status=1
# From the line that opens a body to the one that closes it, in src/cuda.
[[ ! -d src/cuda ]] || find src/cuda -type f | sort | xargs awk -v limit=80 '
  FNR == 1 { opened = 0 }
  !opened && /\) *(const|noexcept|override|mutable|final| |-> [a-zA-Z_:<>0-9]+)*\{$/ && !/^ *(\}? *else|if|for|while|switch|struct|class|union|enum|namespace)[ (]/ {
    opened = FNR; match($0, /^ */); indent = RLENGTH
    for (i = FNR - 1; i > 0 && lines[i] ~ /[^;{}]$/ && lines[i] !~ /^ *(#|\/\/)/ && lines[i] != ""; --i) {
      opened = i; match(lines[i], /^ */); indent = RLENGTH < indent ? RLENGTH : indent
    }
  }
  { lines[FNR] = $0 }
  opened && match($0, /^ *\}/) && RLENGTH == indent + 1 {
    if (FNR - opened + 1 > limit) { printf "%s:%d: %d lines  <- a function has at most %d\n", FILENAME, opened, FNR - opened + 1, limit; bad = 1 }
    opened = 0
  }
  END { exit bad }' || status=1
exit "$status"
