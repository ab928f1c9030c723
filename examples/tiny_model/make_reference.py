#!/usr/bin/env python3
"""Writes reference.safetensors: transformers' logits for the model in python/tests/data/tiny-d128, in f32.

`tokens` is a prompt followed by what the model finds most probable. Row i of `logits.<name>` predicts token
len(tokens) - rows + i. <name> is a change of the config, in reference_changes.json, under which the same weights
were run. Needs torch and transformers (`make python` installs them in build/venv).
"""

import json
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
DATA = HERE.parents[1] / "python/tests/data"
PROMPT, ROWS = 700, 10  # more than one step of 512 tokens in prefill
CHANGES = json.loads((HERE / "reference_changes.json").read_text())


def load(changes: dict):
    path = DATA / "tiny-d128"
    config = AutoConfig.from_pretrained(path, **changes)
    options = dict(config=config, dtype=torch.float32, attn_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


@torch.no_grad()
def main() -> None:
    prompt = torch.tensor([[256, *(DATA / "eval.txt").read_bytes()[: PROMPT - 1]]])
    tokens = load({}).generate(prompt, do_sample=False, max_new_tokens=ROWS)
    tensors = {"tokens": tokens[0].to(torch.int32)}
    for name, changes in CHANGES.items():
        tensors[f"logits.{name}"] = load(changes)(tokens[:, :-1]).logits[0, -ROWS:].clone()
    save_file(tensors, HERE / "reference.safetensors")


if __name__ == "__main__":
    main()
