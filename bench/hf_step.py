#!/usr/bin/env python3
"""A decode step of a Hugging Face model on the CPU: PyTorch's attention and caches beside Gyre's.

    python bench/hf_step.py [MODEL_DIR or llama-3.2-1b] [--context 8000] [--threads 2] [--rounds 15] [--cpu-time]

Every cache holds the same random keys and values. One step of each in turns, round by round; printed are medians, and
how far the last logits are from the first row's. The sequence grows by one token a round, alike for all. llama-3.2-1b
has that model's shape and random weights. --cpu-time takes the processor's time of one thread instead of the clock's:
for machines where others work.
"""

import argparse
import json
import os
import statistics
import time

import torch
import transformers
from hf_prefill import load
from transformers import DynamicCache, StaticCache

import gyre
from gyre.integrations.transformers import GyreCache

FORMATS = ("f32", "f16", "tq8", "tq6", "tq8/tq4", "tq4")


def fill(cache, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Stores k and v [1, kv_heads, tokens, head_dim] without attending."""
    if not isinstance(cache, GyreCache):
        cache.update(k, v, layer)
        return
    target = cache.layers[layer]
    target.lazy_initialization(k, v)
    store, tokens = target.store, k.shape[2]
    for begin in range(0, tokens, target.step_tokens):
        part = slice(begin, begin + target.step_tokens)
        rows = [x[0, :, part].transpose(0, 1) for x in (k, v)]
        store.cache.begin_step(store.encoder, rows[0].shape[0])
        store.cache.append(store.encoder, 0, *rows)
        store.encoder.submit().wait()
    target.columns.record(1, 0, tokens, None)
    target.length = tokens


def settings(config, context: int, rounds: int) -> dict:
    """Name: the attention and an empty cache."""
    room = context + rounds + 1  # and one step to warm up
    made = {
        "sdpa, DynamicCache": ("sdpa", DynamicCache(config=config)),
        "sdpa, StaticCache": ("sdpa", StaticCache(config=config, max_cache_len=room)),
        "eager, DynamicCache": ("eager", DynamicCache(config=config)),
    }
    for name in FORMATS:
        k, _, v = name.partition("/")
        made[f"gyre, {name}"] = ("gyre", GyreCache(config, k=k, v=v or k, tail=0, sink_tokens=0, capacity=room))
    return made


@torch.inference_mode()
def measure(model, context: int, rounds: int, clock) -> dict[str, dict[str, float]]:
    config = model.config
    rows = settings(config, context, rounds)
    for layer in range(config.num_hidden_layers):
        k, v = torch.randn(2, 1, config.num_key_value_heads, context, config.head_dim).unbind()
        for _, cache in rows.values():
            fill(cache, layer, k, v)
    times, logits = {name: [] for name in rows}, {}
    for index in range(rounds + 1):
        for name, (attention, cache) in rows.items():
            model.set_attn_implementation(attention)
            token = torch.tensor([[index % config.vocab_size]])
            begin = clock()
            output = model(token, past_key_values=cache)
            times[name].append(clock() - begin)
            logits[name] = output.logits
    truth = logits[next(iter(rows))]
    return {
        name: dict(
            median_ms=1e3 * statistics.median(times[name][1:]),
            least_ms=1e3 * min(times[name][1:]),
            logits_differ=(logits[name] - truth).abs().max().item(),
        )
        for name in rows
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="python/tests/data/tiny-d128")
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    threads = 1 if args.cpu_time else args.threads
    torch.set_num_threads(threads)
    os.environ["GYRE_THREADS"] = str(threads)  # before the first device is opened
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = measure(load(args.model, torch.device("cpu")), args.context, args.rounds, clock)
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        f"{args.model}, {args.context} tokens, {threads} threads, load {os.getloadavg()[0]:.1f}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {gyre.Device('cpu').info.description}"
    )
    for name, row in rows.items():
        median, least, differ = row.values()
        print(f"{name:22} {median:8.1f} ms, least {least:.1f}; logits differ by {differ:.1e}")


if __name__ == "__main__":
    main()
