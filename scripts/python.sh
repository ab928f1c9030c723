#!/usr/bin/env bash
# Builds the Python package and tests it, in a virtual environment of its own, build/venv.
# usage: scripts/python.sh [--no-tests | arguments for pytest]
# PYTHON is the interpreter to start from, python3 if not set. What cannot be downloaded is said, and the tests that
# need it are skipped; NumPy and pytest must be there.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv
log=build/python.log
requirements=python/requirements-test.txt
torch_index=https://download.pytorch.org/whl/cpu

say() { echo "gyre: $*"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
has() { "$venv/bin/python" -c "import $1" 2>/dev/null; }
reachable() {
  "$venv/bin/python" -c "import urllib.request as r; r.urlopen(r.Request('$1', method='HEAD'), timeout=5)" 2>/dev/null
}
install() { pip install "$@" | { grep -v '^Requirement already satisfied\|^Looking in' || true; }; }

# Elsewhere than on PyTorch's own index, most packages of PyTorch bring gigabytes of CUDA with them.
install_torch() {
  if reachable $torch_index/torch/; then
    install --index-url $torch_index torch
  elif [[ $(uname -m) == aarch64 ]]; then
    install 'torch==2.8.*'  # the last one on PyPI that is for CPUs alone
  else
    return 1
  fi
}

# False: something is missing, and will be tried again.
install_for_tests() {
  local line whole=0
  if grep -q '^torch' $requirements && ! has torch && ! install_torch; then
    say "PyTorch for CPUs cannot be downloaded; tests that need it are skipped, unless you install torch into $venv"
    whole=1
  fi
  # One by one: what a machine cannot have must not keep it from the rest.
  while read -r line; do
    line=${line%%#*}
    [[ -n ${line// /} ]] || continue
    [[ $line != torch* ]] || continue
    [[ $line != accelerate* ]] || has torch || continue  # it would bring another PyTorch
    install --retries 1 --timeout 30 "$line" && continue
    say "not installed: $line; tests that need it are skipped"
    whole=1
  done <$requirements
  return $whole
}

if [[ ! -x $venv/bin/python ]]; then
  say "making $venv with $("${PYTHON:-python3}" --version)"
  "${PYTHON:-python3}" -m venv $venv
fi

mapfile -t build_requires < <("$venv/bin/python" -c '
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
install "${build_requires[@]}" || { say "cannot install ${build_requires[*]}; is PyPI reachable?" >&2; exit 1; }
stamp=$venv/$(sha256sum $requirements | cut -c 1-16).installed
if [[ ! -e $stamp ]]; then
  say "installing what the tests use, once: $requirements"
  whole=yes
  install_for_tests || whole=no
  has numpy && has pytest || { say "NumPy and pytest are missing in $venv, see above" >&2; exit 1; }
  [[ $whole == no ]] || touch "$stamp"
fi

# Not isolated: the build folder is then good for the next time.
say "building the package (log: $log)"
if ! pip install -v --no-build-isolation --no-deps --config-settings=build-dir=build/python/venv . 2>&1 | tee $log |
  { grep --line-buffered -oE '\[[0-9]+/[0-9]+\] .*|warning: .*|error: .*' || true; }; then
  tail -n 40 $log >&2
  say "the build failed, see above and $log" >&2
  exit 1
fi
[[ ${1:-} == --no-tests ]] || "$venv/bin/python" -m pytest "$@"
