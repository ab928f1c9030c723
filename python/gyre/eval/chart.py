"""The frontier: divergence over memory."""

from __future__ import annotations

import os

import gyre

from .rows import REFERENCE, Row


def check_chart(path: str) -> None:
    """What would make plot() fail is said before hours of work, not after."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise gyre.Unsupported("eval: a chart needs matplotlib, which is not installed") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = os.path.splitext(path)[1][1:].lower()
    if suffix not in known:
        raise gyre.InvalidArgument(f"eval: a chart must end in one of {', '.join(known)}; got {path}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise gyre.InvalidArgument(f"eval: there is no folder {folder} for the chart")


def frontier(rows: list[Row]) -> list[Row]:
    """The rows that no other beats in both memory and divergence, from little memory to much."""
    best = []
    for row in sorted(rows, key=lambda row: (row.bytes_per_token, row.kld_mean)):
        if not best or row.kld_mean < best[-1].kld_mean:
            best.append(row)
    return best


def plot(rows: list[Row], title: str, path: str) -> None:
    """Divergence over memory, one point per row, and a line through the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 7), layout="constrained")
    rows = [row for row in rows if row.kld_mean]
    kinds = sorted({(row.kind, row.tail) for row in rows})
    for kind, tail in kinds:
        points = [row for row in rows if (row.kind, row.tail) == (kind, tail)]
        label = f"{kind}, {f'tail {tail}' if tail else 'no tail'}"
        marker = {"baseline": "x", "calibrated": "*"}.get(kind, "o")
        axes.plot([row.bytes_per_token for row in points], [row.kld_mean for row in points], marker, label=label)
        for row in points:
            axes.annotate(
                row.format,
                (row.bytes_per_token, row.kld_mean),
                textcoords="offset points",
                xytext=(6, 4),
                fontsize=8,
            )
    if best := frontier(rows):
        axes.plot([row.bytes_per_token for row in best], [row.kld_mean for row in best], "-", color="0.7", zorder=0, label="frontier")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(yscale="log", xlabel="cache bytes per token", ylabel=f"mean KL divergence from {REFERENCE}", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)
