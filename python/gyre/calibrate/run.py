"""A calibration of a model, from a text or from its weights alone."""

from __future__ import annotations

import warnings

import torch

import gyre

from . import latent, rotary, solve
from . import model as models
from .file import Calibration, CalibrationWarning, identity
from .moments import SKIPPED, collect

GAINS = [0.9, 1.0, 1.1]
LATENT_GAINS = [0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15]  # one row a token, which K and V share: twice the chains cost little
WINDOW = 4096  # tokens of a text that pass through the model as one
FEW_TOKENS = 2048


def windows(ids: list[int], start: int, tokens: int, longest: int) -> list[torch.Tensor]:
    """Texts of at most `longest` tokens, each with the token that starts a text before it."""
    size = min(WINDOW, longest) - 1
    ids = ids[:tokens]
    return [torch.tensor([start, *ids[i : i + size]]) for i in range(0, len(ids), size) if len(ids) - i > SKIPPED]


def check_dim(name: str, dim: int) -> None:
    if dim not in (16, 32, 64, 128, 256, 512):
        raise gyre.InvalidArgument(f"calibrate: {name} must be a power of two from 16 to 512, got {dim}")


def check_tokens(count: int, dim: int, advice: str) -> None:
    """Fewer tokens than coordinates have no covariance; a few hundred cost part of the gain (docs/quality.md)."""
    if count < dim:
        raise gyre.InvalidArgument(
            f"calibrate: {count} tokens are too few for rows of {dim} coordinates (the first {SKIPPED} of a text are left out): {advice}"
        )
    if count < FEW_TOKENS:
        warnings.warn(
            f"calibrate: {count} tokens are few, part of the gain is lost: give at least {FEW_TOKENS}", CalibrationWarning, stacklevel=3
        )


def calibrate(
    model,
    texts: list[torch.Tensor] | None,
    capacity: int,
    transform: bool = True,
    name: str = "",
    device: gyre.Device | None = None,
    progress: bool = True,
) -> Calibration:
    """texts: token ids, each a text from its beginning; None: from the weights alone. capacity: positions that keys may have.
    transform: False makes error feedback alone, so that readers need no transform. name: of the model, for messages. device: of
    the cache that the texts pass through."""
    if latents := latent.attentions(model):
        return _calibrate_latents(model, latents, texts, transform, name, device, progress)
    attentions = models.attentions(model)
    rotaries = rotary.of_layers(model.get_decoder())
    for attention in attentions:
        check_dim("head_dim", attention.head_dim)
    if texts is None:
        layers = [solve.from_weights(*pair) for pair in zip(attentions, rotaries)]
        recipe, capacity, tokens = "Q", 0, 0
    else:
        largest = max(attention.head_dim for attention in attentions)
        check_tokens(sum(max(0, len(text) - SKIPPED) for text in texts), largest, "give more text, or --no-text")
        moments, tokens = collect(model, attentions, rotaries, texts, device, progress)
        make = solve.from_text if transform else solve.feedback_alone
        layers = [make(*each, capacity) for each in zip(attentions, rotaries, moments)]
        recipe = "R" if transform else "F"
    return Calibration(layers, recipe, name, identity(model.config), capacity, tokens, GAINS)


def _calibrate_latents(model, latents, texts, transform, name, device, progress) -> Calibration:
    """As calibrate(), for a model with latent attention (MLA). The calibration holds at every position."""
    if model.config.model_type == "deepseek_v2":  # moments are averaged over pairs (m, m + n)
        raise gyre.InvalidArgument("calibrate: deepseek_v2 rotates adjacent pairs, which is not supported")
    check_dim("kv_lora_rank (the latent)", latents[0].latent)
    check_dim("qk_rope_head_dim (the rotary part)", latents[0].rotary)
    if texts is None:
        raise gyre.InvalidArgument("calibrate: latent layers (MLA) are calibrated from a text: --no-text is not for them")
    tokens = sum(max(0, len(text) - SKIPPED) for text in texts)
    check_tokens(tokens, latents[0].latent, "give more text")
    layers = [moments.parts(transform) for moments in latent.collect(model, latents, texts, device, progress)]
    return Calibration(layers, "R" if transform else "F", name, identity(model.config), 0, tokens, LATENT_GAINS)
