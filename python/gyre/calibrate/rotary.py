"""A model's rotary embedding, and what it makes of moments over a range of positions.

A rotated pair (x, y) is the complex number u = x + iy; position p multiplies it by scale e^(ip frequency). So a mean and second moments
over all positions of a range are those at position 0, times averages of e^(ip angle), which are geometric sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import gyre


@dataclass(frozen=True)
class Rotary:
    """Pairs (m, m + n) of the first 2n coordinates are rotated, the others are left alone."""

    frequencies: torch.Tensor  # f64 [n], radians per position
    scale: float  # of rotated coordinates: transformers' attention_scaling

    @property
    def dim(self) -> int:
        return 2 * len(self.frequencies)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [..., tokens, head_dim], positions: [tokens]."""
        u = torch.polar(torch.full_like(self.frequencies, self.scale), positions.double()[:, None] * self.frequencies)
        rotated = self._pairs(x.double()) * u
        return torch.cat([rotated.real, rotated.imag, x[..., self.dim :].double()], -1)

    def mean(self, mean: torch.Tensor, positions: int) -> torch.Tensor:
        """The mean [..., head_dim] of rows over positions [0, positions), from that before rotation."""
        rotated = self._pairs(mean) * (self.scale * average(self.frequencies, positions))
        return torch.cat([rotated.real, rotated.imag, mean[..., self.dim :]], -1)

    def moments(self, moments: torch.Tensor, positions: int) -> torch.Tensor:
        """E[x x^T] [..., head_dim, head_dim] over positions [0, positions), from that before rotation."""
        n, end = len(self.frequencies), self.dim
        xx, xy = moments[..., :n, :n], moments[..., :n, n:end]
        yx, yy = moments[..., n:end, :n], moments[..., n:end, n:end]
        # E[u u^H] turns with the difference of two frequencies, E[u u^T] with their sum.
        a, b = self.frequencies[:, None], self.frequencies[None, :]
        p = torch.complex(xx + yy, yx - xy) * (self.scale**2 * average(a - b, positions))
        s = torch.complex(xx - yy, yx + xy) * (self.scale**2 * average(a + b, positions))
        out = moments.clone()
        out[..., :n, :n], out[..., n:end, n:end] = (p + s).real / 2, (p - s).real / 2
        out[..., n:end, :n], out[..., :n, n:end] = (p + s).imag / 2, (s - p).imag / 2
        if end < moments.shape[-1]:
            rest = torch.complex(moments[..., :n, end:], moments[..., n:end, end:])
            rest = rest * (self.scale * average(self.frequencies, positions))[:, None]
            out[..., :n, end:], out[..., n:end, end:] = rest.real, rest.imag
            out[..., end:, :end] = out[..., :end, end:].transpose(-1, -2)
        return out

    def pair_energies(self, energies: torch.Tensor) -> torch.Tensor:
        """Energies [..., head_dim] of rotated rows, from those before rotation: the mean of each pair, which no position changes."""
        return torch.cat([self.scale**2 * pair_means(energies[..., : self.dim]), energies[..., self.dim :]], -1)

    def _pairs(self, x: torch.Tensor) -> torch.Tensor:
        n = len(self.frequencies)
        return torch.complex(x[..., :n], x[..., n : 2 * n])


def pair_means(energies: torch.Tensor) -> torch.Tensor:
    """The mean of each pair (m, m + n) of [..., 2n], for both of its coordinates."""
    means = energies.unflatten(-1, (2, -1)).mean(-2)
    return torch.cat([means, means], -1)


def average(angle: torch.Tensor, count: int) -> torch.Tensor:
    """The mean of e^(ip angle) over p = 0 .. count - 1."""
    half = angle / 2
    # sin(half) is 0 at angle 0 alone: frequencies are at most 1, their sums at most 2.
    at_zero = half.sin().abs() < 1e-12
    ratio = (count * half).sin() / (count * torch.where(at_zero, 1.0, half.sin()))
    ratio, phase = torch.where(at_zero, 1.0, ratio), (count - 1) * half
    return torch.complex(ratio * phase.cos(), ratio * phase.sin())


def of_layers(decoder) -> list[Rotary]:
    """The rotary embedding of each layer of a transformers decoder."""
    config, module = decoder.config, getattr(decoder, "rotary_emb", None)
    if module is None:
        raise gyre.InvalidArgument(f"calibrate: {config.model_type} has no rotary embedding (rotary_emb)")
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    rotaries = {}
    for kind in set(types):
        own = hasattr(module, f"{kind}_inv_freq")
        rope_type = module.rope_type[kind] if own else module.rope_type
        if rope_type in ("dynamic", "longrope"):
            raise gyre.InvalidArgument(f"calibrate: rope_type {rope_type}: its frequencies depend on the length of a text")
        prefix = f"{kind}_" if own else ""
        frequencies = getattr(module, f"{prefix}inv_freq").detach().double().cpu()
        rotaries[kind] = Rotary(frequencies, float(getattr(module, f"{prefix}attention_scaling")))
    return [rotaries[kind] for kind in types]
