"""Moments of queries, keys and values before the rotary embedding, collected from a text that passes through the model."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm

import gyre
from gyre.integrations.transformers import GyreCache

from .model import Attention
from .rotary import Rotary

SKIPPED = 16  # the first tokens of a text: attention sinks and what is unlike the rest
_STEP = 512


@dataclass
class Moments:
    """Moments of one layer, f64. mean: [kv_heads, head_dim]; second: [kv_heads, head_dim, head_dim], E[x x^T]. Queries: over all heads
    that share a KV head."""

    k_mean: torch.Tensor
    k_second: torch.Tensor
    q_second: torch.Tensor
    v_mean: torch.Tensor
    v_second: torch.Tensor


class _Sum:
    def __init__(self):
        self.count, self.first, self.second = 0, 0, 0

    def add(self, x: torch.Tensor) -> None:
        """x: [kv_heads, rows, head_dim]"""
        x = x.double().cpu()
        self.count += x.shape[1]
        self.first = self.first + x.sum(1)
        self.second = self.second + x.transpose(1, 2) @ x

    @property
    def mean(self) -> torch.Tensor:
        return self.first / self.count

    @property
    def moment(self) -> torch.Tensor:
        return self.second / self.count


class _Layer:
    """Sums of one layer. Hooks give q and k before rotation, the cache gives k after it, and v."""

    def __init__(self, attention: Attention, rotary: Rotary):
        self.attention, self.rotary = attention, rotary
        self.q, self.k, self.v = _Sum(), _Sum(), _Sum()
        self.seen: dict[str, torch.Tensor] = {}

    def hooks(self) -> list:
        def see(name: str, heads: int):
            def hook(module, args, out):
                self.seen[name] = self._by_head(out, heads)

            return hook

        a = self.attention
        return [
            a.before_rotary("q").register_forward_hook(see("q", a.heads)),
            a.before_rotary("k").register_forward_hook(see("k", a.kv_heads)),
        ]

    def _by_head(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[heads, tokens, head_dim] of what a projection [1, tokens, heads * head_dim] or a norm, [1, tokens, heads, head_dim]
        or [1, heads, tokens, head_dim], gives."""
        d = self.attention.head_dim
        if x.dim() == 3:
            return x[0].unflatten(-1, (heads, d)).transpose(0, 1)
        return x[0] if x.shape[1] == heads and x.shape[2] != heads else x[0].transpose(0, 1)

    def add(self, key: torch.Tensor, value: torch.Tensor, begin: int, skip: int) -> None:
        """key, value: [kv_heads, tokens, head_dim] as they enter the cache, from position `begin` on."""
        q, k = self.seen.pop("q"), self.seen.pop("k")
        self._check(k, key, begin)
        kept = slice(max(0, skip - begin), None)
        if k[:, kept].shape[1] == 0:
            return
        groups = self.attention.kv_heads
        self.q.add(q[:, kept].unflatten(0, (groups, -1)).flatten(1, 2))
        self.k.add(k[:, kept])
        self.v.add(value[:, kept])

    def _check(self, before: torch.Tensor, after: torch.Tensor, begin: int) -> None:
        """The rotation must be the one that the model does, or every moment would be wrong."""
        positions = torch.arange(begin, begin + before.shape[1])
        expected = self.rotary.rotate(before.cpu(), positions)
        error = (expected - after.double().cpu()).norm() / after.double().norm().cpu().clamp(min=1e-30)
        if not error < 0.02:
            raise gyre.InvalidArgument(
                f"calibrate: {self.attention.model_type}: keys of layer {self.attention.index} are not the ones before rotation, "
                f"rotated in halves by the model's frequencies (they differ by {100 * error:.0f} %): this rotary embedding is not known"
            )

    def moments(self) -> Moments:
        return Moments(self.k.mean, self.k.moment, self.q.moment, self.v.mean, self.v.moment)


class _Tap(GyreCache):
    """A cache in f32 that shows what enters it."""

    def __init__(self, config, capacity: int, layers: list[_Layer], device: gyre.Device | None):
        super().__init__(config, k="f32", v="f32", capacity=capacity, step_tokens=_STEP, device=device)
        self.taps = layers

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        begin = self.layers[layer_idx].length
        self.taps[layer_idx].add(key_states[0], value_states[0], begin, SKIPPED)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def collect(
    model,
    attentions: list[Attention],
    rotaries: list[Rotary],
    texts: list[torch.Tensor],
    device: gyre.Device | None = None,
    progress: bool = True,
) -> tuple[list[Moments], int]:
    """Moments of each layer, and how many tokens they are from. texts: token ids, each a text from its beginning."""
    layers = [_Layer(*pair) for pair in zip(attentions, rotaries)]
    handles = [handle for layer in layers for handle in layer.hooks()]
    before = model.config._attn_implementation
    model.set_attn_implementation("gyre")
    total = sum(len(text) for text in texts)
    try:
        with torch.inference_mode(), tqdm(total=total, unit="token", file=sys.stderr, disable=not progress) as bar:
            bar.set_description("moments")
            for text in texts:
                cache = _Tap(model.config, len(text), layers, device)
                for begin in range(0, len(text), _STEP):
                    part = text[begin : begin + _STEP]
                    model(part[None].to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
                    bar.update(len(part))
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)
    return [layer.moments() for layer in layers], sum(max(0, len(text) - SKIPPED) for text in texts)
