"""One layer of a GyreCache."""

from __future__ import annotations

import copy

import torch
from transformers.cache_utils import CacheLayerMixin

import gyre
from gyre.calibrate.layer import LayerCalibration
from gyre.integrations.torch_ops import state_of

from .columns import Columns
from .config import refused
from .stores import OneSequence, Pages, Scratch, Shape

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def device_name(device: torch.device) -> str:
    if device.type not in ("cpu", "cuda"):
        raise refused(f"tensors must be on the CPU or a CUDA device, got {device}")
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"


class Step:
    """What update() returns in place of keys and values: the new tokens of one layer.

    It is no tensor, so that an attention function that does not know it cannot take the newest tokens for
    the whole history.
    """

    def __init__(self, layer: GyreLayer, k: torch.Tensor, v: torch.Tensor):
        self.layer, self.k, self.v = layer, k, v
        self.readers = 0  # layers that attended: the first stored it, the others share that layer's cache
        self.real: torch.Tensor | None = None  # rows that are no padding, as the first one found; None: all

    def to(self, device: torch.device) -> Step:
        """What models call on keys and values of another layer."""
        if device != self.k.device:
            raise refused(f"layers that share keys and values must be on one device, got {self.k.device} and {device}")
        return self

    def __getattr__(self, name: str):
        raise self._misused()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise cls._misused()

    @staticmethod
    def _misused() -> gyre.InvalidArgument:
        return refused(
            "a GyreCache is read by Gyre's attention only: load the model with "
            'attn_implementation="gyre", or call model.set_attn_implementation("gyre")'
        )


class LatentStep(Step):
    """A Step of a latent layer (MLA). The model's expand_kv(), which would make keys and values of all heads, runs on
    it and does nothing: attention is computed over the latent itself."""

    @property
    def shape(self) -> torch.Size:
        return self.k.shape

    def _same(self, *args, **kwargs) -> LatentStep:
        return self

    view = transpose = expand = new_empty = copy_ = __getitem__ = _same

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            return args[0]
        if function is torch.split:
            return args[0], args[0]
        raise cls._misused()


class GyreLayer(CacheLayerMixin):
    """The keys and values of one layer. A store of its own, so that a prefill of any length can pass through a
    layer in chunks, storing and attending alternately, as rings need it."""

    is_compileable = False

    def __init__(
        self,
        stored: gyre.KvLayer,
        columns: Columns,
        capacity: int,
        grows: bool,
        step_tokens: int,
        paged: bool,
        device: gyre.Device | None,
        scratch: Scratch,
        layer_calibration: LayerCalibration | None = None,
        sharing: int = 0,
    ):
        super().__init__()
        self.sharing = sharing  # layers that attend to this one's keys and values
        self.layer_calibration = layer_calibration
        self.stored = stored
        self.latent = stored.latent  # torch.compile cannot read the properties of a KvLayer
        self.columns = columns
        self.capacity = capacity
        self.grows = grows
        self.step_tokens = step_tokens
        self.paged = paged
        self.device = device
        self.scratch = scratch
        self.window = stored.window
        self.is_sliding = stored.window > 0
        self.length = 0  # columns, padding included
        self.store: OneSequence | Pages | None = None
        self.state = state_of(self)  # for torch.compile

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, kv_heads, tokens, head_dim = key_states.shape
        self.use(self.make_store(batch, kv_heads, head_dim, tokens, key_states.device), key_states.device)

    def make_store(
        self, batch: int, kv_heads: int, head_dim: int, tokens: int, torch_device: torch.device, step_tokens: int | None = None
    ) -> OneSequence | Pages:
        """step_tokens: of a store that is read from a file; otherwise one that is shared has room for its first tokens as a whole."""
        name = device_name(torch_device)
        device = self.device or gyre.Device(name)
        if device.name != name:
            raise refused(f"the cache is on {device.name}, the keys are on {name}")
        layer_calibration = () if self.layer_calibration is None else (self.layer_calibration.on(device),)
        if step_tokens is None:
            step_tokens = max(self.step_tokens, tokens) if self.sharing else self.step_tokens
        shape = Shape(
            device,
            self.stored,
            kv_heads,
            head_dim,
            self.capacity,
            step_tokens,
            self.grows,
            layer_calibration,
            self.sharing,
            self.scratch.of(device, self.latent),
        )
        pages = self.paged or batch > 1
        return Pages(shape, batch, tokens) if pages else OneSequence(shape, tokens)

    def use(self, store: OneSequence | Pages, torch_device: torch.device) -> None:
        self.store = store
        self.heads_and_dim = (store.shape.kv_heads, store.shape.head_dim)
        self.step_tokens = store.shape.step_tokens
        self.torch_device = torch_device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Step, Step]:
        k, v = key_states, value_states
        if self.stored.latent:
            self._check_latent(k, v)
        elif k.dim() != 4 or k.shape != v.shape or k.numel() == 0:
            raise refused(
                "keys and values must have the same shape [batch, kv_heads, tokens, head_dim], with tokens; got "
                f"{list(k.shape)} and {list(v.shape)}"
            )
        if k.dtype not in DTYPES or v.dtype not in DTYPES:
            raise refused(f"keys and values must be float32, float16 or bfloat16, got {k.dtype} and {v.dtype}")
        if k.dtype != v.dtype:
            raise refused(
                f"keys and values must have one dtype, got {k.dtype} and {v.dtype}: load the model in one, without "
                "torch.autocast"
            )
        if k.requires_grad or v.requires_grad:
            raise refused("there are no gradients: run the model under torch.no_grad() or torch.inference_mode()")
        if self.length + k.shape[2] > self.capacity:
            raise refused(
                f"the cache has room for {self.capacity} tokens, holds {self.length}, and was given {k.shape[2]}: pass "
                "a larger capacity to GyreCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        if self.sharing and k.shape[2] > self.step_tokens:
            raise refused(
                f"layers that share keys and values take at most {self.step_tokens} tokens in a step after the first, got {k.shape[2]}: "
                f"pass step_tokens to GyreCache, or prefill_chunk_size={self.step_tokens} to generate()"
            )
        if k.shape[0] != self.store.batch:
            raise refused(f"this cache began with a batch of {self.store.batch}, got {k.shape[0]}")
        if (k.shape[1], k.shape[3]) != self.heads_and_dim:
            raise refused(
                f"this layer began with (kv_heads, head_dim) {self.heads_and_dim}, got {(k.shape[1], k.shape[3])}"
            )
        if not k.device == v.device == self.torch_device:
            raise refused(
                f"this layer's cache is on {self.torch_device}, keys and values are on {k.device} and {v.device}"
            )
        step = self.step(k, v)
        return step, step

    def step(self, k: torch.Tensor, v: torch.Tensor) -> Step:
        return LatentStep(self, k, v) if self.latent else Step(self, k, v)

    def _check_latent(self, k: torch.Tensor, v: torch.Tensor) -> None:
        dims = (self.stored.head_dim, self.stored.v_head_dim)
        if k.dim() != 4 or k.shape[:3] != v.shape[:3] or (k.shape[3], v.shape[3]) != dims or k.numel() == 0:
            raise refused(
                f"the latent and the rotary part must be [batch, 1, tokens, {dims[0]}] and [batch, 1, tokens, {dims[1]}], with "
                f"tokens; got {list(k.shape)} and {list(v.shape)}"
            )

    def store_and_attend(self, query, k, v, mask: torch.Tensor | None, **how) -> torch.Tensor:
        """What torch.ops.gyre.attention does: update() and attend() in one, when the compiled model runs."""
        step, _ = self.update(k, v)
        return self.attend(step, query, None if mask is None or mask.all() else mask, **how)

    def attend(self, step: Step, query: torch.Tensor, mask: torch.Tensor | None, **how) -> torch.Tensor:
        """Stores the step and attends: [batch, heads, tokens, head_dim] to [batch, tokens, heads, head_dim]; over a
        latent, queries of the latent and the rotary part to the latent. Rows of padding are zero. A step that was stored by an earlier
        call is attended to alone."""
        q, k, v = (_token_major(x) for x in (query, step.k, step.v))
        batch, tokens = q.shape[:2]
        if step.readers == 0:
            step.real = self.columns.step(mask, batch, self.length, tokens)
        shape, real, reader = (*q.shape[:3], k.shape[3]), step.real, step.readers
        step.readers += 1
        out = (torch.empty if real is None else torch.zeros)(shape, dtype=query.dtype, device=query.device)
        if reader > 0:
            self._attend_part(real, q, k, v, out, how, reader)
            return out
        for begin in range(0, tokens, self.step_tokens):
            part = slice(begin, min(begin + self.step_tokens, tokens))
            held = None if real is None else real[:, part]
            self._attend_part(held, q[:, part], k[:, part], v[:, part], out[:, part], how)
            self.columns.record(batch, self.length, part.stop - begin, held)
            self.length += part.stop - begin
        return out

    def _attend_part(self, held: torch.Tensor | None, q, k, v, out, how: dict, reader: int = 0) -> None:
        batch, tokens = q.shape[:2]
        if held is None:
            counts = [tokens] * batch
            # A copy only where rows of several sequences lie apart.
            q, k, v, rows = (x.flatten(0, 1) for x in (q, k, v, out))
        else:
            counts = held.sum(1).tolist()
            if not any(counts):
                return
            q, k, v = (x[held] for x in (q, k, v))
            rows = q.new_empty(*q.shape[:2], k.shape[2])
        fence = self.store.attend(counts, q, k, v, rows, reader, **how)
        if rows.is_cuda:
            # Gyre's stream waits for torch's where DLPack hands tensors over; here torch's waits for Gyre's.
            gyres = torch.cuda.ExternalStream(self.store.shape.device.stream, device=rows.device)
            torch.cuda.current_stream(rows.device).wait_stream(gyres)
        else:
            fence.wait()
        if held is not None:
            out[held] = rows
        elif rows.data_ptr() != out.data_ptr():
            out.copy_(rows.view(out.shape))

    @property
    def batch_size(self) -> int:
        if self.store is None:
            raise AttributeError("batch_size is not known before the first tokens")
        return self.store.batch

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.capacity

    def rollback(self, length: int) -> None:
        if length < self.length:
            self.store.rollback(self.columns.tokens(self.store.batch, length, self.length))
            self.length = length

    def reset(self) -> None:
        if self.store is not None:
            self.store.clear()
        self.length = 0

    def select(self, rows: list[int]) -> None:
        if self.store is not None:
            self.store.select(rows)

    def __deepcopy__(self, memo: dict) -> GyreLayer:
        other = copy.copy(self)
        other.state = state_of(other)
        other.columns = copy.deepcopy(self.columns, memo)
        if self.store is not None:
            other.store = self.store.copy()
        return other

    def offload(self) -> None:
        raise refused("offloading is not supported: the cache stays where it is")

    prefetch = offload


def _token_major(x: torch.Tensor) -> torch.Tensor:
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()
