#!/usr/bin/env python3
"""What engine.py measured, one line per engine and per row: table.py results.jsonl..."""

import json
import sys


def logprob_distance(row, reference):
    """Largest distance of the first token's logprobs from those of the first engine, and equal first tokens."""
    worst, equal = 0.0, 0
    for one, other in zip(row["check"], reference["check"]):
        both = one["first"].keys() & other["first"].keys()
        worst = max([worst, *(abs(one["first"][t] - other["first"][t]) for t in both)])
        equal += one["tokens"][0] == other["tokens"][0]
    return f"logprobs within {worst:.2f} of {reference['name']}'s, first tokens {equal} of {len(row['check'])}"


def show(row, references):
    print(f"\n{row['name']}: vLLM {row.get('vllm')}, start {row.get('start_s')} s, {row.get('tokens')} tokens in blocks of {row.get('block_size')}", end="")
    print(f", {'V2' if row.get('v2') else 'V1'}, {row.get('graphs')}, {row.get('mode')}, {row.get('impl')}, peak {row.get('peak_gb')} GB", end="")
    print(f", reserved {row.get('reserved_gb')}, in use {row.get('used_gb')}, first call {row.get('first_s')} s")
    if row.get("error"):
        print("  FAILED:", row["error"].strip().splitlines()[-1][:300])
    for part, text in row.get("errors", []):
        print(f"  {part} FAILED:", text.strip().splitlines()[-1][:300])
    layers = row["job"].get("layers", 32)
    if "check" in row:
        if layers in references and references[layers] is not row:
            print("  check:", logprob_distance(row, references[layers]))
        references.setdefault(layers, row)
    for same in row.get("same", []):
        print(f"  {same['name']}: {same['equal_tokens']} of {same['of']} answers equal, {same['equal_logprobs']} with all logprobs, {same['cached']} cached; parted at {same['part_at']}")
    for one in row.get("rows", []):
        prompts = f", prompts {one['prompt_tokens_s']} tokens/s" if "prompt_tokens_s" in one else ""
        print(f"  {one['kind']:12} {one.get('tokens_s')} tokens/s, {one.get('step_ms')} ms a step ({one.get('min_ms')} to {one.get('max_ms')}), {one.get('running')} run{prompts}")
        for name, milliseconds, count in one.get("kernels", [])[:6]:
            print(f"      {milliseconds:8.3f} ms {count:6.1f}x {name}")
    for name, milliseconds, count in row.get("prompt_kernels", [])[:8]:
        print(f"      prompts {milliseconds:8.3f} ms {count:6.1f}x {name}")


def main():
    references = {}
    for path in sys.argv[1:]:
        for line in open(path):
            show(json.loads(line), references)


if __name__ == "__main__":
    main()
