"""K and V of a layer in pages that somebody else owns, and the two ops over them, on torch's tensors."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

import torch

import gyre
from gyre.calibrate.layer import LayerCalibration

from .calibration import PagesCalibration
from .config import Formats


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
    max_kv_length: int


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
        self._captured: dict[int, gyre.Tensor] = {}
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
        # The graph's tensors belong to torch's pool for graphs, and pages to the engine. The scratch memory is Gyre's:
        # a graph may run as long as the process does.
        memory = self.scratch.memory
        if memory is not None and torch.cuda.is_current_stream_capturing():
            self._captured[memory.data_ptr] = memory

    def step(
        self,
        slots: torch.Tensor,
        table: torch.Tensor,
        kv_lengths: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        is_prefill: torch.Tensor | None,
        max_query_length: int,
        max_kv_length: int,
    ) -> Step:
        return Step(
            slots=self.wrap(slots),
            table=self.wrap(table),
            kv_lengths=self.wrap(kv_lengths),
            cu_seqlens_q=self.wrap(cu_seqlens_q),
            is_prefill=None if is_prefill is None else self.wrap(is_prefill.view(torch.uint8)),
            tokens=slots.shape[0],
            max_query_length=max(max_query_length, 1),
            max_kv_length=max(max_kv_length, 1),
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
    ):
        page_bytes = formats.page_bytes(kv_heads, head_dim, v_head_dim, page_tokens)
        inside = cache.shape[1:].numel()
        dense = cache.dtype == torch.uint8 and cache.dim() > 1 and cache[0].is_contiguous()
        if not dense or inside != page_bytes:
            raise ValueError(
                f"gyre: a layer's pages must be uint8 [pages, {page_bytes} bytes, contiguous], got {cache.dtype} "
                f"{list(cache.shape)} with strides {list(cache.stride())}"
            )
        self.queue = queue
        self.layer_calibration = None if layer_calibration is None else PagesCalibration(queue, layer_calibration)
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
        )

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
    ) -> None:
        """q, out: [tokens, heads, head_dim]; rows of no sequence are not written, with a transform they are V's mean."""
        queue, q, out = self.queue, _first(q, step.tokens), _first(out, step.tokens)
        transform = self.layer_calibration if self.layer_calibration is not None and self.layer_calibration.has_transform else None
        inside = (q, out) if transform is None else transform.enter(q, out)
        gyre.paged_attention(
            queue.encoder,
            queue.wrap(inside[0]),
            self.pages,
            step.table,
            step.kv_lengths,
            step.cu_seqlens_q,
            queue.wrap(inside[1]),
            step.is_prefill,
            None,
            sink_logits,
            alibi_slopes,
            max_query_length=step.max_query_length,
            max_kv_length=step.max_kv_length,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            scratch=queue.scratch,
        )
        if transform is not None:
            transform.leave(inside[1], out)
        queue.run()


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
