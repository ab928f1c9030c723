"""Measures one way to store keys and values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import gyre
from gyre.calibrate.file import Calibration

from .baselines import BASELINES
from .statistics import Row, ratio

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


def settings(
    formats: list[str], tail: int = 0, sink_tokens: int = 0, calibrations: list[Calibration] | None = None
) -> list[Setting]:
    """Every format ("tq4", or "tq8/tq4" for keys / values) once and, if it is compressed, again with each calibration; then all again
    with a tail and sink tokens. Baselines go by their names. The formats that calibrations found for their budgets come last."""
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
        rows += _calibrated(Setting(k, v), calibrations, tail, sink_tokens)
    for name, calibration in calibrations.items():
        for budget in calibration.budgets:
            label = f"{budget.bits:g} bits by {budget.by}" + (f" of {name}" if name != calibration.recipe else "")
            mixed = Setting(tuple(budget.k), tuple(budget.v), label=label)
            rows += _calibrated(mixed, {name: calibration}, tail, sink_tokens)
    return list(dict.fromkeys(rows))


def _named(calibrations: list[Calibration]) -> dict[str, Calibration]:
    """By recipe; the second of a recipe is R2, and so on."""
    seen, named = Counter(), {}
    for calibration in calibrations:
        recipe = calibration.recipe
        seen[recipe] += 1
        named[recipe if seen[recipe] == 1 else f"{recipe}{seen[recipe]}"] = calibration
    return named


def _calibrated(setting: Setting, calibrations: dict[str, Calibration], tail: int, sink_tokens: int) -> list[Setting]:
    """The setting without and with each calibration, and all again with rows in 16 bits."""
    rows = [setting]
    rows += [replace(setting, calibration=one, label=f"{setting.name}, {name}") for name, one in calibrations.items()]
    exact = [replace(row, tail=tail, sink_tokens=sink_tokens) for row in rows] if tail or sink_tokens else []
    return rows + exact


def table(rows: list[Row], unit: str, relative_to: Row | None = None) -> str:
    """relative_to: adds a column of mean divergences relative to this row's, with 95 % intervals."""
    predicted = "bits per byte" if unit == "byte" else "perplexity"
    relative = "" if relative_to is None else f" / {relative_to.label} |"
    lines = [
        f"| K/V | tail | sinks | {predicted} | KLD mean |{relative} KLD 99.9 % | same top 1 | cache bytes per token |",
        "|---|---|---|---|---|---|---|---|" + "---|" * bool(relative),
    ]
    for row in rows:
        value = row.bits if unit == "byte" else row.perplexity
        lines.append(
            f"| {row.format} | {row.tail} | {row.sink_tokens} | {value:.4f} | {plus_minus(row.kld_mean, row.kld_mean_95)} |"
            f"{_relative(row, relative_to)} "
            f"{plus_minus(row.kld_999, row.kld_999_95)} | {percent(row.same_top1, row.same_top1_95)} | {row.bytes_per_token:.0f} |"
        )
    return "\n".join(lines)


def _relative(row: Row, other: Row | None) -> str:
    if other is None:
        return ""
    value, (low, high) = ratio(row, other)
    return f" {value:.2g} [{low:.2g}, {high:.2g}] |"


def plus_minus(value: float, interval: tuple[float, float]) -> str:
    """A value, and half of its interval relative to it."""
    return f"{value:.2e}" + (f" ±{50 * (interval[1] - interval[0]) / value:.0f} %" if value else "")


def percent(value: float, interval: tuple[float, float]) -> str:
    return f"{100 * value:.2f} ±{50 * (interval[1] - interval[0]):.2f} %"
