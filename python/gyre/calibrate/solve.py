"""From moments to what the encoder uses: a basis B and the triangular factor of the weights in it.

The library stores R B (x - mean), R its rotation (Hadamard and signs). An error in that domain costs W' = R B^-1 W B^-1 R^T, with W what
an error in the coordinates costs. W' = T T^T, T upper triangular: coordinates are quantized in order, and what the error of one adds to
the cost is made good by those behind it.
"""

from __future__ import annotations

import torch

from .feedback import rotated, triangular
from .file import Part
from .model import Attention
from .moments import Moments
from .rotary import Rotary

EXPONENT, FLOOR = -0.3, 0.05  # of the basis
WEIGHT_FLOOR = 0.03
FIRST_GAIN, FIRST_WEIGHT = 2.0, 0.4  # position 0 counts as this many times its attention, at most as this share of all rows


def _power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values[..., None, :] ** exponent) @ vectors.transpose(-1, -2)


def _scaled(matrix: torch.Tensor, floor: float) -> torch.Tensor:
    """The mean of the diagonal becomes 1, and `floor` is added to it."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    diagonal = torch.where(diagonal > 0, diagonal, 1.0)  # a head that is always 0
    return (matrix + matrix.transpose(-1, -2)) / (2 * diagonal) + floor * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


def part(covariance: torch.Tensor | None, weights: torch.Tensor, mean: torch.Tensor | None) -> Part:
    """covariance, weights: f64 [kv_heads, d, d]. Without a covariance: the feedback alone, in the library's own rotation."""
    weights = _scaled(weights, WEIGHT_FLOOR)
    basis = inverse = None
    if covariance is not None:
        basis = _power(_scaled(covariance, FLOOR), EXPONENT)
        inverse = _power(_scaled(covariance, FLOOR), -EXPONENT)
        weights = inverse @ weights @ inverse
    single = lambda x: None if x is None else x.float().contiguous()
    return Part(single(basis), single(inverse), single(mean), *map(single, triangular(rotated(weights))))


def from_text(attention: Attention, rotary: Rotary, moments: Moments, capacity: int) -> tuple[Part, Part]:
    """Keys and values of a layer, for positions [0, capacity)."""
    weight = (FIRST_GAIN * moments.first_mass).clamp(max=FIRST_WEIGHT)
    k_mean, k_second = with_first(
        rotary.mean(moments.k_mean, capacity), rotary.moments(moments.k_second, capacity), moments.first_k, weight
    )
    v_mean, v_second = with_first(moments.v_mean, moments.v_second, moments.first_v, weight)
    k_mean = k_mean if attention.keys_may_have_a_mean else None
    v_mean = v_mean if attention.values_may_have_a_mean else None
    return (
        part(centered(k_second, k_mean), rotary.moments(moments.q_second, capacity), k_mean),
        part(centered(v_second, v_mean), attention.value_weights(), v_mean),
    )


def with_first(
    mean: torch.Tensor, second: torch.Tensor, first: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and second moments in which rows of position 0, [kv_heads, rows, d], count as `weight` [kv_heads] of all rows. A mean
    without them makes the row that heads look at most long, and so badly coded."""
    weight = weight[:, None]
    mean = (1 - weight) * mean + weight * first.mean(1)
    weight = weight[:, :, None]
    return mean, (1 - weight) * second + weight * (first.transpose(1, 2) @ first / first.shape[1])


def centered(second: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """The covariance, or the second moments where the mean stays in the rows."""
    return second if mean is None else second - mean[:, :, None] * mean[:, None, :]


def from_weights(attention: Attention, rotary: Rotary) -> tuple[Part, Part]:
    """Keys and values of a layer from the weights alone. Keys have a factor for each rotary pair, which commutes with the
    rotation and so holds at every position."""
    energies = lambda name: rotary.pair_energies(attention.second_moment(name).diagonal(dim1=1, dim2=2)).diag_embed()
    return part(energies("k"), energies("q"), None), part(attention.second_moment("v"), attention.value_weights(), None)


def feedback_alone(attention: Attention, rotary: Rotary, moments: Moments, capacity: int) -> tuple[Part, Part]:
    """Error feedback alone, so that readers need no transform."""
    return part(None, rotary.moments(moments.q_second, capacity), None), part(None, attention.value_weights(), None)
