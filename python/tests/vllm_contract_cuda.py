"""What the vLLM plugin does on a GPU, without vLLM: pages, tables and slots as vLLM 0.32 makes them, on torch's stream,
eager and captured in torch's CUDA graph, against a reference in double.

    python python/tests/vllm_contract_cuda.py [--time]      needs torch with CUDA, and gyre
"""

import argparse
import statistics
import sys

import torch
from vllm_contract import PAD, Batch, make_cache, reference

from gyre.integrations.vllm.config import Formats
from gyre.integrations.vllm.pages import LayerPages, Queue

DEVICE = torch.device("cuda", 0)
HEADS, KV_HEADS, DIM = 32, 8, 128
LAYERS = 4  # of a captured step
# Largest error of an output: values are normal, a request of one token is its own value.
BOUNDS = {"f32": 2e-3, "f16": 1e-2, "bf16": 4e-2, "tq8": 5e-2, "tq6": 0.15, "tq4": 0.5, "tq3": 1.0}
FORMATS = [
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("tq8", "tq8"),
    ("tq8", "tq4"),
    ("tq4", "tq4"),
    ("tq6", "tq3"),
]
failures = []


def check(name, error, bound):
    good = error <= bound
    print(f"{'ok  ' if good else 'FAIL'} {name:64} {error:.2e} (bound {bound:.0e})", flush=True)
    if not good:
        failures.append(name)


def bound_of(formats, dtype):
    rounding = {torch.float32: 0.0, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    return max(BOUNDS[formats.k], BOUNDS[formats.v]) + rounding


def layer_of(queue, formats, blocks, page):
    cache = make_cache(formats, blocks, page, KV_HEADS, DIM, DEVICE)
    return LayerPages(queue, cache, formats, KV_HEADS, DIM, DIM, page)


def error_of(out, batch, *options):
    expected = reference(batch, DIM**-0.5, *options)
    return (out[: batch.tokens].double() - expected).abs().nan_to_num(float("inf")).max().item()


class Ordinary:
    """Layers with K and V, for captured(); vllm_latent_cuda.py has others."""

    scale = DIM**-0.5

    def batch(self, page, requests, *padding, **options):
        return Batch(DEVICE, HEADS, KV_HEADS, DIM, page, requests, *padding, **options)

    def layer(self, queue, formats, blocks, page):
        return layer_of(queue, formats, blocks, page)

    def out(self, batch):
        return torch.zeros_like(batch.q)

    def error(self, out, batch, formats):
        return error_of(out, batch)

    def bound(self, formats, dtype):
        return bound_of(formats, dtype)


def eager(queue):
    """Ragged steps: decodes, chunks of prompts, first chunks; padding of requests and tokens; stale table entries."""
    requests = [(1, 26), (1, 900), (64, 300), (13, 13), (1, 1), (5, 777)]
    for k, v in FORMATS:
        formats = Formats(k, v)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for page, window, soft_cap, extras in [(16, 0, 0.0, False), (64, 128, 0.0, False), (128, 0, 30.0, True)]:
                batch = Batch(DEVICE, HEADS, KV_HEADS, DIM, page, requests, 2, 3, seed=page, dtype=dtype)
                layer = layer_of(queue, formats, batch.blocks, page)
                batch.write_past(layer)
                torch.cuda.synchronize()
                batch.spoil(layer, window)
                sink_logits = torch.randn(HEADS, device=DEVICE) if extras else None
                alibi_slopes = torch.rand(HEADS, device=DEVICE) / 8 if extras else None
                out = torch.full_like(batch.q, 7.0)
                is_prefill = torch.tensor([t > 5 for t, _ in requests] + [False] * 2, device=DEVICE)
                step = queue.step(**batch.step_arguments(is_prefill=is_prefill))
                layer.write(batch.k, batch.v, step.slots)
                wrapped = {n: queue.wrap(x) for n, x in (("sink_logits", sink_logits), ("alibi_slopes", alibi_slopes)) if x is not None}
                layer.attend(batch.q, out, step, DIM**-0.5, window=window, soft_cap=soft_cap, **wrapped)
                name = f"eager {k}/{v} {str(dtype)[6:]} page {page} window {window} cap {soft_cap} sink_logits {extras}"
                check(name, error_of(out, batch, window, soft_cap, sink_logits, alibi_slopes), bound_of(formats, dtype))
                if not (out[batch.tokens :] == 7).all():
                    check(name + ": rows of no request", float("inf"), 0)


def run_layers(kind, layers, batch, step, outs):
    for layer, out in zip(layers, outs):
        layer.write(batch.k, batch.v, step.slots)
        layer.attend(batch.q, out, step, kind.scale)


def captured(queue, formats, queries, dtype, page=64, kind=Ordinary()):
    """A graph of several layers, captured once with the bounds, replayed with other lengths, tables and tokens."""
    most, width = 2048, 2048 // page
    steps = [
        [(queries, n) for n in kv_lengths] for kv_lengths in ([40, 700, 2048, 9], [2048, 5, 333, 1200], [1025, 64, 65, 63])
    ]
    batches = [
        kind.batch(page, s, 2, 2 * queries, seed=i, dtype=dtype, width=width) for i, s in enumerate(steps)
    ]
    blocks = max(batch.blocks for batch in batches)
    layers = [kind.layer(queue, formats, blocks, page) for _ in range(LAYERS)]
    held = batches[0]  # its tensors are the persistent buffers
    held.max_kv_length = most
    outs = [kind.out(held) for _ in layers]
    table = torch.zeros(len(held.kv_lengths), width + 16, dtype=torch.int32, device=DEVICE)
    table[:, :width] = held.table
    held.table = table[:, :width]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step = queue.step(**held.step_arguments())
        run_layers(kind, layers, held, step, outs)  # kernels are compiled, scratch memory is taken
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    before = queue.device.memory().system_allocations
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step = queue.step(**held.step_arguments())
        run_layers(kind, layers, held, step, outs)
    name = f"captured {formats.k}/{formats.v} {str(dtype)[6:]} {queries} queries"
    check(name + ": allocations while captured", queue.device.memory().system_allocations - before, 0)
    for i, batch in enumerate([batches[1], batches[2], batches[1]]):
        for layer in layers:
            batch.write_past(layer)
        fresh = kind.layer(queue, formats, blocks, page)
        batch.write_past(fresh)
        for buffer in ("q", "k", "slots", "kv_lengths", "cu_seqlens_q", "table"):
            getattr(held, buffer).copy_(getattr(batch, buffer))
        held.v.copy_(batch.v)
        graph.replay()
        once = kind.out(held)
        run_layers(kind, [fresh], batch, queue.step(**batch.step_arguments(max_kv_length=most)), [once])
        torch.cuda.synchronize()
        for number, out in enumerate(outs):
            check(f"{name} replay {i} layer {number}", kind.error(out, batch, formats), kind.bound(formats, dtype))
            check(f"{name} replay {i} layer {number}: bits of eager", 0.0 if torch.equal(out, once) else 1.0, 0)


def larger_step_between(queue):
    """Other shapes use the scratch memory between two replays."""
    for queries in (1, 5, 1):
        captured(queue, Formats("tq4", "tq4"), queries, torch.bfloat16)
    captured(queue, Formats("bf16", "tq8"), 3, torch.bfloat16)


def timing(queue, sequences=64, length=4096, page=64, repeats=20):
    pages = length // page
    for k, v in [("tq4", "tq4"), ("tq8", "tq4"), ("tq8", "tq8"), ("f16", "f16")]:
        layer = layer_of(queue, Formats(k, v), sequences * pages + 1, page)
        order = torch.randperm(sequences * pages, device=DEVICE).int() + 1
        table = torch.zeros(sequences, pages + 16, dtype=torch.int32, device=DEVICE)
        table[:, :pages] = order.view(sequences, pages)
        place = torch.arange(length, device=DEVICE)
        for row in table:
            slots = row[place // page].long() * page + place % page
            keys = torch.randn(2, length, KV_HEADS, DIM, dtype=torch.bfloat16, device=DEVICE)
            layer.write(keys[0], keys[1], queue.wrap(slots))
        rows = [
            torch.randn(sequences, n, DIM, dtype=torch.bfloat16, device=DEVICE) for n in (HEADS, KV_HEADS, KV_HEADS)
        ]
        out = torch.empty_like(rows[0])
        newest = table[:, pages - 1].long() * page + page - 1
        step = queue.step(
            slots=newest,
            table=table[:, :pages],
            kv_lengths=torch.full((sequences,), length, dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE),
            is_prefill=None,
            max_query_length=1,
            max_kv_length=length,
        )
        parts = {
            "kv_write + attention": (True, True),
            "attention": (False, True),
            "kv_write": (True, False),
        }
        for what, (writes, attends) in parts.items():

            def once():
                if writes:
                    layer.write(rows[1], rows[2], step.slots)
                if attends:
                    layer.attend(rows[0], out, step, DIM**-0.5)

            once()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    once()
            times = []
            for _ in range(12):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / repeats)
            shape = f"{sequences} x {length} at {HEADS}/{KV_HEADS}/{DIM}"
            print(f"time {k}/{v} {shape}, captured: {what} {statistics.median(times):.1f} us", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--time", action="store_true", help="only the timing")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch has no CUDA device here")
        return 0
    queue = Queue(DEVICE)
    print(torch.__version__, torch.cuda.get_device_name(0), "PAD", PAD)
    with torch.no_grad():
        if not arguments.time:
            eager(queue)
            for k, v in FORMATS:
                captured(queue, Formats(k, v), 1, torch.bfloat16)
            larger_step_between(queue)
        timing(queue)
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
