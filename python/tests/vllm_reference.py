"""Tokens of transformers on a GyreCache, for vllm_engine.py: vllm_reference.py OUT.json MODEL K V [CALIBRATION], prompts of
prompts(). K and V are one format, or one for each of the first layers, with commas, and the last for the others; "own" is
transformers' own cache and attention."""

import functools
import json
import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).parent
TEXT = (TESTS / "data" / "eval.txt").read_bytes()
TOKENS = 32
QUESTIONS = (
    b"The cache of a model is",
    b"This program is free software; you can",
    b"Usage: tar [OPTION...] ",
    b"A",
    TEXT[1000:1300],
    TEXT[5000:5777],
    TEXT[9000:10100],
    *(TEXT[700 * i : 700 * i + 40 + 13 * i] for i in range(3, 12)),
)


@functools.cache
def prompts(folder):
    """16 prompts in the model's tokens: 2 to 1101 where these are bytes."""
    from gyre.eval.text import read_tokens

    made = []
    for text in QUESTIONS:
        ids, start, _ = read_tokens("vllm_reference", str(folder), text)
        made.append([start, *ids])
    return made


MLA = "random-mla"


def make_mla(folder):
    """DeepSeek-V3's attention (512 + 64 coordinates, yarn) with random weights. No experts: a small error must not choose others."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=1024)
    config = DeepseekV3Config(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        max_position_embeddings=4096,
        rope_parameters=dict(yarn, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
        pad_token_id=258,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    DeepseekV3ForCausalLM(config).save_pretrained(folder)


def model_folder(name, links):
    """A folder with the model's own weights alone: vLLM loads every *.safetensors that it finds. `name` may be a path."""
    if name == MLA:
        folder = pathlib.Path(links) / name
        if not (folder / "config.json").exists():
            make_mla(folder)
        return folder
    for models in (TESTS / "data", pathlib.Path(os.environ.get("GYRE_MODELS", TESTS / "data")), pathlib.Path()):
        source = models / name
        if (source / "config.json").exists():
            break
    else:
        return None
    folder = pathlib.Path(links) / source.name
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = folder / file.name
        if file.name != "real_qkv.safetensors" and not link.exists():
            link.symlink_to(file.resolve())
    return folder


def each_layer(formats, layers):
    if "," not in formats:
        return formats
    first = formats.split(",")
    return first + first[-1:] * (layers - len(first))


def main(out, path, k, v, calibration=None):
    import torch
    from transformers import AutoModelForCausalLM

    from gyre.integrations.transformers import GyreCache

    attention = "eager" if k == "own" else "gyre"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    k, v = (each_layer(x, model.config.num_hidden_layers) for x in (k, v))
    answers = []
    for prompt in prompts(path):
        given = torch.tensor([prompt])
        cache = None
        if k != "own":
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
