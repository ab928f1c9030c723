#!/usr/bin/env bash
# Includes of src/ may only point down: each folder lists what it may include. src/devices.cpp, the composition root, lies
# in no folder and may include all of them. tests/layers checks what runtime/ links, and that each rule finds a wrong line.
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
exit "$status"
