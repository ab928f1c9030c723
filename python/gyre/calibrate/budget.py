"""Bits per layer: the list of formats with the least divergence that a budget allows.

The model is additive: what a layer's keys or values in a format add to the mean divergence is what was measured with these alone in one
format, times the ratio of the two formats' squared errors. The search over the lists is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import gyre

# Relative squared error of Gaussian rows (docs/kv_formats.md).
ERRORS = {"tq2": 1.2e-1, "tq3": 3.4e-2, "tq4": 9.2e-3, "tq5": 2.7e-3, "tq6": 6.7e-4, "tq8": 4.2e-5}
BITS = {"tq2": 2, "tq3": 3, "tq4": 4, "tq5": 5, "tq6": 6, "tq8": 8}


@dataclass
class Budget:
    """The formats of each layer's keys and values. bits: asked for, per coordinate, scales included; used: what these take. by:
    "coordinate", where every layer counts the same, or "bytes", where a layer counts as many tokens as it stores. predicted: the mean
    divergence of the additive model."""

    bits: float
    by: str
    k: list[str]
    v: list[str]
    used: float
    predicted: float

    def __str__(self) -> str:
        return " ".join(f"{k}/{v}" for k, v in zip(self.k, self.v))


def scale_bits(head_dim: int) -> float:
    """Bits of the 16-bit scales per coordinate: one scale for each power of two in head_dim, at most 256 coordinates each."""
    scales = sum(-(-size // 256) for size in (1 << i for i in range(11)) if head_dim & size)
    return 16 * scales / head_dim


def best(
    sensitivities: list[tuple[float, float]],
    measured_in: str,
    head_dim: int,
    bits: float,
    stored: list[int] | None = None,
) -> Budget:
    """stored: tokens that each layer stores, None: all the same. The average over what is stored is at most `bits`."""
    weights = stored or [1] * len(sensitivities)
    extra = scale_bits(head_dim)
    budget = (bits - extra) * 2 * sum(weights)
    items = [(weight, one) for pair, weight in zip(sensitivities, weights) for one in pair]
    least = min(BITS.values())
    if budget < least * 2 * sum(weights) - 1e-9:
        raise gyre.InvalidArgument(
            f"calibrate: a budget of {bits:g} bits is less than the smallest format takes, {least + extra:g} with its scales"
        )
    chosen, predicted = _search(items, measured_in, budget + 1e-9)
    used = sum(BITS[name] * weight for name, (weight, _) in zip(chosen, items)) / (2 * sum(weights)) + extra
    return Budget(bits, "bytes" if stored else "coordinate", chosen[0::2], chosen[1::2], used, predicted)


def _search(items: list[tuple[int, float]], measured_in: str, budget: float) -> tuple[list[str], float]:
    """Item after item, the cheapest way to each divergence: partial lists that cost no less and diverge no less than another go."""
    # (cost, divergence, link): a link is (format, the link before it).
    partial = [(0, 0.0, None)]
    left = [weight for weight, _ in items]
    for n, (weight, sensitivity) in enumerate(items):
        reserve = min(BITS.values()) * sum(left[n + 1 :])
        longer = sorted(
            (
                (cost + BITS[name] * weight, divergence + sensitivity * ERRORS[name] / ERRORS[measured_in], (name, link))
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
