#!/usr/bin/env python3
"""Decode attention of PyTorch's backends on this GPU, f16, to compare with `gyre bench attention --device cuda:0`.

Captured in one CUDA graph over more caches than fit into the GPU's L2; median microseconds of one call. With `--latent` it measures
FlashInfer's latent attention over pages of 64, bf16 and FP8, to compare with `gyre bench attention --latent --context 32k` (one sequence,
not in pages) and `gyre bench serving --latent --batch 16 --context 4k`. That needs `flashinfer-python` and its requirements from PyPI, and
nvcc: FlashInfer compiles its kernels.
"""
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(backend, heads, kv_heads, head_dim, context, batch=1, tokens=1):
    """All queries see every key, or, where there are as many as keys, causally."""
    cache_bytes = 4 * batch * kv_heads * context * head_dim
    sets = max(2, min(64, (256 << 20) // cache_bytes + 1))
    make = lambda *shape: torch.randn(batch, *shape, head_dim, device="cuda", dtype=torch.float16)
    k = [make(kv_heads, context) for _ in range(sets)]
    v = [make(kv_heads, context) for _ in range(sets)]
    q = make(heads, tokens)
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = tokens == context
    least = 0 if tokens == 1 else 4 * heads * tokens * context * head_dim / (2 if causal else 1) / 1e9  # us at 1000 TFLOP/s
    with sdpa_kernel(backend):
        return capture(lambda i: attend(q, k[i % sets], v[i % sets], is_causal=causal, enable_gqa=True), cache_bytes,
                       sets, least)


def capture(step, cache_bytes, sets, least_us=0):
    """Median microseconds of a step, over graphs of about 2 ms, so that launching one does not count."""
    count = int(min(128, max(1 if least_us > 100 else 16, 2000 / max(cache_bytes / 4e6, least_us))))
    count = (count + sets - 1) // sets * sets
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


def measure_ragged(heads, kv_heads, head_dim, lengths):
    """Sequences of different lengths in one call, packed, not paged: what PyTorch has for them."""
    from torch.nn.attention.varlen import varlen_attn

    cache_bytes = 4 * sum(lengths) * kv_heads * head_dim
    sets = max(2, min(64, (256 << 20) // cache_bytes + 1))
    make = lambda *shape: torch.randn(*shape, head_dim, device="cuda", dtype=torch.float16)
    k = [make(sum(lengths), kv_heads) for _ in range(sets)]
    v = [make(sum(lengths), kv_heads) for _ in range(sets)]
    q = make(len(lengths), heads)
    begins = lambda counts: torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    q_begin, k_begin = begins([1] * len(lengths)), begins(lengths)
    step = lambda i: varlen_attn(q, k[i % sets], v[i % sets], q_begin, k_begin, 1, max(lengths), enable_gqa=True)
    return capture(step, cache_bytes, sets)


def measure_latent(backend, dtype, heads, batch, length, page=64):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    pages = length // page
    cache_bytes = batch * length * 576 * dtype.itemsize
    sets = max(2, min(16, (300 << 20) // cache_bytes + 1))
    make = lambda *shape: torch.randn(*shape, device="cuda").to(dtype)
    latent = [make(batch * pages, page, 512) for _ in range(sets)]
    rotary = [make(batch * pages, page, 64) for _ in range(sets)]
    q = torch.randn(batch, heads, 576, device="cuda").to(torch.bfloat16)
    begins = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    order = torch.randperm(batch * pages, device="cuda").to(torch.int32)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    attend = BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.int8, device="cuda"), backend=backend)
    attend.plan(begins, begins * pages, order, lengths, heads, 512, 64, page, False, 0.08, torch.bfloat16, dtype)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if dtype.itemsize == 1 else {}
    q_latent, q_rotary = q[..., :512].contiguous(), q[..., 512:].contiguous()
    step = lambda i: attend.run(q_latent, q_rotary, latent[i % sets], rotary[i % sets], **scales)
    return capture(step, cache_bytes, sets)


SHAPES = [(*shape, context, 1) for shape in ((32, 8, 128), (16, 8, 256)) for context in (4096, 32768, 131072)]
BATCHES = [(32, 8, 128, 4096, 16), (32, 8, 128, 4096, 32), (32, 8, 128, 4096, 64), (32, 8, 128, 1024, 128),
           (16, 8, 256, 4096, 64)]
ROWS = [*((32, 8, 128, tokens, 32768) for tokens in (2, 4, 8, 16)), (24, 4, 256, 4, 32768), (24, 4, 256, 8, 32768),
        (64, 8, 128, 4, 32768), (32, 8, 128, 512, 4096), (32, 8, 128, 512, 32768), (32, 8, 128, 2048, 2048),
        (32, 8, 128, 8192, 8192), (24, 4, 256, 2048, 8192)]
RAGGED = [512, 1024, 2048, 4096, 8192, 16384]


def report(title, run):
    try:
        figure = f"{run():.1f} us"
    except (ImportError, RuntimeError, TypeError, ValueError) as error:  # no kernel for this shape
        figure = str(error).splitlines()[0]
    print(f"{title}: {figure}")


if "--latent" in sys.argv:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for batch, length in ((1, 32768), (16, 4096)):
            for heads in (16, 32, 64, 128):
                for backend in ("fa2", "fa3"):
                    report(f"latent, {heads} heads, {batch} x {length}, FlashInfer {backend} {dtype}",
                           lambda: measure_latent(backend, dtype, heads, batch, length))
    sys.exit()
for heads, kv_heads, head_dim, context, batch in [*SHAPES, *BATCHES]:
    for name, backend in BACKENDS.items():
        report(f"{batch} x {heads}/{kv_heads}/{head_dim} at {context}, {name}",
               lambda: measure(backend, heads, kv_heads, head_dim, context, batch))
for heads, kv_heads, head_dim, tokens, context in ROWS:
    for name, backend in BACKENDS.items():
        report(f"{tokens} tokens, {heads}/{kv_heads}/{head_dim} over {context}, {name}",
               lambda: measure(backend, heads, kv_heads, head_dim, context, tokens=tokens))
for shape in ((32, 8, 128), (16, 8, 256)):
    report(f"16 ragged {'/'.join(map(str, shape))}, varlen", lambda: measure_ragged(*shape, [RAGGED[i % 6] for i in range(16)]))
