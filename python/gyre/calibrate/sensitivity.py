"""What each layer's keys and values cost a model when they alone are compressed."""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm

import gyre
from gyre.eval import Setting, evaluate

FORMAT = "tq3"  # coarse enough that the divergence stands out of the noise
_STEP = 512
_TOGETHER = 8  # caches side by side with one f16 cache


def sensitivities(model, texts: list[torch.Tensor], layers: int, device: gyre.Device | None, progress: bool = True):
    """For each layer, the mean divergence from an f16 cache with its keys and with its values in FORMAT."""
    pick = lambda at: tuple(FORMAT if i == at else "f16" for i in range(layers))
    none = ("f16",) * layers
    every = [Setting(*pair) for i in range(layers) for pair in ((pick(i), none), (none, pick(i)))]
    found = []
    with tqdm(total=len(every), unit="part", file=sys.stderr, disable=not progress) as bar:
        bar.set_description("sensitivities")
        for begin in range(0, len(every), _TOGETHER):
            part = every[begin : begin + _TOGETHER]
            found += [row.kld_mean for row in evaluate(model, texts, part, device, progress=False, step=_STEP)]
            bar.update(len(part))
    return list(zip(found[0::2], found[1::2]))
