#!/usr/bin/env bash
# How far llama.cpp's answers with flash attention are from those without, by its own kernel and by libggml-gyre.so: perplexity and
# KL divergence of SmolLM2-135M over 100 kB of text (docs/llama_cpp.md). After `make llama`. Each type is computed with and without
# the library at the same time, with one thread each: two threads of one process wait for each other where others use the machine.
# Probabilities without flash attention are kept in build/llama for the next call with the same text and number of chunks.
# The model's weights are requantized from q4_1 to q4_0, which ggml multiplies five times as fast.
# usage: scripts/llama_quality.sh [chunks of 512 tokens, all by default] [cache types, f16 q8_0 q4_0 by default]
set -euo pipefail
cd "$(dirname "$0")/.."

chunks=${1:--1}
types=("${@:2}")
[[ ${#types[@]} -gt 0 ]] || types=(f16 q8_0 q4_0)
folder=build/llama
text=$folder/text.txt
base=$folder/base_$chunks.kld
library=$PWD/build/release/integrations/ggml/libggml-gyre.so
[[ -e $text ]] || head -c 100000 <(cat docs/*.md README.md) >$text

model=$folder/SmolLM2-135M-Instruct.Q4_0.gguf
[[ -e $model ]] || $folder/build/bin/llama-quantize --allow-requantize $folder/SmolLM2-135M-Instruct.Q4_1.gguf $model Q4_0 1 >$folder/quantize.log 2>&1

run() {
  $folder/build/bin/llama-perplexity -m $model -f $text -c 512 --chunks "$chunks" "$@" 2>&1
}
if [[ ! $base -nt $text ]]; then
  run -t 1 -fa off --kl-divergence-base $base.new >$folder/base.log
  mv $base.new $base
fi
grep -o 'Final estimate.*' $folder/base.log
for type in "${types[@]}"; do
  jobs=()
  for path in "" "$library"; do
    GGML_BACKEND_PATH=$path GYRE_GGML_VERBOSE=1 run -t 1 -fa on -ctk "$type" -ctv "$type" --kl-divergence --kl-divergence-base $base \
      >"$folder/quality_${type}_${path:+gyre}.log" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job"; done
  for name in "" gyre; do
    echo "== $type ${name:+with libggml-gyre.so}"
    grep -E '^(Mean PPL\(Q\)|Mean    KLD|99.9%   KLD|Maximum KLD|Same top p|Mean PPL\(Q\)/PPL|ggml-gyre: computed)' "$folder/quality_${type}_$name.log"
  done
done
