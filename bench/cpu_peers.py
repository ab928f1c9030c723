#!/usr/bin/env python3
"""Attention of PyTorch and MLX on this CPU beside `gyre bench attention`, by turns: medians and ratios.

usage: bench/cpu_peers.py GYRE [--threads 2] [--rounds 5] [--context 16384] [--tokens 1] [--shape 32/8/128]
--tokens 512 measures prompts. PyTorch's queries then see all keys, and in a second row a mask hides what is ahead of them, as it is
in Gyre.
GYRE is the command line, build/release/tools/gyre. A peer whose package is not installed is left out
(pip install torch "mlx[cpu]").
"""
import argparse
import json
import os
import statistics
import subprocess
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("gyre")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--context", type=int, default=16384)
parser.add_argument("--tokens", type=int, default=1, help="queries, the newest of the context")
parser.add_argument("--shape", default="32/8/128", help="query heads / KV heads / head dim")
parser.add_argument("--formats", default="f16,bf16,tq8,tq4")
parser.add_argument("--peers", default="torch,mlx", help="MLX takes minutes for a prompt")
parser.add_argument("--seconds", type=float, default=0.4, help="for each row of each round")
options = parser.parse_args()
heads, kv_heads, head_dim = map(int, options.shape.split("/"))

# Before the packages are loaded: they ask once. All get the same cores.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = str(options.threads)
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])


def median_us(step):
    """Over caches in turns, so that none is left in the cores' caches by the call before."""
    times, end = [], time.perf_counter() + options.seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        step(len(times))
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[1:])


def torch_steps():
    import torch

    torch.set_num_threads(options.threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    for name, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        make = lambda count, rows: torch.randn(1, count, rows, head_dim).to(dtype)
        caches = [(make(kv_heads, options.context), make(kv_heads, options.context)) for _ in range(3)]
        q = make(heads, options.tokens)
        causal = torch.ones(options.tokens, options.context, dtype=torch.bool).tril(options.context - options.tokens)
        for what, mask in (("", None), (" causal", causal))[: 1 if options.tokens == 1 else 2]:
            yield f"PyTorch {torch.__version__.split('+')[0]} {name}{what}", (
                lambda i, q=q, caches=caches, mask=mask: attend(q, *caches[i % 3], attn_mask=mask, enable_gqa=True))


def mlx_steps():
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    for name, dtype in (("f16", mx.float16), ("bf16", mx.bfloat16)):
        make = lambda count, rows: mx.random.normal((1, count, rows, head_dim)).astype(dtype)
        caches = [(make(kv_heads, options.context), make(kv_heads, options.context)) for _ in range(3)]
        q = make(heads, options.tokens)
        mx.eval(q, caches)
        yield f"MLX {mx.__version__} {name}", (
            lambda i, q=q, caches=caches: mx.eval(mx.fast.scaled_dot_product_attention(
                q, *caches[i % 3], scale=head_dim**-0.5, mask="causal" if options.tokens > 1 else None)))


def gyre_rows():
    command = [options.gyre, "bench", "attention", "--json", "--threads", str(options.threads), "--heads", str(heads),
               "--kv-heads", str(kv_heads), "--head-dim", str(head_dim), "--context", str(options.context), "--tokens", str(options.tokens),
               "--formats", options.formats, "--seconds", str(options.seconds)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for row in map(json.loads, printed.splitlines()):
        yield f"Gyre {row['k']}", row["median_us"]


peers = {}
for name in options.peers.split(","):
    try:
        peers.update({"torch": torch_steps, "mlx": mlx_steps}[name]())
    except ImportError as error:
        print(f"left out: {error}")
times = {}
for _ in range(options.rounds):
    for name, us in gyre_rows():
        times.setdefault(name, []).append(us)
    for name, step in peers.items():
        times.setdefault(name, []).append(median_us(step))
best = min((statistics.median(times[name]) for name in peers), default=None)
print(f"{options.shape}, {options.tokens} over {options.context} keys, {options.threads} threads, {options.rounds} rounds; us, spread")
for name, all_us in times.items():
    us = statistics.median(all_us)
    times_best = f"  {best / us:5.2f} x the best peer" if best else ""
    print(f"{name:24} {us:9.0f}  {min(all_us):.0f} to {max(all_us):.0f}{times_best}")
