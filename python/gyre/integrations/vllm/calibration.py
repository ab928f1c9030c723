"""Calibrations under vLLM: which formats and which calibration a layer has."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import torch

import gyre
from gyre.calibrate.feedback import reordered, untouched
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
        load(path).check(_as_it_was(hf_config), tokens)
    except gyre.Error as error:
        raise ConfigError(f"gyre: {error}") from error
    _checked.add(key)


def _as_it_was(hf_config):
    """vLLM's DeepSeek models write their own names of yarn into the config."""
    config = hf_config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("deepseek_yarn", "deepseek_llama_scaling"):
        return config
    config = copy.copy(config)
    config.rope_parameters = {**rope, "rope_type": "yarn"}
    return config


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


def latent_calibration(
    calibration: Calibration, layer: int, formats: Formats, dims: tuple[int, int], interleaved: bool | None
) -> LayerCalibration | None:
    """Of a latent layer (MLA), dims of its latent and its rotary part. A rotary part of 16 bits is left alone. interleaved: the model
    rotates neighbouring coordinates, (2m, 2m + 1), where a calibration has the pairs (m, m + n); None: it is not known."""
    try:
        found = LayerCalibration.of(calibration, layer, (True, True))
    except gyre.Error as error:
        raise ConfigError(f"gyre: {error}") from error
    latent, rotary = found.parts
    heads, *own = calibration.dims[layer]
    if (heads, *own) != (1, *dims):
        raise ConfigError(
            f"gyre: the calibration is for {heads} KV heads of {own[0]} and {own[1]}, layer {layer} has a latent of {dims[0]} and a "
            f"rotary part of {dims[1]}"
        )
    compressed = formats.compressed
    if not any(compressed):
        return None
    if not compressed[0]:
        raise ConfigError(
            f"gyre: layer {layer} stores the latent as {formats.k} and the rotary part as {formats.v}: a calibration needs a compressed latent"
        )
    if not compressed[1]:
        return LayerCalibration((latent, untouched(dims[1], latent.basis is not None)), found.gains)
    if interleaved is None:
        raise ConfigError("gyre: how this model orders rotary coordinates is not known: a calibration needs a rotary part in f16 or bf16")
    if interleaved:
        rotary = reordered(rotary, torch.arange(dims[1]).view(2, -1).T.flatten())
    return LayerCalibration((latent, rotary), found.gains)


class PagesCalibration:
    """A layer's calibration beside its pages: K and V are written with it, queries are transformed as K is and rows back as V is.
    latent: K is a latent and V its rotary part: queries have the coordinates of both, rows those of the latent."""

    def __init__(self, queue, layer_calibration: LayerCalibration, latent: bool = False):
        self.queue = queue
        self.k, self.v = layer_calibration.on(queue.device)
        k, v = layer_calibration.parts
        self.has_transform = k.basis is not None
        out = k if latent else v
        self.q_inverses = [self._held(part.inverse) for part in ((k, v) if latent else (k,))]
        self.out_inverse, self.out_mean = self._held(out.inverse), self._held(out.mean)
        self.k_mean = None if k.mean is None else k.mean.to(queue.torch_device)

    def _held(self, tensor: torch.Tensor | None) -> gyre.Tensor | None:
        return None if tensor is None else self.queue.wrap(tensor.to(self.queue.torch_device))

    def enter(self, q: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Records the transform of q. Returns what attention reads and what it writes, both f32."""
        inside, begin = torch.empty(q.shape, dtype=torch.float32, device=q.device), 0
        for inverse in self.q_inverses:
            own = slice(begin, begin + inverse.shape[-1])
            gyre.kv_transform(self.queue.encoder, self.queue.wrap(q[..., own]), inverse, self.queue.wrap(inside[..., own]))
            begin = own.stop
        # Rows of no sequence are not written: they must hold numbers.
        return inside, torch.zeros(out.shape, dtype=torch.float32, device=out.device)

    def leave(self, inside: torch.Tensor, out: torch.Tensor) -> None:
        wrap = self.queue.wrap
        gyre.kv_transform(self.queue.encoder, wrap(inside), self.out_inverse, wrap(out), after=self.out_mean)

    def add_mean(self, lse: torch.Tensor, q: torch.Tensor, scale: float) -> None:
        """To the log-sum-exp, f32 [tokens, heads]: what the mean adds to all scores of a query."""
        if self.k_mean is not None:
            heads, dim = self.k_mean.shape
            by_kv_head = q[..., :dim].float().unflatten(1, (heads, -1))
            lse.add_(torch.einsum("thgd,hd->thg", by_kv_head, self.k_mean).flatten(1), alpha=scale)
