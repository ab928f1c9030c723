#!/usr/bin/env python3
"""Decoding as an engine captures it: a torch graph of layers, each with a kernel of torch's (it scales q), gyre's kv_write
and its attention over pages. Microseconds per layer, and what torch's kernel takes alone in such a graph.

    torch_step.py [--shapes 16x4096 64x4096] [--formats f16 tq8 tq4] [--tokens 1] [--layers 32]
"""

import argparse
import statistics

import torch

from gyre.integrations.vllm.config import Formats
from gyre.integrations.vllm.pages import LayerPages, queue_of

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
ROUNDS, REPLAYS = 7, 10


def captured(record) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        record()  # compiles, takes scratch memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        record()
    return graph


def time_us(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPLAYS)
    return statistics.median(times)


class Step:
    """A decode step of `layers` layers over sequences of equal length, in pages of random order."""

    def __init__(self, formats: Formats, sequences: int, context: int, tokens: int, layers: int):
        device = torch.device("cuda:0")
        queue, width = queue_of(device), -(-context // PAGE)
        page_bytes = formats.page_bytes(KV_HEADS, DIM, DIM, PAGE)
        random = torch.Generator(device=device).manual_seed(1)
        order = torch.randperm(sequences * width, generator=random, device=device).reshape(sequences, width)
        i32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        rows = sequences * tokens
        new = context - tokens + torch.arange(tokens, device=device)
        self.slots = (order[:, new // PAGE] * PAGE + new % PAGE).reshape(-1).contiguous()
        self.pages = []
        prompt = lambda: torch.randn(context, KV_HEADS, DIM, generator=random, device=device, dtype=torch.bfloat16)
        k, v = prompt(), prompt()
        at = torch.arange(context, device=device)
        for _ in range(layers):
            cache = torch.zeros(sequences * width, page_bytes, dtype=torch.uint8, device=device)
            layer = LayerPages(queue, cache, formats, KV_HEADS, DIM, DIM, PAGE)
            for sequence in order:
                layer.write(k, v, queue.wrap((sequence[at // PAGE] * PAGE + at % PAGE).contiguous()))
            self.pages.append(layer)
        torch.cuda.synchronize()
        new_rows = lambda heads: torch.randn(rows, heads, DIM, generator=random, device=device, dtype=torch.bfloat16)
        self.q, self.k, self.v = new_rows(HEADS), new_rows(KV_HEADS), new_rows(KV_HEADS)
        self.out = torch.empty_like(self.q)
        self.table, self.lengths = order.to(torch.int32), i32([context] * sequences)
        self.starts = i32([tokens * i for i in range(sequences + 1)])
        self.queue, self.tokens, self.context = queue, tokens, context

    def torch_alone(self) -> None:
        for _ in self.pages:
            self.q.mul_(1.0)

    def __call__(self) -> None:
        queue, slots = self.queue, self.queue.wrap(self.slots)
        lengths = dict(max_query_length=self.tokens, min_query_length=self.tokens, max_kv_length=self.context)
        step = queue.step(self.slots, self.table, self.lengths, self.starts, None, **lengths)
        for layer in self.pages:
            self.q.mul_(1.0)
            layer.write(self.k, self.v, slots)
            layer.attend(self.q, self.out, step, DIM**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["16x4096", "64x4096"])
    parser.add_argument("--formats", nargs="+", default=["f16", "tq8", "tq4"])
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        sequences, context = map(int, shape.split("x"))
        for name in arguments.formats:
            k, _, v = name.partition("/")
            step = Step(Formats(k, v or k), sequences, context, arguments.tokens, arguments.layers)
            whole, alone = (time_us(captured(record)) / arguments.layers for record in (step, step.torch_alone))
            total = float(step.out.float().square().sum())
            print(f"{shape:>12} {name:>8}  layer {whole:7.2f} us   torch's kernel alone {alone:5.2f} us   ({total:.6g})", flush=True)
            del step


if __name__ == "__main__":
    main()
