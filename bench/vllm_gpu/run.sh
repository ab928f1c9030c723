#!/usr/bin/env bash
# Runs jobs of engine.py on this machine's GPU and prints a table: run.sh SECONDS JOBS.json
# With BUNDLE, a folder of make_bundle.py's archives and gyre.tar.xz (pack_gyre.sh), everything comes from there: python3
# needs torch from 2.11 on, triton and transformers only. Without, python3 has vLLM and gyre-kv[vllm] installed.
# VLLM_VERSIONS are the versions to try: the first that runs a small engine is taken, or, with NO_TRIAL=1, the first that is there.
# Results: $OUT/results.jsonl and logs.
set -uo pipefail
began=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd)
limit=$1
jobs=$(realpath "$2")
out=${OUT:-$PWD/vllm_gpu}
export WORK=${WORK:-/tmp/gyre_vllm_gpu}
mkdir -p "$out" "$WORK/logs"
say() { echo "=== $(($(date +%s) - began)) s: $*"; }

unpack() {  # NAME: once
  [[ -e $WORK/$1.done ]] && return 0
  tar -xJf "$BUNDLE/$1.tar.xz" -C "$WORK" && touch "$WORK/$1.done"
}

# Imports what an engine imports and runs one of vLLM's own kernels.
imports() {
  timeout 120 python3 - <<'PY'
import time
began = time.time()
import torch, vllm
from vllm import LLM
from vllm.platforms import current_platform
import vllm.vllm_flash_attn as flash
import gyre
from gyre.integrations.vllm import backend, layer
x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
w, out = torch.ones(4096, device="cuda", dtype=torch.bfloat16), torch.empty_like(x)
torch.ops._C.rms_norm(out, x, w, 1e-5)
error = (out - torch.nn.functional.rms_norm(x, (4096,), w, 1e-5)).abs().max().item()
assert error < 0.05, f"vLLM's rms_norm is off by {error}"
print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {current_platform.get_device_name()}, FlashAttention 3: "
      f"{flash.FA3_AVAILABLE}, gyre {gyre.__version__}: {time.time() - began:.1f} s")
PY
}

# A small engine with vLLM's own attention.
smoke() {
  echo '[{"name": "smoke-'"$1"'", "backend": "FLASH_ATTN", "layers": 2, "check": 1, "sizes": [1, 8],
         "args": {"gpu_memory_utilization": 0.2}, "needs": 20, "timeout": 60}]'
}

export PYTHONUNBUFFERED=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo TOKENIZERS_PARALLELISM=false
export VLLM_CACHE_ROOT=$WORK/cache TRITON_CACHE_DIR=$WORK/triton CUDA_MODULE_LOADING=LAZY GYRE_KERNEL_CACHE=$WORK/kernels
export LOGS=$WORK/logs RESULTS=$out/results.jsonl
if [[ -n ${BUNDLE:-} ]]; then
  BUNDLE=$(realpath "$BUNDLE")
  unpack packages & unpack gyre &
  wait
  for version in ${VLLM_VERSIONS:-0.33.0 0.32.0}; do
    [[ -e $BUNDLE/vllm-$version.tar.xz ]] || continue
    unpack "vllm-$version"
    export PYTHONPATH=$WORK/packages:$WORK/vllm-$version:$WORK/gyre
    [[ -z ${NO_TRIAL:-} ]] || { found=$version; break; }
    say "trying vLLM $version"
    if imports >"$WORK/logs/imports-$version.log" 2>&1; then
      tail -n 1 "$WORK/logs/imports-$version.log"
      RESULTS=$WORK/logs/smoke.jsonl python3 "$here/drive.py" <(smoke "$version") 75 && found=$version && break
    fi
    tail -n 12 "$WORK/logs/imports-$version.log"
  done
  [[ -n ${found:-} ]] || { say "no vLLM runs here"; tar -czf "$out/logs.tar.gz" -C "$WORK" logs; exit 1; }
else
  imports || exit 1
fi
say "ready"
python3 "$here/drive.py" "$jobs" $((limit - ($(date +%s) - began) - 10))
say "jobs are done"
nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,memory.used --format=csv,noheader
python3 "$here/table.py" "$RESULTS"
tar -czf "$out/logs.tar.gz" -C "$WORK" logs
say "end"
