#!/usr/bin/env python3
"""Measures the rest of a step for `gyre simulate`: everything of a model but attention over its cache.

usage: scripts/measure_step.py llama-3.1-8b [--device cuda] [--dtype bfloat16]

Random weights of the model's shapes, distinct in every layer, go through all products of a step with 1 to 4096 tokens. A line through
the times is --step-ms (no token) and --token-us (each token); print them, put them into bench/step_preset.cpp. Needs PyTorch and the
memory of the weights.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    shape = SHAPES[asked.model]
    every, head = weights(shape, asked.device, getattr(torch, asked.dtype))
    wait = torch.cuda.synchronize if asked.device.startswith("cuda") else lambda: None
    times = []
    with torch.inference_mode():
        for count in TOKENS:
            x = torch.randn(count, shape[0], device=asked.device, dtype=getattr(torch, asked.dtype))
            found = []
            for _ in range(asked.rounds + 1):
                wait()
                begin = time.perf_counter()
                step(x, every, head, shape[3] * shape[5], min(count, 256))
                wait()
                found.append(time.perf_counter() - begin)
            times.append(sorted(found[1:])[asked.rounds // 2])  # the first one warms up
            print(f"{count:5} tokens: {1e3 * times[-1]:.3f} ms")
    # Small steps give what a step costs, large ones what a token adds.
    token = (times[-1] - times[-2]) / (TOKENS[-1] - TOKENS[-2])
    print(f"--step-ms {1e3 * times[0]:.3g} --token-us {1e6 * token:.3g}")


if __name__ == "__main__":
    main()
