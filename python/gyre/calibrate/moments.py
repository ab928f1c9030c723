"""Moments of queries, keys and values before the rotary embedding, collected from a text that passes through the model.

Position 0 is kept apart: heads look at it most, whatever token it holds, and its rows are unlike all others. `solve` mixes it in by
the attention that it gets.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm

import gyre
from gyre.integrations.transformers import GyreCache

from .model import Attention
from .rotary import Rotary

SKIPPED = 16  # the first tokens of a text are unlike the rest
FIRST_TOKENS = 64  # tokens that are tried at position 0
SETTLED = 64  # queries before this position have too few keys to show how much attention position 0 gets
STEP = 512


@dataclass
class Moments:
    """Moments of one layer, f64. mean: [kv_heads, head_dim]; second: [kv_heads, head_dim, head_dim], E[x x^T]. Queries: over all heads
    that share a KV head, in the layer and in those that share its keys. first_k, first_v: rows of position 0, [kv_heads, tokens tried,
    head_dim], keys after rotation. first_mass: [kv_heads], the attention that position 0 gets."""

    k_mean: torch.Tensor
    k_second: torch.Tensor
    q_second: torch.Tensor
    v_mean: torch.Tensor
    v_second: torch.Tensor
    first_k: torch.Tensor
    first_v: torch.Tensor
    first_mass: torch.Tensor


class Sum:
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
        self.q, self.k, self.v = Sum(), Sum(), Sum()
        self.seen: dict[str, torch.Tensor] = {}
        self.step: tuple[torch.Tensor, int, slice] | None = None  # keys, where they begin, and which rows count
        self.first: tuple[torch.Tensor, torch.Tensor] | None = None
        self.masses: list[torch.Tensor] = []

    def hooks(self) -> list:
        def see(name: str, heads: int):
            def hook(module, args, out):
                self.seen[name] = self._by_head(out, heads)

            return hook

        def see_reader(reader: Attention):
            return lambda module, args, out: self._add_queries(reader, self._by_head(out, reader.heads))

        a = self.attention
        return [
            a.before_rotary("q").register_forward_hook(see("q", a.heads)),
            a.before_rotary("k").register_forward_hook(see("k", a.kv_heads)),
            *(reader.before_rotary("q").register_forward_hook(see_reader(reader)) for reader in a.readers),
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
        self.step = (key, begin, kept)
        self._add_queries(self.attention, q)
        if k[:, kept].shape[1] > 0:
            self.k.add(k[:, kept])
            self.v.add(value[:, kept])

    def _add_queries(self, reader: Attention, q: torch.Tensor) -> None:
        """q: [heads, tokens, head_dim] before rotation, of the layer or of one that shares its keys, over the keys of add()."""
        if self.step is None:  # tokens that are each alone at position 0
            return
        key, begin, kept = self.step
        if begin == 0 and key.shape[1] > SKIPPED:
            self.masses.append(self._first_mass(reader.module, q, key))
        if q[:, kept].shape[1] > 0:
            self.q.add(q[:, kept].unflatten(0, (self.attention.kv_heads, -1)).flatten(1, 2))

    def set_first(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [tokens tried, kv_heads, 1, head_dim], each alone at position 0."""
        self.seen.clear()
        self.step = None
        self.first = tuple(x[:, :, 0].transpose(0, 1).double().cpu() for x in (key, value))

    def _first_mass(self, module, q: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """The mean probability of key 0, [kv_heads], over the queries [heads, tokens, head_dim] before rotation of a text's first
        step. 0 in a layer with a window, which position 0 leaves."""
        groups = self.attention.kv_heads
        if getattr(module, "sliding_window", None):
            return torch.zeros(groups, dtype=torch.float64)
        tokens = key.shape[1]
        at = torch.arange(min(SETTLED, tokens // 2), tokens)
        q = self.rotary.rotate(q[:, at[0] :].cpu(), at).float().unflatten(0, (groups, -1))
        scores = module.scaling * torch.einsum("hgtd,hnd->hgtn", q, key.float().cpu())
        if soft_cap := getattr(module, "attn_logit_softcapping", None):
            scores = soft_cap * (scores / soft_cap).tanh()
        scores = scores.masked_fill(torch.arange(tokens) > at[:, None], float("-inf"))
        if (sinks := getattr(module, "sinks", None)) is not None:
            sinks = sinks.detach().float().cpu().view(groups, -1, 1, 1).expand(-1, -1, len(at), 1)
            scores = torch.cat([scores, sinks], -1)
        return scores.softmax(-1)[..., 0].double().mean((1, 2))

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
        mass = torch.stack(self.masses).mean(0)
        return Moments(self.k.mean, self.k.moment, self.q.moment, self.v.mean, self.v.moment, *self.first, mass)


class _Tap(GyreCache):
    """A cache in f32 that shows what enters it: one text, or a batch of tokens that are each alone at position 0."""

    def __init__(self, config, capacity: int, layers: list[_Layer], device: gyre.Device | None):
        super().__init__(config, k="f32", v="f32", capacity=capacity, step_tokens=STEP, device=device)
        self.taps = layers

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if key_states.shape[0] > 1:
            self.taps[layer_idx].set_first(key_states, value_states)
        else:
            begin = self.layers[layer_idx].length
            self.taps[layer_idx].add(key_states[0], value_states[0], begin, SKIPPED)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def first_tokens(texts: list[torch.Tensor]) -> torch.Tensor:
    """What position 0 may hold: the tokens that start texts, and others from all over them."""
    starts, others = torch.stack([text[0] for text in texts]).unique(), torch.cat([text[1:] for text in texts])
    others = others[torch.linspace(0, len(others) - 1, FIRST_TOKENS).long()]
    return torch.cat([starts, others])[:FIRST_TOKENS]


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
            first = first_tokens(texts)
            model(first[:, None].to(model.device), past_key_values=_Tap(model.config, 1, layers, device), use_cache=True, logits_to_keep=1)
            for text in texts:
                cache = _Tap(model.config, len(text), layers, device)
                for begin in range(0, len(text), STEP):
                    part = text[begin : begin + STEP]
                    model(part[None].to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
                    bar.update(len(part))
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)
    return [layer.moments() for layer in layers], sum(max(0, len(text) - SKIPPED) for text in texts)
