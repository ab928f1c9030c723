"""A layer's calibration as Gyre's ops take it."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

import gyre

from .file import Calibration, Part


class LayerCalibration:
    """What a calibration says about one layer, for any device."""

    def __init__(self, parts: tuple[Part, Part], gains: list[float]):
        self.parts, self.gains = parts, gains

    @classmethod
    def of(cls, calibration: Calibration, layer: int, compressed: tuple[bool, bool]) -> LayerCalibration | None:
        """None where nothing is compressed. compressed: keys, values."""
        if any(compressed) and not all(compressed):
            one = "keys" if compressed[0] else "values"
            raise gyre.InvalidArgument(
                f"calibration: keys and values of a layer are compressed both or neither, layer {layer} has compressed {one} alone"
            )
        if not 0 <= layer < len(calibration.layers):
            raise gyre.InvalidArgument(f"calibration: there is no layer {layer}, there are {len(calibration.layers)}")
        return cls(calibration.layers[layer], calibration.gains) if all(compressed) else None

    def heads(self, first: int, count: int) -> LayerCalibration:
        """The calibration of some KV heads, as one rank of several has them."""
        return LayerCalibration(tuple(_heads(part, slice(first, first + count)) for part in self.parts), self.gains)

    def on(self, device: gyre.Device) -> tuple[gyre.KvCalibration, gyre.KvCalibration]:
        return tuple(self._layer_calibration(part, device) for part in self.parts)

    def _layer_calibration(self, part: Part, device: gyre.Device) -> gyre.KvCalibration:
        basis = None
        if part.basis is not None:
            basis = gyre.KvTransform(part.basis, part.inverse, part.mean, device=device)
        return gyre.KvCalibration(basis, gyre.KvFeedback(part.factor, part.diagonal, self.gains, device=device))


def _heads(part: Part, heads: slice) -> Part:
    given: dict[str, torch.Tensor | None] = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(part, **{name: tensor if tensor is None else tensor[heads].contiguous() for name, tensor in given.items()})
