"""Tokens of transformers on a GyreCache, for vllm_engine.py: vllm_reference.py OUT.json MODEL K V [CALIBRATION], prompts as in
PROMPTS.
K and V are one format, or one for each layer, with commas."""

import json
import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).parent
TEXT = (TESTS / "data" / "eval.txt").read_bytes()
TOKENS = 32
# Token 256 starts a text. 16 prompts of 2 to 1101 tokens.
PROMPTS = [
    [256, *text]
    for text in (
        b"The cache of a model is",
        b"This program is free software; you can",
        b"Usage: tar [OPTION...] ",
        b"A",
        TEXT[1000:1300],
        TEXT[5000:5777],
        TEXT[9000:10100],
        *(TEXT[700 * i : 700 * i + 40 + 13 * i] for i in range(3, 12)),
    )
]


def model_folder(name, links):
    """A folder with the model's own weights alone: vLLM loads every *.safetensors that it finds."""
    for models in (TESTS / "data", pathlib.Path(os.environ.get("GYRE_MODELS", TESTS / "data"))):
        source = models / name
        if (source / "config.json").exists():
            break
    else:
        return None
    folder = pathlib.Path(links) / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = folder / file.name
        if file.name != "real_qkv.safetensors" and not link.exists():
            link.symlink_to(file.resolve())
    return folder


def main(out, path, k, v, calibration=None):
    import torch
    from transformers import AutoModelForCausalLM

    from gyre.integrations.transformers import GyreCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="gyre").eval()
    k, v = (x.split(",") if "," in x else x for x in (k, v))
    answers = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        cache = GyreCache(model.config, k=k, v=v, tail=0, sink_tokens=0, capacity=2048, calibration=calibration)
        with torch.no_grad():
            made = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                past_key_values=cache,
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.cat(made.logits).float().topk(2).values
        answers.append(
            {"tokens": made.sequences[0, len(prompt) :].tolist(), "margins": (best[:, 0] - best[:, 1]).tolist()}
        )
    pathlib.Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
