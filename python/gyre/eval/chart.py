"""The frontier: divergence over memory."""

from __future__ import annotations

import os

import gyre

from .rows import REFERENCE
from .statistics import Row

_STYLES = {"baseline": ("X", "#d55e00"), "calibrated": ("*", "#009e73"), "formats": ("o", "#0072b2")}  # safe for colour-blind readers
_EXACT = "#56b4e9"
# Where a label may go, in points from its point: beside it, then around it, then farther away with a line to it.
_OFFSETS = [(7, -3), (-7, -3), (0, 7), (0, -13), (7, 6), (-7, 6), (7, -12), (-7, -12)]
_OFFSETS += [(x * far, y * far) for far in (18, 30, 44, 60, 78) for x, y in ((1, 0.5), (1, -0.5), (-1, 0.5), (-1, -0.5), (0, 1), (0, -1))]


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
    matplotlib.rcParams["svg.hashsalt"] = "gyre"  # the same rows give the same file
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = pyplot.subplots(figsize=(10, 7), layout="constrained")
    rows = [row for row in rows if row.kld_mean]
    names = {"baseline": "others' formats", "calibrated": "tq, calibrated", "formats": "tq"}
    for kind in sorted({row.kind for row in rows}):
        marker, color = _STYLES[kind]
        for exact in (False, True):
            points = [row for row in rows if row.kind == kind and bool(row.tail or row.sink_tokens) == exact]
            if not points:
                continue
            axes.plot(
                [row.bytes_per_token for row in points],
                [row.kld_mean for row in points],
                marker,
                color=color,
                markerfacecolor=_EXACT if exact else color,
                markersize=11 if marker == "*" else 7,
                label=names[kind] + (", some rows in 16 bits" if exact else ""),
            )
    if best := frontier(rows):
        axes.plot([row.bytes_per_token for row in best], [row.kld_mean for row in best], "-", color="0.8", zorder=0, label="frontier")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(2, (1, 1.25, 1.5, 1.75)))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(yscale="log", xlabel="cache bytes per token", ylabel=f"mean KL divergence from {REFERENCE}", title=title)
    axes.margins(0.12, 0.08)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.canvas.draw()
    place_labels(axes, rows)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.lower().endswith(".svg") else None)


def place_labels(axes, rows: list[Row]) -> list:
    """Writes the name of each row beside its point, where it covers neither a point nor another name. Returns the boxes."""
    from matplotlib.transforms import Bbox

    at = [axes.transData.transform((row.bytes_per_token, row.kld_mean)) for row in rows]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in at]
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent())
    room, boxes = axes.get_window_extent(), []
    for row in sorted(rows, key=lambda row: row.kld_mean):
        for x, y in _OFFSETS:
            far = max(abs(x), abs(y)) > 13
            text = axes.annotate(
                row.label,
                (row.bytes_per_token, row.kld_mean),
                textcoords="offset points",
                xytext=(x, y),
                ha="left" if x > 0 else "right" if x < 0 else "center",
                fontsize=8,
                arrowprops=dict(arrowstyle="-", color="0.6", linewidth=0.6, shrinkB=4) if far else None,
            )
            own = text.get_tightbbox() if not far else super(type(text), text).get_window_extent()
            if not any(own.overlaps(other) for other in taken + boxes) and room.contains(own.x0, own.y0) and room.contains(own.x1, own.y1):
                break
            text.remove()
        else:
            continue  # no room: the table has it
        boxes.append(own)
    return boxes
