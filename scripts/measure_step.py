#!/usr/bin/env python3
"""Measures the rest of a step for `gyre simulate`: everything of a model but attention over its cache.

usage: scripts/measure_step.py llama-3.1-8b [--device cuda] [--dtype bfloat16] [--tokens 1 8 64]

Random weights of the model's shapes, distinct in every layer, go through all matrix products of a step with 1 to 4096 tokens. The
time of one token is --step-ms; what each token adds between the two largest steps is --token-us. Both go to bench/step_preset.cpp.
CUDA steps are captured in a graph and replayed, as engines do: launches are not counted. Needs PyTorch >= 2.4 alone, and the memory of
the weights. llama-3.1-8b on a GPU takes seconds; on a CPU give fewer --tokens.
"""

import argparse
import time

import torch

# hidden, intermediate, layers, query heads, KV heads, head dim, vocabulary
SHAPES = {
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936),
}
TOKENS = (1, 8, 64, 256, 1024, 4096)


def weights(shape, device, dtype):
    hidden, inner, layers, heads, kv_heads, dim, vocabulary = shape
    make = lambda rows, columns: torch.randn(rows, columns, device=device, dtype=dtype) * columns**-0.5
    every = [
        (make((heads + 2 * kv_heads) * dim, hidden), make(hidden, heads * dim), make(2 * inner, hidden), make(hidden, inner))
        for _ in range(layers)
    ]
    return every, make(vocabulary, hidden)


def step(x, every, head, heads_dim, sequences):
    for qkv, out, up, down in every:
        attended = torch.nn.functional.linear(torch.nn.functional.rms_norm(x, x.shape[-1:]), qkv)[:, :heads_dim]
        x = x + torch.nn.functional.linear(attended, out)
        gate, value = torch.nn.functional.linear(torch.nn.functional.rms_norm(x, x.shape[-1:]), up).chunk(2, -1)
        x = x + torch.nn.functional.linear(torch.nn.functional.silu(gate) * value, down)
    return torch.nn.functional.linear(x[:sequences], head)


def captured(run):
    """run() as a CUDA graph; it has run once before, which the capture needs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run, device, rounds):
    """The median of rounds behind a first one that warms up."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None
    found = []
    for i in range(rounds + 1):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        found.append(time.perf_counter() - begin)
        if i == 0 and device.type == "cuda":
            run = captured(run)
    return sorted(found[1:])[rounds // 2]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("usage:")[0] + __doc__.split("\n\n", 2)[2])
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="PyTorch's name; default: %(default)s")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights; default: %(default)s")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of the steps, ascending; default: 1 to 4096")
    parser.add_argument("--rounds", type=int, default=10, help="the time is their median; default: %(default)s")
    asked = parser.parse_args(arguments)
    if len(asked.tokens) < 2 or min(asked.tokens) < 1 or sorted(set(asked.tokens)) != list(asked.tokens) or asked.rounds < 1:
        parser.error("--tokens must be two or more ascending counts from 1 on, --rounds at least 1")
    shape, device, dtype = SHAPES[asked.model], torch.device(asked.device), getattr(torch, asked.dtype)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{asked.model}, {asked.dtype}, {where}, PyTorch {torch.__version__}")
    every, head = weights(shape, device, dtype)
    times = []
    with torch.inference_mode():
        for count in asked.tokens:
            x = torch.randn(count, shape[0], device=device, dtype=dtype)
            times.append(seconds(lambda: step(x, every, head, shape[3] * shape[5], min(count, 256)), device, asked.rounds))
            print(f"{count:5} tokens: {1e3 * times[-1]:.3f} ms", flush=True)
    # Small steps give what a step costs, large ones what a token adds.
    token = (times[-1] - times[-2]) / (asked.tokens[-1] - asked.tokens[-2])
    print(f"--step-ms {1e3 * times[0]:.3g} --token-us {1e6 * token:.3g}")


if __name__ == "__main__":
    main()
