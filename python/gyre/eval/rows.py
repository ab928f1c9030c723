"""What is measured of one way to store keys and values."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import torch

import gyre
from gyre.calibrate.file import Calibration

from .baselines import BASELINES

REFERENCE = "f16"


@dataclass(frozen=True)
class Setting:
    """One row: how keys and values are stored. k, v: one format, or one for each layer. label: what the row is called where that is
    not the formats. baseline: one of baselines.BASELINES, in place of all else."""

    k: str | tuple[str, ...]
    v: str | tuple[str, ...]
    tail: int = 0
    sink_tokens: int = 0
    calibration: Calibration | None = None
    label: str = ""
    baseline: str = ""

    @property
    def kind(self) -> str:
        return "baseline" if self.baseline else "calibrated" if self.calibration else "formats"

    @property
    def name(self) -> str:
        if self.label or self.baseline:
            return self.label or self.baseline
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@dataclass
class Row:
    format: str
    tail: int
    bits: float  # per token
    perplexity: float
    kld_mean: float
    kld_999: float
    kld_max: float
    same_top1: float
    bytes_per_token: float
    kind: str = "formats"  # "calibrated", "baseline"


def settings(
    formats: list[str], tail: int = 0, sink_tokens: int = 0, calibrations: list[Calibration] | None = None
) -> list[Setting]:
    """Every format ("tq4", or "tq8/tq4" for keys / values) once, and where it is compressed again with each calibration and with a
    tail; baselines by their names; then the formats that calibrations found for their budgets."""
    calibrations = _named(calibrations or [])
    rows = []
    for name in formats:
        if name in BASELINES:
            rows.append(Setting("f32", "f32", BASELINES[name].residual, baseline=name))
            continue
        k, separator, v = name.partition("/")
        v = v if separator else k
        gyre.KvLayer(k, v)  # refuses what is no format, before a model is loaded
        if {k, v} <= {"f32", "f16", "bf16"}:
            rows.append(Setting(k, v))
            continue
        rows += _calibrated(Setting(k, v, 0, sink_tokens), calibrations, tail)
    for name, calibration in calibrations.items():
        for budget in calibration.budgets:
            label = f"{budget.bits:g} bits by {budget.by}" + (f" of {name}" if name != calibration.recipe else "")
            mixed = Setting(tuple(budget.k), tuple(budget.v), 0, sink_tokens, label=label)
            rows += _calibrated(mixed, {name: calibration}, tail)
    return list(dict.fromkeys(rows))


def _named(calibrations: list[Calibration]) -> dict[str, Calibration]:
    """By recipe; the second of a recipe is R2, and so on."""
    seen, named = Counter(), {}
    for calibration in calibrations:
        recipe = calibration.recipe
        seen[recipe] += 1
        named[recipe if seen[recipe] == 1 else f"{recipe}{seen[recipe]}"] = calibration
    return named


def _calibrated(setting: Setting, calibrations: dict[str, Calibration], tail: int) -> list[Setting]:
    """The setting without and with each calibration, and all again with a tail."""
    rows = [setting]
    rows += [replace(setting, calibration=one, label=f"{setting.name}, {name}") for name, one in calibrations.items()]
    return rows + ([replace(row, tail=tail) for row in rows] if tail else [])


class Statistics:
    """Statistics of one row. What they keep per position is small, whatever the vocabulary."""

    def __init__(self):
        self.nats: list[float] = []
        self.kld: list[float] = []
        self.same: list[bool] = []

    def add(self, log_p: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """log_p, reference: [tokens, vocabulary]."""
        self.nats.extend((-log_p.gather(-1, targets[:, None])[:, 0]).tolist())
        self.kld.extend((reference.exp() * (reference - log_p)).sum(-1).clamp(min=0.0).tolist())
        self.same.extend((log_p.argmax(-1) == reference.argmax(-1)).tolist())

    def row(self, setting: Setting, bytes_per_token: float) -> Row:
        nats = math.fsum(self.nats) / len(self.nats)
        kld = torch.tensor(self.kld, dtype=torch.float64)
        return Row(
            setting.name,
            setting.tail,
            nats / math.log(2),
            math.exp(nats),
            kld.mean().item(),
            kld.quantile(0.999).item(),
            kld.max().item(),
            sum(self.same) / len(self.same),
            bytes_per_token,
            setting.kind,
        )


def table(rows: list[Row], unit: str) -> str:
    predicted = "bits per byte" if unit == "byte" else "perplexity"
    lines = [
        f"| K/V | tail | {predicted} | KLD mean | KLD 99.9 % | same top 1 | cache bytes per token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        value = row.bits if unit == "byte" else row.perplexity
        lines.append(
            f"| {row.format} | {row.tail} | {value:.4f} | {row.kld_mean:.2e} | {row.kld_999:.2e} | "
            f"{100 * row.same_top1:.2f} % | {row.bytes_per_token:.0f} |"
        )
    return "\n".join(lines)
