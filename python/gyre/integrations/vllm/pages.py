"""K and V of a layer in pages that somebody else owns, and the two ops over them, on torch's tensors."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

import gyre
from gyre.calibrate.layer import LayerCalibration

from .calibration import PagesCalibration
from .config import Formats


DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass
class Step:
    """Where the tokens of a step are: what a layer's write and attention need to know, wrapped once for all layers."""

    slots: gyre.Tensor  # i64 [tokens], negative: not stored
    table: gyre.Tensor  # i32 [sequences, width]
    kv_lengths: gyre.Tensor  # i32 [sequences], this step's tokens included
    cu_seqlens_q: gyre.Tensor  # i32 [sequences + 1]
    is_prefill: gyre.Tensor | None  # u8 [sequences], not 0: a chunk of a prompt
    tokens: int  # rows that are written and attend; padding included
    max_query_length: int
    min_query_length: int
    max_kv_length: int
    # The first layer of a kind lists the step's work for all of them: that layer's pages, and the list or, where the
    # device needs none, None.
    schedules: dict[tuple, tuple[gyre.KvPages, gyre.Tensor | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """The largest steps of layers that are alike."""

    formats: Formats
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_tokens: int
    window: int
    dtype: torch.dtype  # of attention's q and output
    tokens: int  # of a step
    sequences: int
    max_kv_length: int
    drafts: int = 0  # of a sequence
    latent: bool = False  # head_dim is the latent's, v_head_dim the rotary part's

    @property
    def row_dims(self) -> tuple[int, int]:
        """Coordinates of a row of q and of out."""
        return (self.head_dim + self.v_head_dim, self.head_dim) if self.latent else (self.head_dim, self.v_head_dim)


class Queue:
    """Records Gyre's ops and runs them where torch's do: at once on the CPU, on the current stream on a GPU, also
    while that stream is captured."""

    def __init__(self, device: torch.device):
        self.torch_device = device
        self.cuda = device.type == "cuda"
        if not self.cuda and device.type != "cpu":
            raise NotImplementedError(f"gyre: tensors must be on the CPU or a CUDA device, got {device}")
        self.device = gyre.Device(f"cuda:{device.index or 0}") if self.cuda else _cpu_device()
        self.encoder = gyre.Encoder(self.device)
        self.scratch = gyre.AttentionScratch(self.device)
        self.latent_scratch = gyre.AttentionScratch(self.device)  # latent pages need one of their own
        self._schedules: dict[tuple, gyre.Tensor] = {}  # memory that is used from step to step
        self._captured: dict[int, gyre.Tensor] = {}
        self._prepared: set[Workload] = set()
        self._slots: tuple[torch.Tensor | None, gyre.Tensor | None] = (None, None)

    def wrap(self, tensor: torch.Tensor) -> gyre.Tensor:
        return gyre.from_dlpack(tensor, self.device, ordered=False)

    def slots(self, slots: torch.Tensor) -> gyre.Tensor:
        """The slots of a step, wrapped for the first of the layers that get the same tensor."""
        held, wrapped = self._slots
        if held is not slots:
            wrapped = self.wrap(slots)
            self._slots = (slots, wrapped)
        return wrapped

    def run(self) -> None:
        if not self.cuda:
            self.encoder.submit().wait()
            return
        self.encoder.submit_on(torch.cuda.current_stream(self.torch_device).cuda_stream)
        # The graph's tensors belong to torch's pool for graphs, and pages to the engine. Scratch memory and schedules are
        # Gyre's: a graph may run as long as the process does.
        if torch.cuda.is_current_stream_capturing():
            for memory in (self.scratch.memory, self.latent_scratch.memory, *self._schedules.values()):
                if memory is not None:
                    self._captured[memory.data_ptr] = memory

    def schedule(self, step: Step, kind: tuple, pages: gyre.KvPages, **options) -> gyre.Tensor | None:
        """The list of a step's work for layers of one kind. Recorded ahead of the first of them, so that a captured step
        makes its own each time it runs."""
        if not self.cuda:
            return None
        first, made = step.schedules.get(kind, (pages, None))
        if first is pages:  # also when the step runs again: a graph is captured with the step that warmed it up
            lengths = (step.kv_lengths, step.cu_seqlens_q, step.is_prefill)
            bounds = {name: getattr(step, name) for name in ("tokens", "max_query_length", "min_query_length", "max_kv_length")}
            made = gyre.attention_schedule(self.encoder, pages, *lengths, **bounds, **options, memory=self._schedules.get(kind))
            if made is not None:
                self._schedules[kind] = made
            step.schedules[kind] = (pages, made)
        return made

    def prepare(self, work: Workload) -> None:
        """Compiles the kernels of these layers and takes the scratch memory of their largest steps, once."""
        if not self.cuda or work in self._prepared:
            return
        self._prepared.add(work)
        shape = {name: getattr(work, name) for name in ("kv_heads", "head_dim", "v_head_dim", "page_tokens")}
        gyre.prepare(
            self.device,
            [gyre.KvLayer(k=work.formats.k, v=work.formats.v, window=work.window, latent=work.latent)],
            ["pages"],
            heads=work.heads,
            context=work.max_kv_length,
            step_tokens=work.tokens,
            dtype=DTYPES[work.dtype],
            rope=False,
            max_sequences=work.sequences,
            **shape,
        )
        pages = gyre.KvPages(self.device, k=work.formats.k, v=work.formats.v, pages=1, latent=work.latent, **shape)
        for queries in {1, 1 + work.drafts, work.tokens}:
            self._reserve(work, pages, queries)

    def _reserve(self, work: Workload, pages: gyre.KvPages, queries: int) -> None:
        tokens = min(work.tokens, queries * work.sequences)
        i32 = functools.partial(torch.zeros, dtype=torch.int32, device=self.torch_device)
        q, out = (
            torch.empty(tokens, work.heads, dim, dtype=work.dtype, device=self.torch_device) for dim in work.row_dims
        )
        step = self.step(
            slots=i32(tokens),
            table=i32(work.sequences, -(-work.max_kv_length // work.page_tokens)),
            kv_lengths=i32(work.sequences),
            cu_seqlens_q=i32(work.sequences + 1),
            is_prefill=torch.zeros(work.sequences, dtype=torch.uint8, device=self.torch_device),
            max_query_length=queries,
            max_kv_length=work.max_kv_length,
        )
        self.attend(step, pages, page_kind(pages, work.formats, work.latent), q, out, 1.0, window=work.window)
        self.encoder.clear()

    def attend(
        self,
        step: Step,
        pages: gyre.KvPages,
        page_kind: PageKind,
        q: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int = 0,
        causal: bool = True,
        **options,
    ) -> None:
        """Records attention over a layer's pages."""
        dtype, heads = DTYPES[q.dtype], q.shape[1]
        kind = (page_kind, dtype, heads, q.shape[2], out.shape[2], window, causal)  # all that a plan depends on, beside the step
        schedule = self.schedule(step, kind, pages, heads=heads, q_dtype=dtype, window=window, causal=causal)
        gyre.paged_attention(
            self.encoder,
            self.wrap(q),
            pages,
            step.table,
            step.kv_lengths,
            step.cu_seqlens_q,
            self.wrap(out),
            step.is_prefill,
            schedule=schedule,
            max_query_length=step.max_query_length,
            min_query_length=step.min_query_length,
            max_kv_length=step.max_kv_length,
            scale=scale,
            window=window,
            causal=causal,
            scratch=self.latent_scratch if page_kind.latent else self.scratch,
            **options,
        )

    def step(
        self,
        slots: torch.Tensor,
        table: torch.Tensor,
        kv_lengths: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        is_prefill: torch.Tensor | None,
        max_query_length: int,
        max_kv_length: int,
        min_query_length: int = 1,
    ) -> Step:
        return Step(
            slots=self.wrap(slots),
            table=self.wrap(table),
            kv_lengths=self.wrap(kv_lengths),
            cu_seqlens_q=self.wrap(cu_seqlens_q),
            is_prefill=None if is_prefill is None else self.wrap(is_prefill.view(torch.uint8)),
            tokens=slots.shape[0],
            max_query_length=max(max_query_length, 1),
            min_query_length=min(max(min_query_length, 1), max(max_query_length, 1)),
            max_kv_length=max(max_kv_length, 1),
        )


class PageKind(NamedTuple):
    """Layers with equal ones may share a schedule. Kernels load 16 bytes at a time where addresses allow it."""

    formats: Formats
    latent: bool
    page_tokens: int
    page_bytes: int
    stride: int
    address: int


def page_kind(pages: gyre.KvPages, formats: Formats, latent: bool = False) -> PageKind:
    memory = pages.memory
    return PageKind(
        formats, latent, pages.page_tokens, memory.shape[1], memory.strides[0] % 16, memory.data_ptr % 16
    )


@functools.cache
def queue_of(device: torch.device) -> Queue:
    """One for each device: a worker runs its layers one after the other."""
    return Queue(device)


class LayerPages:
    """The pages of one layer."""

    def __init__(
        self,
        queue: Queue,
        cache: torch.Tensor,
        formats: Formats,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        page_tokens: int,
        layer_calibration: LayerCalibration | None = None,
        latent: bool = False,
    ):
        page_bytes = formats.page_bytes(kv_heads, head_dim, v_head_dim, page_tokens, latent)
        inside = cache.shape[1:].numel()
        dense = cache.dtype == torch.uint8 and cache.dim() > 1 and cache[0].is_contiguous()
        if not dense or inside != page_bytes:
            raise ValueError(
                f"gyre: a layer's pages must be uint8 [pages, {page_bytes} bytes, contiguous], got {cache.dtype} "
                f"{list(cache.shape)} with strides {list(cache.stride())}"
            )
        self.queue = queue
        self.layer_calibration = None if layer_calibration is None else PagesCalibration(queue, layer_calibration, latent)
        memory = torch.as_strided(cache, (cache.shape[0], page_bytes), (cache.stride(0), 1), cache.storage_offset())
        self.pages = gyre.KvPages(
            queue.device,
            k=formats.k,
            v=formats.v,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            page_tokens=page_tokens,
            memory=queue.wrap(memory),
            latent=latent,
        )
        self.kind = page_kind(self.pages, formats, latent)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: gyre.Tensor) -> None:
        """k, v: [tokens, kv_heads, head_dim], any token stride; at least as many tokens as slots."""
        queue, tokens = self.queue, slots.shape[0]
        per_layer = {} if self.layer_calibration is None else {"k_calibration": self.layer_calibration.k, "v_calibration": self.layer_calibration.v}
        k, v = queue.wrap(_first(k, tokens)), queue.wrap(_first(v, tokens))
        gyre.kv_write(queue.encoder, k, v, self.pages, slots, **per_layer)
        queue.run()

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        step: Step,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        sink_logits: gyre.Tensor | None = None,
        alibi_slopes: gyre.Tensor | None = None,
        causal: bool = True,
        lse: torch.Tensor | None = None,
    ) -> None:
        """q, out: [tokens, heads, head_dim]; rows of no sequence are not written, with a transform they are V's mean. Over latent pages
        q has the coordinates of the latent and the rotary part, out those of the latent. lse: f32 [tokens, heads], is written."""
        queue, q, out = self.queue, _first(q, step.tokens), _first(out, step.tokens)
        transform = self.layer_calibration if self.layer_calibration is not None and self.layer_calibration.has_transform else None
        inside = (q, out) if transform is None else transform.enter(q, out)
        options = {"window": window, "soft_cap": soft_cap, "sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
        states = None if lse is None else queue.wrap(_first(lse, step.tokens))
        queue.attend(step, self.pages, self.kind, *inside, scale, causal=causal, lse=states, **options)
        if transform is not None:
            transform.leave(inside[1], out)
        queue.run()
        if transform is not None and lse is not None:
            transform.add_mean(lse[: step.tokens], q, scale)


def _first(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == tokens else tensor[:tokens]


def _cpu_device() -> gyre.Device:
    """The CPU with the cores of this worker. OpenMP may have bound the thread we are in to one of them, and Gyre's
    threads would inherit that."""
    cpus = worker_cpus(os.environ)
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        return gyre.Device("cpu")
    bound = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        return gyre.Device("cpu")
    except OSError:  # a core that this process may not use
        return gyre.Device("cpu")
    finally:
        os.sched_setaffinity(0, bound)


def worker_cpus(environment) -> set[int] | None:
    """The cores that vLLM gave this worker's OpenMP threads one by one; None if it bound them to none."""
    explicit = re.search(r"proclist=\[([\d,\s-]+)\]", environment.get("KMP_AFFINITY", ""))
    text = explicit.group(1) if explicit else environment.get("GOMP_CPU_AFFINITY", "")
    if not re.fullmatch(r"[\d,\s-]+", text):
        return None
    cpus: set[int] = set()
    for part in re.split(r"[,\s]+", text.strip()):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return None
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus or None
