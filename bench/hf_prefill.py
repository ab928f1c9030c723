#!/usr/bin/env python3
"""The prefill of a Hugging Face model: PyTorch's attention and cache beside Gyre's.

    python bench/hf_prefill.py [MODEL_DIR, llama-3.1-8b or llama-3.2-1b] [--context 32768] [--device cuda] [--rounds 3]
        [--formats f16,tq8,tq4] [--step-tokens 512,4096] [--tail 0] [--sinks 0] [--layers 32]

One forward pass of so many random tokens into an empty cache, in turns, round by round; printed are medians, their ratio to the first row's,
and how far the last logits are from its. The named models have that shape and random weights.
"""

import argparse
import os
import statistics
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import gyre
from gyre.integrations.transformers import GyreCache

LLAMA = dict(
    vocab_size=128256,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
SHAPES = {
    "llama-3.1-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, tie_word_embeddings=False),
    "llama-3.2-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True),
}


def load(name: str, device: torch.device, layers: int | None = None):
    torch.manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in SHAPES:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    shape = {**LLAMA, **SHAPES[name]}
    if layers is not None:
        shape["num_hidden_layers"] = layers
    with device:
        return AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype).eval()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def measure(model, tokens: torch.Tensor, rows: dict, rounds: int) -> dict[str, tuple[float, float]]:
    times, logits = {name: [] for name in rows}, {}
    for index in range(rounds + 1):  # the first warms up
        for name, (attention, make) in rows.items():
            model.set_attn_implementation(attention)
            cache = make()
            wait(model.device)
            begin = time.perf_counter()
            output = model(tokens, past_key_values=cache, logits_to_keep=1)
            wait(model.device)
            if index != 0:
                times[name].append(time.perf_counter() - begin)
            logits[name] = output.logits.float()
            del cache, output
    truth = logits[next(iter(rows))]
    return {name: (statistics.median(times[name]), (logits[name] - truth).norm().item() / truth.norm().item()) for name in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="llama-3.1-8b")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--formats", default="f16,tq8,tq4")
    parser.add_argument("--step-tokens", default="", help="a list; GyreCache's own if not given")
    parser.add_argument("--tail", type=int, help="GyreCache's own if not given")
    parser.add_argument("--sinks", type=int, help="GyreCache's own if not given")
    parser.add_argument("--layers", type=int, help="fewer than a named model has")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = load(args.model, device, args.layers)
    options = {key: value for key, value in (("tail", args.tail), ("sink_tokens", args.sinks)) if value is not None}
    rows = {"sdpa, DynamicCache": ("sdpa", lambda: DynamicCache(config=model.config))}
    for step in args.step_tokens.split(","):
        steps = {"step_tokens": int(step)} if step else {}
        for formats in args.formats.split(","):
            k, _, v = formats.partition("/")
            make = lambda k=k, v=v or k, steps=steps: GyreCache(model.config, k=k, v=v, capacity=args.context + 1, **steps, **options)
            rows[f"gyre, {formats}" + (f", steps of {step}" if step else "")] = ("gyre", make)
    tokens = torch.randint(model.config.vocab_size, (1, args.context), generator=torch.Generator().manual_seed(2)).to(device)
    print(
        f"{args.model}, {model.config.num_hidden_layers} layers, {args.context} tokens, load {os.getloadavg()[0]:.1f}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}, {gyre.Device(str(device)).info.description}"
    )
    results = measure(model, tokens, rows, args.rounds)
    first = next(iter(results.values()))[0]
    for name, (seconds, differ) in results.items():
        print(f"{name:30} {1e3 * seconds:9.1f} ms, {seconds / first:.3f}; logits differ by {differ:.1e}")


if __name__ == "__main__":
    main()
