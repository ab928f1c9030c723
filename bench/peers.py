#!/usr/bin/env python3
"""Decode attention of PyTorch's backends on this GPU, f16, to stand beside `gyre bench --device cuda:0`.

Captured in one CUDA graph over caches that leave the GPU's L2 behind; median microseconds of one call.
"""
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(backend, heads, kv_heads, head_dim, context, batch):
    cache_bytes = 4 * batch * kv_heads * context * head_dim
    sets = max(2, min(64, (256 << 20) // cache_bytes + 1))
    make = lambda *shape: torch.randn(batch, *shape, head_dim, device="cuda", dtype=torch.float16)
    k = [make(kv_heads, context) for _ in range(sets)]
    v = [make(kv_heads, context) for _ in range(sets)]
    q = make(heads, 1)
    # As `gyre bench`: graphs of about 2 ms, so that launching one and waiting for it do not count.
    count = int(min(128, max(16, 2000 / (cache_bytes / 4e6))))
    count = (count + sets - 1) // sets * sets
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(backend):
        step = lambda i: attend(q, k[i % sets], v[i % sets], enable_gqa=True)
        for i in range(3):
            step(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                step(i)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / count * 1e6)
    return sorted(times)[len(times) // 2]


SHAPES = [(*shape, context, 1) for shape in ((32, 8, 128), (16, 8, 256)) for context in (4096, 32768, 131072)]
for heads, kv_heads, head_dim, context, batch in [*SHAPES, (32, 8, 128, 4096, 32)]:
    for name, backend in BACKENDS.items():
        try:
            figure = f"{measure(backend, heads, kv_heads, head_dim, context, batch):.1f} us"
        except RuntimeError as error:  # no kernel for this shape
            figure = str(error).splitlines()[0]
        print(f"{batch} x {heads}/{kv_heads}/{head_dim} at {context}, {name}: {figure}")
