"""What a compressed KV cache costs a real model: python -m gyre.eval MODEL_DIR TEXT

Every format predicts the same text, one token at a time or in steps of several, through its own cache, side by side with
an f16 cache. Printed are how well the text was predicted, how far the predictions are from those of the f16 cache, and
the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

import gyre
from gyre.calibrate.file import Calibration

from .baselines import BASELINES
from .chart import check_chart, plot
from .command import add_device, at_least, load_model
from .rows import REFERENCE, settings, table
from .run import evaluate
from .text import read_windows

FORMATS = ("f16", "tq8", "tq6", "tq4", "tq8/tq4", "tq3", "tq2")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gyre.eval", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a Hugging Face causal language model")
    parser.add_argument("text", nargs="+", help="files to predict")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(FORMATS),
        metavar="K[/V]",
        help=f"formats of keys and values (default: %(default)s), or how others store them: {', '.join(BASELINES)}",
    )
    parser.add_argument(
        "--calibration",
        nargs="+",
        default=[],
        metavar="FILE",
        help="compressed formats also run with these calibrations, and with the formats of their budgets",
    )
    parser.add_argument("--context", type=at_least(1), default=4096, help="tokens predicted per window (default: %(default)s)")
    parser.add_argument("--windows", type=at_least(1), default=1, help="windows, from the start of each text (default: 1)")
    parser.add_argument("--batch", type=at_least(1), default=1, help="windows that run at once (default: 1)")
    parser.add_argument(
        "--tail",
        type=at_least(0),
        default=128,
        help="compressed formats also run with this many of the newest tokens in 16 bits (default: %(default)s)",
    )
    parser.add_argument(
        "--step",
        type=at_least(1),
        default=1,
        help="tokens at a time: 1 decodes, more is what a prompt does (default: 1)",
    )
    parser.add_argument(
        "--sink-tokens",
        type=at_least(0),
        default=1,
        help="compressed formats also run with this many of the first tokens in 16 bits, together with the tail (default: %(default)s)",
    )
    parser.add_argument("--relative-to", metavar="ROW", help="also print divergences relative to that of this row, such as fp8")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="write a chart (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)
    if options.json and options.relative_to is not None:
        parser.error("--relative-to adds a column to the table, which --json does not print")
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    try:
        calibrations = [Calibration.load(path) for path in options.calibration]
        wanted = settings(options.formats, options.tail, options.sink_tokens, calibrations)
        if options.plot:
            check_chart(options.plot)
        names = [setting.name for setting in wanted]
        others = [name for name in dict.fromkeys(names) if name != REFERENCE]  # which has no divergence
        if options.relative_to not in (None, *others):
            raise gyre.InvalidArgument(f"eval: --relative-to must be one of {', '.join(others)}; got {options.relative_to}")
        texts = []
        for path in options.text:
            with open(path, "rb") as file:
                windows, unit = read_windows(options.model, file.read(), options.context, options.windows)
            texts += windows
        model, device = load_model("eval", options)
        rows = evaluate(model, texts, wanted, device, not options.quiet, options.step, options.batch)
    except (gyre.Error, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    about = {
        "model": os.path.basename(os.path.normpath(options.model)),
        "text": ", ".join(map(os.path.basename, options.text)),
        "unit": unit,
        "windows": len(texts),
        "context": options.context,
        "step": options.step,
        "positions": sum(len(text) - 1 for text in texts),
        "dtype": options.dtype,
        "device": options.device,
        "reference": REFERENCE,
    }
    title = (
        f"{about['model']}: {about['windows']} x {about['context']} {unit}s of {about['text']}, "
        f"{'decoded one by one' if options.step == 1 else f'in steps of {options.step}'}, {about['positions']} positions"
    )
    other = None if options.relative_to is None else rows[names.index(options.relative_to)]
    if options.json:
        print(json.dumps({**about, "rows": [{**asdict(row), "label": row.label} for row in rows]}, indent=2))
    else:
        print(f"{title}; KL divergence from {REFERENCE}, ± half of the 95 % interval\n\n{table(rows, unit, other)}")
    if options.plot:
        plot(rows, title, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
