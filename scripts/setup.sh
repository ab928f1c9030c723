#!/usr/bin/env bash
# Installs the Debian packages that are missing, and nothing when none is.
# usage: scripts/setup.sh [lint|python|sanitize|coverage]
#   lint: also what `make format` and `make lint` need; python: also what `make python` needs, for the interpreter $PYTHON;
#   sanitize: Valgrind; coverage: gcovr
# GYRE_SKIP_SETUP=1 turns it off, for machines where the tools come from elsewhere.
set -euo pipefail

packages=(g++ cmake ninja-build libhwy-dev libxxhash-dev libgtest-dev libcli11-dev nlohmann-json3-dev libeigen3-dev)
# Taken along when something else is installed; alone no reason to ask for anything, an example is skipped without.
optional=(libopenmpi-dev openmpi-bin)
tools=(c++ cmake ninja)
if [[ ${1:-} == lint ]]; then
  packages+=(clang clang-format clang-tidy)
  tools+=(clang++ clang-format clang-tidy)
fi
case ${1:-} in
  sanitize) packages+=(valgrind) tools+=(valgrind) ;;
  coverage) packages+=(gcovr) tools+=(gcovr) ;;
esac
# Any Python from 3.10 on will do that can make virtual environments and has its headers, from Debian or not.
python_ready() {
  "${PYTHON:-python3}" -c '
import ensurepip, os, sys, sysconfig
sys.exit(sys.version_info < (3, 10) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' 2>/dev/null
}
python_missing=
if [[ ${1:-} == python ]] && ! python_ready; then
  packages+=(python3-dev python3-venv)
  python_missing="Python >= 3.10 with venv and its headers"
fi

[[ -z ${GYRE_SKIP_SETUP:-} ]] || exit 0

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  absent=()
  for tool in "${tools[@]}"; do
    command -v "$tool" >/dev/null || absent+=("$tool")
  done
  [[ -z $python_missing ]] || absent+=("$python_missing")
  [[ ${#absent[@]} -ne 0 ]] || exit 0  # CMake says which library it cannot find
  echo "gyre: this is not a Debian system; please install: ${absent[*]}" >&2
  echo "gyre: needed are a C++20 compiler, CMake >= 3.25, Ninja, Highway >= 1.0.3, xxHash >= 0.8, GoogleTest," \
    "CLI11, nlohmann-json and Eigen; for lint also clang, clang-format and clang-tidy 14" >&2
  exit 1
fi

installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
done
[[ ${#missing[@]} -ne 0 ]] || exit 0

install=(apt-get install -y --no-install-recommends "${missing[@]}" "${optional[@]}")
if [[ $(id -u) -ne 0 ]]; then
  echo "gyre: packages are missing. Please run this once, then make again:" >&2
  echo "  sudo apt-get update && sudo ${install[*]}" >&2
  exit 1
fi

mkdir -p build
log=build/setup.log
echo "gyre: installing from Debian, once: ${missing[*]} ${optional[*]} (log: $log)"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && "${install[@]}"; } >"$log" 2>&1 </dev/null; then
  tail -n 20 "$log" >&2
  echo "gyre: the installation failed, see above and $log" >&2
  exit 1
fi
