#!/usr/bin/env python3
"""Draws docs/decode.svg, the README's chart, from the tables of docs/benchmarks.md. With a file name: there instead."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FORMATS = ("f16", "tq8", "tq8+tq4", "tq4")
COLORS = {"f16": "#56b4e9", "tq8": "#0072b2", "tq8+tq4": "#009e73", "tq4": "#d55e00"}  # safe for colour-blind readers
WIDTH, BAR, GAP, LABEL, PANEL = 860, 22, 8, 120, 420


def row(text: str, begin: str) -> dict[str, str]:
    """The table row whose line begins so, by the names of its columns."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(begin))
    head = at
    while lines[head - 1].startswith("|"):
        head -= 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[head], lines[at])]
    named = {}
    for name, value in zip(*cells):
        named.setdefault(name, value)
    return named


def number(cell: str) -> float:
    return float(re.match(r"[\d.]+", cell).group())


def gpu(text: str) -> list[tuple[str, float, str]]:
    cells = row(text, "| 32/8/128, 32768 |")
    peer = cells["best f16 peer"]
    bars = [(peer.split(", ")[1] + ", f16", number(peer), "#999999")]
    return bars + [("Gyre, " + f, number(cells[f]), COLORS[f]) for f in FORMATS]


def cpu(text: str) -> list[tuple[str, float, str]]:
    cells = row(text, "| 32/8/128 | 16384 |")
    f16 = number(cells["f16, us"]) / 1000
    bars = [("Gyre, f16", f16, COLORS["f16"])]
    return bars + [("Gyre, " + f, f16 * number(cells[f + " / f16"]), COLORS[f]) for f in FORMATS[1:]]


def panel(left: int, title: str, unit: str, bars: list[tuple[str, float, str]]) -> list[str]:
    most = max(value for _, value, _ in bars)
    room = PANEL - LABEL - 90
    out = [f'<text x="{left}" y="24" font-weight="600">{title}</text>']
    for i, (label, value, color) in enumerate(bars):
        y, width = 40 + i * (BAR + GAP), value / most * room
        middle = y + BAR - 6
        out += [
            f'<text x="{left + LABEL - 8}" y="{middle}" text-anchor="end">{label}</text>',
            f'<rect x="{left + LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>',
            f'<text x="{left + LABEL + width + 6:.1f}" y="{middle}">{value + 1e-9:.3g} {unit}</text>',
        ]
    return out


def main() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    on_gpu, on_cpu = gpu(text), cpu(text)
    height = 48 + max(len(on_gpu), len(on_cpu)) * (BAR + GAP)
    described = "; ".join(f"{label} {value + 1e-9:.3g}" for label, value, _ in on_gpu + on_cpu)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'aria-labelledby="t d" font-family="system-ui, sans-serif" font-size="14" fill="#222222">',
        '<title id="t">Time of decode attention, one layer, 32 query heads over 8 KV heads of 128</title>',
        f'<desc id="d">{described}</desc>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        *panel(10, "H200, 32768 tokens", "µs", on_gpu),
        *panel(440, "Two Neoverse-V1 cores, 16384 tokens", "ms", on_cpu),
        "</svg>",
    ]
    (pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/decode.svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
