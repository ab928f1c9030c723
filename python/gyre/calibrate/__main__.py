"""Calibrates a model's KV cache, so that the same bytes lose less: python -m gyre.calibrate MODEL TEXT

Collects the moments of queries, keys and values from a text and writes what GyreCache(calibration=FILE) needs; with --budget also the
formats of each layer that lose least.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import Counter

import gyre
from gyre.eval.command import add_device, at_least, load_model
from gyre.eval.text import made_for, read_tokens
from gyre.integrations.transformers.config import latent_dims, stored_layers

from .budget import best
from .file import Calibration, CalibrationWarning
from .run import WINDOW, calibrate, windows
from .sensitivity import pieces, sensitivities

_CAPACITY = 8192  # by default, where the model was made for as many
_SHOWN = "tq4"  # the format whose sensitivities the file and the output show


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gyre.calibrate", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a Hugging Face causal language model")
    parser.add_argument("text", nargs="?", help="file with text of the kind that the model will see, a few thousand tokens")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: the model's name with .gyrecal)")
    parser.add_argument(
        "--capacity",
        type=at_least(1),
        help=f"positions that keys will have; best is what is used, not more (default: {_CAPACITY}, at most what the model was made for)",
    )
    parser.add_argument("--tokens", type=at_least(1), default=16384, help="tokens of the text, at most (default: %(default)s)")
    parser.add_argument("--no-text", action="store_true", help="from the weights alone: less gain, right at every position")
    parser.add_argument("--no-transform", action="store_true", help="error feedback alone: readers need no transform")
    parser.add_argument(
        "--budget",
        type=float,
        nargs="+",
        default=[],
        metavar="BITS",
        help="also find formats per layer with this many bits per coordinate, scales included (as tq4: 4.125 at head_dim 128, 4.25 at 64)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_device(parser)
    options = parser.parse_args(argv)
    if options.no_text and options.no_transform:
        parser.error("--no-transform needs the moments of queries: it cannot come with --no-text")
    if options.text is None and (not options.no_text or options.budget):
        parser.error("a text is needed, but for --no-text without --budget")
    return options


def add_budgets(calibration: Calibration, model, texts, options) -> None:
    if not texts:
        raise gyre.InvalidArgument("calibrate: the text is too short for a budget, whose formats are chosen by what it loses")
    costs = sensitivities(model, pieces(texts), calibration, progress=not options.quiet)
    calibration.sensitivities, calibration.sensitivity_format = costs[_SHOWN], _SHOWN
    windows_of = [layer.window for layer in stored_layers(model.config, "f16", "f16", 0, 0)]
    capacity = options.capacity
    stored = [min(window or capacity, capacity) for window in windows_of]
    for bits in options.budget:
        for counts in (None, stored) if len(set(stored)) > 1 else (None,):
            calibration.budgets.append(best(costs, [own[:2] for own in calibration.dims], bits, counts))


def describe(calibration: Calibration, path: str, latent: bool) -> str:
    dims = Counter(calibration.dims)
    heads = "; ".join(
        f"{kv_heads} KV heads, head_dim {k}" + (f" in {count} of them" if len(dims) > 1 else "") for (kv_heads, k, _), count in dims.items()
    )
    if latent:
        _, k, v = calibration.dims[0]
        heads = f"latents of {k} coordinates, rotary parts of {v}"
    lines = [
        f"{path}: {calibration.model}, recipe {calibration.recipe}, {len(calibration.layers)} layers, {heads}, "
        f"{calibration.tokens} tokens, "
        + (f"positions below {calibration.capacity}" if calibration.capacity else "every position")
    ]
    if calibration.sensitivities:
        lines.append(f"predicted divergence of one part in {calibration.sensitivity_format}, layer by layer (K, V):")
        lines += [f"  {i}: {k:.2e} {v:.2e}" for i, (k, v) in enumerate(calibration.sensitivities)]
    for budget in calibration.budgets:
        lines.append(f"{budget.bits:g} bits by {budget.by}, {budget.used:.4g} used, predicted divergence {budget.predicted:.2e}: {budget}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    name = os.path.basename(os.path.normpath(options.model))
    path = options.out or f"{name}.gyrecal"
    try:
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise gyre.InvalidArgument(f"calibrate: there is no folder {folder} for the file")
        texts = None
        if options.text is not None:
            with open(options.text, "rb") as file:
                ids, start, _ = read_tokens("calibrate", options.model, file.read())
            positions = made_for(options.model)
            options.capacity = options.capacity or min(_CAPACITY, positions or _CAPACITY)
            texts = windows(ids, start, options.tokens, positions or WINDOW)
        model, device = load_model("calibrate", options)
        if options.budget and latent_dims(model.config) is not None:
            raise gyre.InvalidArgument("calibrate: latent layers (MLA) take no --budget")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", CalibrationWarning)
            calibration = calibrate(
                model,
                None if options.no_text else texts,
                options.capacity or 0,
                not options.no_transform,
                name,
                device,
                not options.quiet,
            )
        for one in warned:
            print(f"warning: {one.message}", file=sys.stderr)
        if options.budget:
            add_budgets(calibration, model, texts, options)
        calibration.save(path)
    except (gyre.Error, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(describe(calibration, path, latent_dims(model.config) is not None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
