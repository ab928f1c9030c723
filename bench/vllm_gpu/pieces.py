"""Which parts of a step depend on the batch, bit for bit: vLLM's products, and Gyre's writes and attention over pages.
Each part gets the same rows in batches of other shapes; `report` gets one row for each part, with how many rows differ.

The products are those of vLLM's batch-invariant mode where VLLM_BATCH_INVARIANT=1 is set, torch's own otherwise."""

import dataclasses
import os

import torch

from gyre.integrations.vllm.config import Formats
from gyre.integrations.vllm.pages import LayerPages, queue_of

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
LENGTH = 1025
WEIGHTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "logits": (128256, 4096)}


def count_rows(a, b):
    """Rows in which two tensors differ in some bit."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    differ = a.contiguous().view(kind) != b.contiguous().view(kind)
    return int(differ.reshape(a.shape[0], -1).any(dim=1).sum())


def products(device, report):
    linear, mode = torch.nn.functional.linear, "torch"
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        from vllm.model_executor.determinism.batch_invariant import init_batch_invariance, linear_batch_invariant

        init_batch_invariance()
        linear, mode = linear_batch_invariant, "batch invariant"
    for name, (n, k) in WEIGHTS.items():
        random = torch.Generator(device=device).manual_seed(n + k)
        x = torch.randn(2250, k, generator=random, device=device, dtype=torch.float32).bfloat16()
        w = (torch.randn(n, k, generator=random, device=device, dtype=torch.float32) * k**-0.5).bfloat16()
        whole = linear(x, w)
        differ = {m: count_rows(linear(x[:m], w), whole[:m]) for m in (1, 2, 4, 8, 16, 24, 65, 71, 151, 257, 394, 1025)}
        report({"name": f"product {name}, {mode}", "differ": {m: count for m, count in differ.items() if count}})


@dataclasses.dataclass
class Part:
    """A sequence's newest `tokens` of its first `length`."""

    sequence: int
    length: int
    tokens: int
    is_prefill: bool


class World:
    """Sequences of LENGTH tokens whose k, v and q are given, in pages."""

    def __init__(self, device, formats, sequences=4):
        self.device, self.queue = device, queue_of(device)
        self.width = -(-LENGTH // PAGE)
        pages = sequences * self.width
        cache = torch.zeros(pages, formats.page_bytes(KV_HEADS, DIM, DIM, PAGE), dtype=torch.uint8, device=device)
        self.cache = cache
        self.pages = LayerPages(self.queue, cache, formats, KV_HEADS, DIM, DIM, PAGE)
        random = torch.Generator().manual_seed(5)
        rows = lambda heads: torch.randn(sequences, LENGTH, heads, DIM, generator=random).bfloat16().to(device)
        self.q, self.k, self.v = rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)
        self.table = torch.randperm(pages, generator=random).reshape(sequences, self.width)

    def write(self, chunk):
        """All sequences side by side, in chunks."""
        at = torch.arange(LENGTH)
        slots = (self.table[:, at // PAGE] * PAGE + at % PAGE).to(self.device)
        for first in range(0, LENGTH, chunk):
            part = slice(first, first + chunk)
            inputs = [x[:, part].reshape(-1, *x.shape[2:]) for x in (self.k, self.v)]
            self.pages.write(*inputs, self.queue.wrap(slots[:, part].reshape(-1).contiguous()))
        return self.cache.clone()

    def attend(self, parts):
        """Rows of each part."""
        i32 = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + part.tokens)
        q = torch.cat([self.q[p.sequence, p.length - p.tokens : p.length] for p in parts])
        out = torch.empty_like(q)
        flags = torch.tensor([p.is_prefill for p in parts], device=self.device)
        step = self.queue.step(
            slots=torch.zeros(ends[-1], dtype=torch.int64, device=self.device),
            table=i32(self.table[[p.sequence for p in parts]].tolist()),
            kv_lengths=i32([p.length for p in parts]),
            cu_seqlens_q=i32(ends),
            is_prefill=flags if any(p.is_prefill for p in parts) else None,
            max_query_length=max(p.tokens for p in parts),
            min_query_length=min(p.tokens for p in parts),
            max_kv_length=LENGTH,
        )
        self.pages.attend(q, out, step, DIM**-0.5)
        return [out[a:b] for a, b in zip(ends, ends[1:])]


def writes(world, name, report):
    whole = world.write(LENGTH)
    differ = {chunk: count_rows(world.write(chunk), whole) for chunk in (1, 24, 64, 300)}
    report({"name": f"kv_write {name}, pages by chunk", "differ": {chunk: count for chunk, count in differ.items() if count}})
    world.write(LENGTH)


def prompts(world, name, report):
    """A prompt in chunks, alone and beside sequences that decode and another prompt's chunk."""
    (whole,) = world.attend([Part(0, LENGTH, LENGTH, True)])
    beside = [Part(1, 700, 1, False), Part(2, 99, 1, False), Part(3, 512, 40, True)]
    for company, label in ([], "alone"), (beside, "beside others"):
        differ = {}
        for chunk in (1, 9, 17, 24, 64, 100, 512):
            if chunk == 1:
                ends = (1, 2, 64, 65, 129, 512, LENGTH)
                rows = {end: world.attend([*company, Part(0, end, 1, True)])[-1] for end in ends}
                differ[chunk] = sum(count_rows(row, whole[end - 1 : end]) for end, row in rows.items())
                continue
            for first in range(0, LENGTH, chunk):
                end = min(first + chunk, LENGTH)
                row = world.attend([*company, Part(0, end, end - first, True)])[-1]
                differ[chunk] = differ.get(chunk, 0) + count_rows(row, whole[first:end])
        report({"name": f"prompt {name}, {label}", "differ": {chunk: count for chunk, count in differ.items() if count}})


def decoding(world, name, report):
    """A decoded token alone, beside other ones, beside drafts and beside chunks of a prompt."""
    companies = {
        "other lengths": [Part(1, 700, 1, False), Part(2, 99, 1, False)],
        "2 tokens": [Part(1, 700, 2, False)],
        "5 tokens": [Part(1, 700, 5, False)],
        "a chunk of 24": [Part(1, 700, 24, True)],
        "a chunk of 512": [Part(1, 1000, 512, True)],
        "a chunk of 1": [Part(1, 700, 1, True)],
    }
    lengths = (1, 9, 64, 65, 100, 257, 500, 511, 800, LENGTH)
    alone = {length: world.attend([Part(0, length, 1, False)])[0] for length in lengths}
    differ = {}
    for label, company in companies.items():
        rows = {length: world.attend([*company, Part(0, length, 1, False)])[-1] for length in lengths}
        count = sum(count_rows(rows[length], alone[length]) for length in lengths)
        if count:
            differ[label] = count
    report({"name": f"decoding {name}, of {len(lengths)} lengths", "differ": differ})


def run(device, report):
    for k, v in ("tq8", "tq4"), ("tq4", "tq4"):
        world, name = World(device, Formats(k, v)), f"{k} + {v}"
        writes(world, name, report)
        prompts(world, name, report)
        decoding(world, name, report)
    if device.type == "cuda":
        products(device, report)
