"""One row's measurements with intervals. Neighbouring positions correlate, so whole blocks are resampled (block bootstrap)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

BLOCK = 64  # positions
_DRAWS = 400
_ROWS = 32  # whose divergence is computed at a time, in the processor's cache


@dataclass
class Row:
    """A value and its 95 % interval, where there are two names."""

    format: str
    tail: int
    sink_tokens: int
    bits: float  # per token
    perplexity: float
    kld_mean: float
    kld_999: float
    kld_max: float
    same_top1: float
    bytes_per_token: float  # of a cache for these tokens that decodes one at a time
    kind: str = "formats"  # "calibrated", "baseline"
    kld_mean_95: tuple[float, float] = (math.nan, math.nan)
    kld_999_95: tuple[float, float] = (math.nan, math.nan)
    same_top1_95: tuple[float, float] = (math.nan, math.nan)
    kld_blocks: list[float] = field(default_factory=list, repr=False)  # means of BLOCK positions

    @property
    def label(self) -> str:
        exact = [f"sink {self.sink_tokens}"] * bool(self.sink_tokens) + [f"tail {self.tail}"] * bool(self.tail)
        return ", ".join([self.format, *exact])


class Statistics:
    """Statistics of one row. What they keep per position is small, whatever the vocabulary."""

    def __init__(self):
        self.nats: list[torch.Tensor] = []
        self.kld: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []

    def add(self, log_p: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """log_p, reference: [tokens, vocabulary]."""
        self.nats.append(-log_p.gather(-1, targets[:, None])[:, 0].cpu())
        for a, b in zip(log_p.split(_ROWS), reference.split(_ROWS)):
            self.kld.append((b.exp() * (b - a)).sum(-1, dtype=torch.float64).clamp(min=0.0).cpu())
        self.same.append((log_p.argmax(-1) == reference.argmax(-1)).double().cpu())

    def row(self, setting, bytes_per_token: float) -> Row:
        nats, kld, same = (torch.cat(x).double() for x in (self.nats, self.kld, self.same))
        return Row(
            setting.name,
            setting.tail,
            setting.sink_tokens,
            nats.mean().item() / math.log(2),
            math.exp(nats.mean().item()),
            kld.mean().item(),
            kld.quantile(0.999).item(),
            kld.max().item(),
            same.mean().item(),
            bytes_per_token,
            setting.kind,
            interval(_redrawn(kld).mean(1)),
            interval(_redrawn(kld).quantile(0.999, 1)),
            interval(_redrawn(same).mean(1)),
            _blocks(kld).mean(1).tolist(),
        )


def interval(draws: torch.Tensor) -> tuple[float, float]:
    """The 95 % interval of what was drawn."""
    low, high = draws.double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def ratio(row: Row, other: Row) -> tuple[float, tuple[float, float]]:
    """How much larger a row's mean divergence is than another's, on the same positions, and the interval."""
    a, b = (torch.tensor(each.kld_blocks, dtype=torch.float64) for each in (row, other))
    drawn = _drawn(len(a))
    return row.kld_mean / other.kld_mean, interval(a[drawn].mean(1) / b[drawn].mean(1))


def _drawn(count: int) -> torch.Tensor:
    return torch.randint(count, (_DRAWS, count), generator=torch.Generator().manual_seed(0))


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[blocks, positions], without what is left over. Short texts have at least 8 blocks."""
    size = max(1, min(BLOCK, len(x) // 8))
    return x[: len(x) // size * size].unflatten(0, (-1, size))


def _redrawn(x: torch.Tensor) -> torch.Tensor:
    """[draws, positions]"""
    blocks = _blocks(x)
    return blocks[_drawn(len(blocks))].flatten(1)
