"""A layer's calibration as Gyre's ops take it."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

import gyre

from .file import Calibration, Part


class LayerCoding:
    """What a calibration says about one layer, for any device."""

    def __init__(self, parts: tuple[Part, Part], gains: list[float]):
        self.parts, self.gains = parts, gains

    @classmethod
    def of(cls, calibration: Calibration, layer: int, compressed: tuple[bool, bool]) -> LayerCoding | None:
        """None where nothing is compressed. compressed: keys, values."""
        if any(compressed) and not all(compressed):
            one = "keys" if compressed[0] else "values"
            raise gyre.InvalidArgument(
                f"calibration: keys and values of a layer are compressed both or neither, layer {layer} has compressed {one} alone"
            )
        if not 0 <= layer < len(calibration.layers):
            raise gyre.InvalidArgument(f"calibration: there is no layer {layer}, there are {len(calibration.layers)}")
        return cls(calibration.layers[layer], calibration.gains) if all(compressed) else None

    def heads(self, first: int, count: int) -> LayerCoding:
        """Of some KV heads, as a rank of several has them."""
        return LayerCoding(tuple(_heads(part, slice(first, first + count)) for part in self.parts), self.gains)

    def on(self, device: gyre.Device) -> tuple[gyre.KvCoding, gyre.KvCoding]:
        return tuple(self._coding(part, device) for part in self.parts)

    def _coding(self, part: Part, device: gyre.Device) -> gyre.KvCoding:
        basis = None
        if part.basis is not None:
            basis = gyre.KvBasis(part.basis, part.inverse, part.mean, device=device)
        return gyre.KvCoding(basis, gyre.KvShaping(part.factor, part.diagonal, self.gains, device=device))


def _heads(part: Part, heads: slice) -> Part:
    given: dict[str, torch.Tensor | None] = {field.name: getattr(part, field.name) for field in fields(part)}
    return replace(part, **{name: tensor if tensor is None else tensor[heads].contiguous() for name, tensor in given.items()})
