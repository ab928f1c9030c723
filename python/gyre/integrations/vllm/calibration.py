"""Calibrations under vLLM: which formats and which calibration a layer has."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

import gyre
from gyre.calibrate.layer import LayerCalibration
from gyre.calibrate.file import Calibration, identity

from .config import ConfigError, Formats, Options


@functools.cache
def load(path: str) -> Calibration:
    try:
        return Calibration.load(path)
    except gyre.Error as error:
        raise ConfigError(f"gyre: {error}") from error


def with_budget(options: Options) -> Options:
    """The formats that the calibration found for the budget, if one was asked for."""
    if options.budget is None:
        return options
    try:
        found = load(options.calibration).budget(options.budget)
    except gyre.Error as error:
        raise ConfigError(f"gyre: {error}") from error
    return replace(options, layers={i: Formats(*pair) for i, pair in enumerate(zip(found.k, found.v))})


_checked: set[tuple[str, str, int]] = set()


def check(path: str, hf_config, tokens: int) -> None:
    """Once for a model: what does not fit is refused, a range that is too short is warned of."""
    key = (path, identity(hf_config), tokens)
    if key in _checked:
        return
    try:
        load(path).check(hf_config, tokens)
    except gyre.Error as error:
        raise ConfigError(f"gyre: {error}") from error
    _checked.add(key)


def refuse_means(layer_calibration: LayerCalibration, sink_logits: bool, soft_cap: bool) -> None:
    """A mean of K moves all scores of a query alike, which only the softmax forgets; rows get V's mean once."""
    k, v = (part.mean is not None for part in layer_calibration.parts)
    if k and soft_cap:
        raise ConfigError("gyre: a calibration with a mean of K does not go with a soft cap; calibrate without a mean")
    if (k or v) and sink_logits:
        raise ConfigError("gyre: a calibration with a mean does not go with sink_logits; calibrate without a mean")


def rank_heads(all_heads: int, heads: int, rank: int, ranks: int) -> int:
    """The first KV head of a rank of vLLM's, which has `heads`: its share, or one that several ranks have."""
    return rank * heads if all_heads >= ranks else rank * all_heads // ranks


class PagesCalibration:
    """A layer's calibration beside its pages: K and V are written with it, queries are transformed as K is and rows back as V is."""

    def __init__(self, queue, layer_calibration: LayerCalibration):
        self.queue = queue
        self.k, self.v = layer_calibration.on(queue.device)
        k, v = layer_calibration.parts
        self.has_transform = k.basis is not None
        self.k_inverse, self.v_inverse, self.v_mean = (self._held(x) for x in (k.inverse, v.inverse, v.mean))

    def _held(self, tensor: torch.Tensor | None) -> gyre.Tensor | None:
        return None if tensor is None else self.queue.wrap(tensor.to(self.queue.torch_device))

    def enter(self, q: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records the transform of q. Returns what attention reads and what it writes, both f32."""
        inside = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        gyre.kv_transform(self.queue.encoder, self.queue.wrap(q), self.k_inverse, self.queue.wrap(inside))
        # Rows of no sequence are not written: they must hold numbers.
        return inside, torch.zeros(out.shape, dtype=torch.float32, device=out.device)

    def leave(self, inside: torch.Tensor, out: torch.Tensor) -> None:
        wrap = self.queue.wrap
        gyre.kv_transform(self.queue.encoder, wrap(inside), self.v_inverse, wrap(out), after=self.v_mean)
