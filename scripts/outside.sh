#!/usr/bin/env bash
# Test suites that others wrote, pointed at Gyre: vLLM's attention tests from its source package, through the shim
# python/tests/outside/gyre_shim.py. Prints how many passed, were refused by name, and were skipped.
# usage: scripts/outside.sh [arguments for pytest]
# GYRE_VLLM_PYTHON is the interpreter of an environment that has vLLM and Gyre (scripts/vllm.sh makes build/vllm).
# GYRE_OUTSIDE_EVERY=n runs every n-th of vLLM's tests of CPU kernels, of which there are thousands; 97 if not set.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${GYRE_VLLM_PYTHON:-build/vllm/bin/python}
work=$PWD/build/outside
say() { echo "gyre: $*"; }

version=$("$python" -c 'from importlib.metadata import version; import gyre; print(version("vllm").split("+")[0])' 2>/dev/null) || { say "skipped: vLLM's tests ($python has no vLLM with Gyre; run make vllm first)"; exit 0; }
source=$work/vllm-$version
if [[ ! -d $source/tests ]]; then
  say "downloading the source package of vLLM $version, 47 MB, once"
  mkdir -p "$work"
  "$python" - "$version" "$work" <<'PY' || { say "skipped: vLLM's tests (PyPI cannot be reached)"; exit 0; }
import re, sys, tarfile, urllib.request
from urllib.parse import urljoin
from pip._internal.models.index import PyPI
version, work = sys.argv[1:]
request = urllib.request.Request(f"{PyPI.simple_url}/vllm/", headers={"Accept": "text/html"})
page = urllib.request.urlopen(request, timeout=30).read().decode()
href = re.search(rf'href="([^"]+/vllm-{re.escape(version)}\.tar\.gz)[#"]', page)[1]
with tarfile.open(fileobj=urllib.request.urlopen(urljoin(request.full_url, href)), mode="r|gz") as tar:
    tar.extractall(work, (m for m in tar if "/tests/" in m.name), filter="data")
PY
fi

"$python" -c 'import tblib, pytest, pytest_asyncio' 2>/dev/null || "$python" -m pip -q install tblib pytest pytest-asyncio

# The tests ask the hub for this model's config, and for nothing else of it.
hub=$work/hub/models--Qwen--Qwen3-0.6B
mkdir -p "$hub/refs" "$hub/snapshots/0"
printf 0 >"$hub/refs/main"
cat >"$hub/snapshots/0/config.json" <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
 "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16"}
JSON

export HF_HUB_CACHE=$work/hub HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1
export PYTHONPATH=$PWD/python/tests/outside:$source${PYTHONPATH:+:$PYTHONPATH}
run() {  # NAME EVERY FILE ARGUMENTS...
  say "$1, every ${2}th test"
  (cd "$source" && GYRE_OUTSIDE_EVERY=$2 "$python" -m pytest -q -p gyre_shim -p no:cacheprovider -rs "${@:3}") || failed=1
}
failed=0
run "vLLM $version, attention backends" 1 tests/v1/attention/test_attention_backends.py -k "test_causal_backend_correctness and auto" "$@"
run "vLLM $version, CPU attention" "${GYRE_OUTSIDE_EVERY:-97}" tests/kernels/attention/test_cpu_attn.py -k "paged_kv and auto and vec" "$@"
run "vLLM $version, CPU decoding of MLA" 1 tests/kernels/attention/test_mla_decode_cpu.py "$@"
say "skipped: transformers' cache and generation tests (its source package has none)"
exit $failed
