"""Bits per layer: the list of formats with the least divergence that a budget allows.

The model is additive: each layer's keys and values add to the mean divergence what `sensitivity` estimates for them in their format. The
search over the lists is exact. A list is taken only where it gains enough over one format for all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import gyre

BITS = {"tq2": 2, "tq3": 3, "tq4": 4, "tq5": 5, "tq6": 6, "tq8": 8}
WORTH_A_LIST = 0.95  # of the divergence predicted with one format for all; estimates are no better than that

# By format: what each layer's keys and values add to the mean divergence.
Costs = dict[str, list[tuple[float, float]]]


@dataclass
class Budget:
    """The formats of each layer's keys and values. bits: asked for, per coordinate, scales included; used: what these take. by:
    "coordinate", where every coordinate counts the same, or "bytes", where a layer's count as many times as it stores tokens.
    predicted: the mean divergence of the additive model."""

    bits: float
    by: str
    k: list[str]
    v: list[str]
    used: float
    predicted: float

    @property
    def is_list(self) -> bool:
        """Layers differ."""
        return len(set(zip(self.k, self.v))) > 1

    def __str__(self) -> str:
        if not self.is_list:
            return f"{self.k[0]}/{self.v[0]} in all layers, no list is predicted to lose less than {WORTH_A_LIST:g} of that"
        return " ".join(f"{k}/{v}" for k, v in zip(self.k, self.v))


def scale_bits(head_dim: int) -> float:
    """Bits of the 16-bit scales per coordinate: one scale for each power of two in head_dim, at most 256 coordinates each."""
    scales = sum(-(-size // 256) for size in (1 << i for i in range(11)) if head_dim & size)
    return 16 * scales / head_dim


def best(costs: Costs, dims: list[tuple[int, int]], bits: float, stored: list[int] | None = None) -> Budget:
    """dims: KV heads and head_dim of each layer. stored: tokens that each layer stores, None: all the same. The average over what is
    stored is at most `bits`. All layers have the same formats where no list is predicted to lose less than WORTH_A_LIST of that."""
    layers = len(dims)
    weights = [heads * head_dim * tokens for (heads, head_dim), tokens in zip(dims, stored or [1] * layers)]
    weights = [weight // math.gcd(*weights) for weight in weights]
    extra = sum(weight * scale_bits(head_dim) for weight, (_, head_dim) in zip(weights, dims)) / sum(weights)
    budget = (bits - extra) * 2 * sum(weights) + 1e-9
    least = min(BITS.values())
    if budget < least * 2 * sum(weights):
        raise gyre.InvalidArgument(
            f"calibrate: a budget of {bits:g} bits is less than the smallest format takes, {least + extra:g} with its scales"
        )
    items = [(weights[i], {name: costs[name][i][side] for name in BITS}) for i in range(layers) for side in (0, 1)]
    uniform = uniform_formats(costs, budget / sum(weights))
    chosen, predicted = _search(items, budget)
    alike = sum(cost[uniform[i % 2]] for i, (_, cost) in enumerate(items))
    if predicted > WORTH_A_LIST * alike:
        chosen, predicted = list(uniform) * layers, alike
    used = sum(BITS[name] * weight for name, (weight, _) in zip(chosen, items)) / (2 * sum(weights)) + extra
    return Budget(bits, "bytes" if stored else "coordinate", chosen[0::2], chosen[1::2], used, predicted)


def uniform_formats(costs: Costs, bits: float) -> tuple[str, str]:
    """The formats of K and V, the same in all layers, that lose least with `bits` for a coordinate of K and one of V."""
    total = lambda pair: sum(costs[pair[0]][i][0] + costs[pair[1]][i][1] for i in range(len(costs[pair[0]])))
    return min(((k, v) for k in BITS for v in BITS if BITS[k] + BITS[v] <= bits), key=total)


def _search(items: list[tuple[int, dict[str, float]]], budget: float) -> tuple[list[str], float]:
    """Item after item, the cheapest way to each divergence: partial lists that cost no less and diverge no less than another go."""
    # (cost, divergence, link): a link is (format, the link before it).
    partial = [(0, 0.0, None)]
    left = [weight for weight, _ in items]
    for n, (weight, added) in enumerate(items):
        reserve = min(BITS.values()) * sum(left[n + 1 :])
        longer = sorted(
            (
                (cost + BITS[name] * weight, divergence + added[name], (name, link))
                for cost, divergence, link in partial
                for name in BITS
                if cost + BITS[name] * weight + reserve <= budget
            ),
            key=lambda entry: entry[:2],
        )
        partial = []
        for entry in longer:
            if not partial or entry[1] < partial[-1][1]:
                partial.append(entry)
    _, divergence, link = partial[-1]
    names = []
    while link is not None:
        name, link = link
        names.append(name)
    return names[::-1], divergence
