"""How others store keys and values, or latents, to compare with: rows are rounded as they would be, kept in f32, and attended to in torch.

Bits per coordinate count every scale. Scales of a whole tensor are 1, as in engines that were not given any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

import gyre
from gyre.calibrate.feedback import rotation
from gyre.integrations.transformers.columns import Columns
from gyre.integrations.transformers.config import layer_dims, refused, sharing_layers, stored_layers
from gyre.integrations.transformers.layer import GyreLayer, Step
from gyre.integrations.transformers.stores import Scratch

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _q4_0(x: torch.Tensor) -> torch.Tensor:
    """llama.cpp's: 32 coordinates share an f16 scale, their extreme is -8."""
    blocks = x.unflatten(-1, (-1, 32))
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (extreme / -8).half().float()
    codes = (blocks / torch.where(scale == 0, 1.0, scale) + 8.5).floor().clamp(0, 15)
    return ((codes - 8) * scale).flatten(-2)


def _rotated_q4_0(x: torch.Tensor) -> torch.Tensor:
    rotation_matrix = rotation(x.shape[-1]).float()
    return _q4_0(x @ rotation_matrix.T) @ rotation_matrix


def _nvfp4(x: torch.Tensor) -> torch.Tensor:
    """16 coordinates in e2m1 share an e4m3 scale."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    parts = (blocks / torch.where(scale == 0, 1.0, scale)).clamp(-6, 6)
    magnitude = _E2M1[torch.bucketize(parts.abs().contiguous(), (_E2M1[1:] + _E2M1[:-1]) / 2)]
    return (magnitude * parts.sign() * scale).flatten(-2)


def _fp8(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _fp8_tiles(x: torch.Tensor) -> torch.Tensor:
    """vLLM's and FlashMLA's latent (fp8_ds_mla): 128 coordinates in e4m3 share an f32 scale."""
    tiles = x.unflatten(-1, (-1, 128))
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    return (_fp8(tiles / torch.where(scale == 0, 1.0, scale)) * scale).flatten(-2)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _between_extremes(x: torch.Tensor, dim: int) -> torch.Tensor:
    """4 bits from the least to the largest along `dim`, both of which are kept in f16."""
    least = x.amin(dim, keepdim=True).half().float()
    step = ((x.amax(dim, keepdim=True) - least) / 15).half().float()
    step = torch.where(step == 0, 1.0, step)
    return ((x - least) / step).round().clamp(0, 15) * step + least


_KIVI_GROUP = 128


@dataclass(frozen=True)
class Baseline:
    """bits: per coordinate of what is rounded. residual: newest tokens that are not, in 16 bits."""

    bits: float
    round: Callable[[torch.Tensor], torch.Tensor] | None = None  # rows of a head, when they are written; None: as KIVI
    residual: int = 0
    rotary_in_bf16: bool = False  # of latent layers, which alone may be stored so


BASELINES = {
    "fp8": Baseline(8, _fp8),
    "fp8-tiles": Baseline(8 + 32 / 128, _fp8_tiles, rotary_in_bf16=True),
    "q4_0-rotated": Baseline(4.5, _rotated_q4_0),
    "nvfp4": Baseline(4.5, _nvfp4),
    "kivi4": Baseline(4 + 32 / _KIVI_GROUP, None, _KIVI_GROUP),
}


class _RoundedLayer(GyreLayer):
    """Stands where a GyreLayer does: attention() of the integration asks it to attend."""

    def __init__(self, baseline: Baseline, stored: gyre.KvLayer, capacity: int):
        super().__init__(stored, Columns(), capacity, False, 1, False, None, Scratch())
        self.baseline = baseline
        self.k = self.v = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[Step, Step]:
        self.torch_device = key_states.device
        step = self.step(key_states, value_states)
        return step, step

    def _write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [batch, kv_heads, tokens, head_dim]"""
        if self.k is None:
            self.k, self.v = (torch.zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in (k, v))
            self.rounded_k = self.rounded_v = 0
        begin, end = self.length, self.length + k.shape[2]
        store_k = self.baseline.round or (lambda x: x)
        store_v = _bf16 if self.baseline.rotary_in_bf16 else store_k
        self.k[:, :, begin:end], self.v[:, :, begin:end] = store_k(k.float()), store_v(v.float())
        self.length = end

    def _let_go(self) -> None:
        """As KIVI: keys are rounded channel by channel when a group is whole, values row by row when they leave the residual."""
        end = self.length // _KIVI_GROUP * _KIVI_GROUP
        for begin in range(self.rounded_k, end, _KIVI_GROUP):
            group = slice(begin, begin + _KIVI_GROUP)
            self.k[:, :, group] = _between_extremes(self.k[:, :, group], 2)
        self.rounded_k = end
        end = max(self.rounded_v, self.length - self.baseline.residual)
        rows = self.v[:, :, self.rounded_v : end].unflatten(-1, (-1, min(_KIVI_GROUP, self.v.shape[-1])))
        self.v[:, :, self.rounded_v : end] = _between_extremes(rows, -1).flatten(-2)
        self.rounded_v = end

    def attend(self, step: Step, query: torch.Tensor, mask, *, scale: float, soft_cap: float, sink_logits) -> torch.Tensor:
        if mask is not None:
            raise refused("a baseline takes sequences without padding")
        begin = self.length if step.readers == 0 else self.length - query.shape[2]
        if step.readers == 0:
            self._write(step.k, step.v)
        step.readers += 1
        if self.baseline.round is None and query.shape[2] == 1:
            self._let_go()  # a prompt's own keys are exact, as KIVI's are
        batch, heads, tokens = query.shape[:3]
        first = max(0, begin + 1 - self.window) if self.window else 0
        k, v = self.k[:, :, first : self.length], self.v[:, :, first : self.length]
        if self.stored.latent:  # which is V as well
            k, v = torch.cat([k, v], -1), k
        q = query.float().reshape(batch, k.shape[1], -1, tokens, query.shape[3])
        scores = scale * torch.einsum("bhgtd,bhnd->bhgtn", q, k)
        scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
        at, key = torch.arange(begin, self.length)[:, None], torch.arange(first, self.length)[None, :]
        hidden = (key > at) | ((key <= at - self.window) if self.window else False)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink_logits is not None:
            scores = torch.cat([scores, sink_logits.view(1, k.shape[1], -1, 1, 1).expand(batch, -1, -1, tokens, 1)], -1)
        p = scores.softmax(-1)[..., : k.shape[2]]
        out = torch.einsum("bhgtn,bhnd->bhgtd", p, v).reshape(batch, heads, tokens, -1)
        if self.baseline.round is None and query.shape[2] > 1:
            self._let_go()
        return out.transpose(1, 2).to(query.dtype)


class RoundedCache(Cache):
    """A cache for past_key_values on the CPU, in place of a GyreCache."""

    def __init__(self, config, name: str, capacity: int):
        self.baseline = BASELINES[name]
        stored = stored_layers(config, "f32", "f32", 0, 0)
        latent = stored[0].latent
        if self.baseline.rotary_in_bf16 and (not latent or stored[0].head_dim % 128):
            raise refused(f"{name} is for latent layers of a multiple of 128 coordinates")
        if self.baseline.round is None and latent:
            raise refused(f"{name} is not for latent layers")
        if self.baseline.round is None and any(sharing_layers(config)):
            raise refused(f"{name} is not for layers that share keys and values")
        self.dims = layer_dims(config)
        super().__init__(layers=[_RoundedLayer(self.baseline, layer, capacity) for layer in stored])

    def bytes_of(self, tokens: int) -> float:
        """What the rounded rows of this many tokens would take."""
        total, bits = 0, self.baseline.bits
        for layer, (kv_heads, head_dim) in zip(self.layers, self.dims):
            stored = min(tokens, layer.window or tokens)
            exact = min(stored, self.baseline.residual)
            row_bits = 2 * kv_heads * head_dim * bits
            if layer.stored.latent:
                row_bits = layer.stored.head_dim * bits + layer.stored.v_head_dim * (16 if self.baseline.rotary_in_bf16 else bits)
            total += ((stored - exact) * row_bits + exact * 2 * kv_heads * head_dim * 16) / 8
        return total
