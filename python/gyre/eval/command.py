"""What the command lines of gyre.eval and gyre.calibrate share."""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

import gyre


def at_least(least: int):
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="of the model and the cache (default: cpu)")
    parser.add_argument(
        "--threads",
        type=at_least(0),
        default=0,
        help="CPU threads; for small models 1 is faster (default: as torch and Gyre choose)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16"),
        help="of the model (default: %(default)s)",
    )


def load_model(op: str, options: argparse.Namespace):
    """The model, and the device of its caches (None: where the model is)."""
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # the latter: PyTorch was built without CUDA
        raise gyre.InvalidArgument(f"{op}: no device {options.device}: {str(error).splitlines()[0]}") from None
    device = None
    if options.threads:
        torch.set_num_threads(options.threads)
        device = gyre.Device("cpu", threads=options.threads) if options.device == "cpu" else None
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="gyre")
    return model.to(options.device).eval(), device
