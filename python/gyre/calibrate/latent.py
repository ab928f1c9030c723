"""Latent layers (MLA): moments of the latent, of the rotary part and of the absorbed queries, and what the encoder makes of them.

The latent is K and V at once, so its errors are weighed by what reads them: an error e of a key changes a head's output by
W e and, through the key's score, by scale (q . e) W (x - out), with W the head's up-projection of V times its part of o_proj. Rows
before rotation need no positions, and pairs of rotary coordinates have the same energy at each: a calibration holds everywhere.
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
    return [] if dims is None else [LatentAttention(layer.self_attn, *dims) for layer in model.get_decoder().layers]


class LatentMoments:
    """Sums of one layer: what its cache is given, and the queries as they enter attention."""

    def __init__(self, attention: LatentAttention):
        self.attention, self.values = attention, attention.output_weights()
        self.latent, self.rotary, self.queries, self.rotary_queries = Sum(), Sum(), Sum(), Sum()
        self.first: torch.Tensor | None = None
        self.masses: list[torch.Tensor] = []

    def attend(self, attend, step, query: torch.Tensor, mask, *, scale: float, **how) -> torch.Tensor:
        """Stands before a layer's attend(). A batch is of tokens that are each alone at position 0."""
        if query.shape[0] > 1:
            self.first = step.k[:, :, 0].transpose(0, 1).double().cpu()  # [1, tokens tried, latent]
        else:
            self._add(step.k[0], step.v[0], query[0], step.layer.length, scale)
        return attend(step, query, mask, scale=scale, **how)

    def _add(self, latent: torch.Tensor, rotary: torch.Tensor, query: torch.Tensor, begin: int, scale: float) -> None:
        """latent, rotary: [1, tokens, dim]; query: [heads, tokens, latent + rotary], from position `begin` on."""
        latent, rotary, query = (x.double().cpu() for x in (latent, rotary, query))
        if begin == 0 and latent.shape[1] > SKIPPED:
            self.masses.append(_first_mass(torch.cat([latent, rotary], -1)[0], query, scale))
        kept = slice(max(0, SKIPPED - begin), None)
        latent, rotary, query = latent[:, kept], rotary[:, kept], query[:, kept]
        if latent.shape[1] == 0:
            return
        self.latent.add(latent)
        self.rotary.add(rotary)
        # What a wrong score costs a head: the variance of what its output is a mean of.
        spread = torch.einsum("hij,ij->h", self.values, torch.cov(latent[0].T)).clamp(min=0)
        query = query * (scale * spread.sqrt())[:, None, None]
        dim = self.attention.latent
        self.queries.add(query[..., :dim].flatten(0, 1)[None])
        self.rotary_queries.add(query[..., dim:].flatten(0, 1)[None])

    def parts(self, transform: bool) -> tuple[Part, Part]:
        weight = (FIRST_GAIN * torch.stack(self.masses).mean(0)).clamp(max=FIRST_WEIGHT)
        mean, second = with_first(self.latent.mean, self.latent.moment, self.first, weight)
        weights = self.values.sum(0) + len(self.values) * self.queries.moment
        rotary, queries = _pair_energies(self.rotary.moment), _pair_energies(self.rotary_queries.moment)
        if not transform:
            return part(None, weights, None), part(None, queries, None)
        return part(centered(second, mean), weights, mean), part(rotary, queries, None)


def _first_mass(keys: torch.Tensor, query: torch.Tensor, scale: float) -> torch.Tensor:
    """The mean probability of key 0, [1], in a text's first step: keys [tokens, dim], query [heads, tokens, dim]."""
    tokens = len(keys)
    at = torch.arange(min(SETTLED, tokens // 2), tokens)
    scores = (scale * query[:, at] @ keys.T).masked_fill(torch.arange(tokens) > at[:, None], float("-inf"))
    return scores.softmax(-1)[..., 0].mean()[None]


def _pair_energies(second: torch.Tensor) -> torch.Tensor:
    """The mean energy of each pair (m, m + n) in both of its places of a diagonal matrix: what no position changes."""
    energies = second.diagonal(dim1=1, dim2=2).unflatten(-1, (2, -1)).mean(-2)
    return torch.cat([energies, energies], -1).diag_embed()


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
