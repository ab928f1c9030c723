"""Latent layers (MLA): moments of the latent, of the rotary part and of the absorbed queries, and what the encoder makes of them.

The latent is K and V at once, so its errors are weighed by what both readers make of them: an error e of the latent x, which a query
gives the probability p, changes a head's output by p W e and, through its score, by p scale (q . e) W (x - out), with W the head's
up-projection of V times its part of o_proj. The weights are the sum of both squares over all queries and keys. The latent is not
rotated, and pairs of rotary coordinates have the same energy at every position: a calibration holds everywhere.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import torch
from tqdm import tqdm

import gyre
from gyre.integrations.transformers import GyreCache
from gyre.integrations.transformers.config import latent_dims

from .file import Part
from .moments import SETTLED, SKIPPED, STEP, Sum, first_tokens
from .rotary import pair_means
from .solve import FIRST_GAIN, FIRST_WEIGHT, centered, part, with_first


@dataclass(frozen=True)
class LatentAttention:
    module: torch.nn.Module
    latent: int
    rotary: int

    def output_weights(self) -> torch.Tensor:
        """W^T W of each head, f64 [heads, latent, latent]."""
        heads, dim = self.module.num_heads, self.module.v_head_dim
        up = self.module.kv_b_proj.weight.detach().double().cpu().view(heads, -1, self.latent)[:, -dim:]
        out = self.module.o_proj.weight.detach().double().cpu().unflatten(1, (heads, dim))  # [hidden, heads, dim]
        through = torch.einsum("nhv,hvl->hnl", out, up)
        return through.transpose(1, 2) @ through


def attentions(model) -> list[LatentAttention]:
    """The attention of each layer; none if the model's layers are not latent."""
    dims = latent_dims(model.config)
    if dims is None:
        return []
    found = [module for module in model.get_decoder().modules() if hasattr(module, "expand_kv")]
    return [LatentAttention(module, *dims) for module in sorted(found, key=lambda module: module.layer_idx)]


class LatentMoments:
    """Sums of one layer: what its cache is given, and what queries make of it."""

    def __init__(self, attention: LatentAttention):
        self.attention, self.values = attention, attention.output_weights()
        self.latent, self.rotary = Sum(), Sum()
        self.value_weights = self.key_weights = self.rotary_weights = 0.0  # [latent or rotary, the same]
        self.keys: torch.Tensor | None = None  # of the text so far, [tokens, latent + rotary]
        self.first: torch.Tensor | None = None
        self.masses: list[torch.Tensor] = []

    def attend(self, attend, step, query: torch.Tensor, mask, *, scale: float, **how) -> torch.Tensor:
        """Stands before a layer's attend(). A batch is of tokens that are each alone at position 0."""
        if query.shape[0] > 1:
            self.first = step.k[:, :, 0].transpose(0, 1).double().cpu()  # [1, tokens tried, latent]
        else:
            self._add(step.k[0], step.v[0], query[0].float().cpu(), step.layer.length, scale)
        return attend(step, query, mask, scale=scale, **how)

    def _add(self, latent: torch.Tensor, rotary: torch.Tensor, query: torch.Tensor, begin: int, scale: float) -> None:
        """latent, rotary: [1, tokens, dim]; query: [heads, tokens, latent + rotary], from position `begin` on."""
        new = torch.cat([latent, rotary], -1)[0].float().cpu()
        self.keys = new if begin == 0 else torch.cat([self.keys, new])
        at = torch.arange(begin, len(self.keys))
        hidden = torch.arange(len(self.keys)) > at[:, None]
        masses = []
        for q, weights in zip(query, self.values.float()):
            p = (scale * q @ self.keys.T).masked_fill(hidden, float("-inf")).softmax(-1)
            masses.append(p[min(SETTLED, len(at) // 2) :, 0].double().mean())
            self._add_weights(p[at >= SKIPPED], scale * q[at >= SKIPPED], weights)
        if begin == 0 and len(at) > SKIPPED:
            self.masses.append(torch.stack(masses).mean()[None])
        kept = slice(max(0, SKIPPED - begin), None)
        if latent[:, kept].shape[1] > 0:
            self.latent.add(latent[:, kept])
            self.rotary.add(rotary[:, kept])

    def _add_weights(self, p: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> None:
        """Adds what errors cost the queries of one head. p: [queries, keys]; q: [queries, latent + rotary], times the softmax scale;
        weights: W^T W."""
        dim = self.attention.latent
        x, squares = self.keys[:, :dim], p.square()
        out, total, squares_x = p @ x, squares.sum(1), squares @ x
        through = out @ weights
        # The sum of p^2 |W (x - out)|^2 over all keys.
        spread = squares @ ((x @ weights) * x).sum(1) - 2 * (through * squares_x).sum(1) + total * (through * out).sum(1)
        q = (q * spread.clamp(min=0).sqrt()[:, None]).double()
        self.value_weights = self.value_weights + total.double().sum() * weights.double()
        self.key_weights = self.key_weights + q[:, :dim].T @ q[:, :dim]
        self.rotary_weights = self.rotary_weights + q[:, dim:].T @ q[:, dim:]

    def parts(self, transform: bool) -> tuple[Part, Part]:
        """The latent's and the rotary part's. transform: False makes error feedback alone."""
        # Positions rotate a pair, and change neither its energy nor what an error of it costs.
        by_pair = lambda second: pair_means(second.diagonal(dim1=-2, dim2=-1)).diag_embed()
        weights, rotary_weights = (self.value_weights + self.key_weights)[None], by_pair(self.rotary_weights[None])
        if not transform:
            return part(None, weights, None), part(None, rotary_weights, None)
        first_weight = (FIRST_GAIN * torch.stack(self.masses).mean(0)).clamp(max=FIRST_WEIGHT)
        mean, second = with_first(self.latent.mean, self.latent.moment, self.first, first_weight)
        return part(centered(second, mean), weights, mean), part(by_pair(self.rotary.moment), rotary_weights, None)


class _Tap(GyreCache):
    """A cache in f16 that shows what enters its layers' attention."""

    def __init__(self, config, capacity: int, taps: list[LatentMoments], device: gyre.Device | None):
        super().__init__(config, k="f16", v="f16", capacity=capacity, step_tokens=STEP, device=device)
        for layer, tap in zip(self.layers, taps):
            layer.attend = functools.partial(tap.attend, layer.attend)


def collect(
    model, attentions: list[LatentAttention], texts: list[torch.Tensor], device: gyre.Device | None = None, progress: bool = True
) -> list[LatentMoments]:
    """Moments of each layer. texts: token ids, each a text from its beginning."""
    taps = [LatentMoments(attention) for attention in attentions]
    before = model.config._attn_implementation
    model.set_attn_implementation("gyre")
    run = lambda ids, cache: model(ids.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
    try:
        total = sum(len(text) for text in texts)
        with torch.inference_mode(), tqdm(total=total, unit="token", file=sys.stderr, disable=not progress) as bar:
            bar.set_description("moments")
            run(first_tokens(texts)[:, None], _Tap(model.config, 1, taps, device))
            for text in texts:
                cache = _Tap(model.config, len(text), taps, device)
                for ids in text.split(STEP):
                    run(ids[None], cache)
                    bar.update(len(ids))
    finally:
        model.set_attn_implementation(before)
    return taps
