#!/usr/bin/env bash
# How far llama.cpp's answers with flash attention are from those without, by its own kernel and by libggml-gyre.so: perplexity and
# KL divergence of SmolLM2-135M over a text (docs/llama_cpp.md). After `make llama`.
# usage: scripts/llama_quality.sh [chunks of 512 tokens, all by default] [cache types, f16 q8_0 q4_0 by default]
set -euo pipefail
cd "$(dirname "$0")/.."

chunks=${1:--1}
types=("${@:2}")
[[ ${#types[@]} -gt 0 ]] || types=(f16 q8_0 q4_0)
folder=build/llama
text=$folder/text.txt
base=$folder/base.kld
library=$PWD/build/release/integrations/ggml/libggml-gyre.so
head -c 100000 <(cat docs/*.md README.md) >$text

run() {
  $folder/build/bin/llama-perplexity -m $folder/SmolLM2-135M-Instruct.Q4_1.gguf -f $text -c 512 -t 2 --chunks "$chunks" "$@" 2>&1
}
run -fa off --kl-divergence-base $base >$folder/base.log
grep -o 'Final estimate.*' $folder/base.log
for type in "${types[@]}"; do
  for path in "" "$library"; do
    log=$folder/quality_${type}_${path:+gyre}.log
    GGML_BACKEND_PATH=$path run -fa on -ctk "$type" -ctv "$type" --kl-divergence --kl-divergence-base $base >"$log"
    echo "== $type ${path:+with libggml-gyre.so}"
    grep -E '^(Mean PPL\(Q\)|Mean    KLD|99.9%   KLD|Maximum KLD|Same top p|Mean PPL\(Q\)/PPL)' "$log"
  done
done
rm -f $base
