#!/usr/bin/env bash
# Installs the Debian packages that are missing, and nothing when none is.
# usage: scripts/setup.sh [lint]      lint: also what `make format` and `make lint` need
# GYRE_SKIP_SETUP=1 turns it off, for machines where the tools come from elsewhere.
set -euo pipefail

packages=(g++ cmake ninja-build libhwy-dev libxxhash-dev libgtest-dev libcli11-dev nlohmann-json3-dev)
tools=(c++ cmake ninja)
if [[ ${1:-} == lint ]]; then
  packages+=(clang clang-format clang-tidy)
  tools+=(clang++ clang-format clang-tidy)
fi

[[ -z ${GYRE_SKIP_SETUP:-} ]] || exit 0

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  absent=()
  for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || absent+=("$tool")
  done
  [[ ${#absent[@]} -ne 0 ]] || exit 0  # CMake says which library it cannot find
  echo "gyre: this is not a Debian system; please install: ${absent[*]}" >&2
  echo "gyre: needed are a C++20 compiler, CMake >= 3.25, Ninja, Highway >= 1.0.3, xxHash >= 0.8, GoogleTest," \
    "CLI11 and nlohmann-json${1:+, and clang, clang-format and clang-tidy 14}" >&2
  exit 1
fi

installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
done
[[ ${#missing[@]} -ne 0 ]] || exit 0

install=(apt-get install -y --no-install-recommends "${missing[@]}")
if [[ $(id -u) -ne 0 ]]; then
  echo "gyre: packages are missing. Please run this once, then make again:" >&2
  echo "  sudo apt-get update && sudo ${install[*]}" >&2
  exit 1
fi

mkdir -p build
log=build/setup.log
echo "gyre: installing from Debian, once: ${missing[*]} (log: $log)"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && "${install[@]}"; } >"$log" 2>&1 </dev/null; then
  tail -n 20 "$log" >&2
  echo "gyre: the installation failed, see above and $log" >&2
  exit 1
fi
