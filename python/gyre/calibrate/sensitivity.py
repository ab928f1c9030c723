"""What each layer's keys and values cost a model when they are compressed, estimated from gradients.

An error e of a row of K or V adds (g . e)^2 / 2 to the divergence, to second order and on average, where g is the gradient of the log
probability of tokens that the model itself draws. One backward pass over a text gives g for every row of every layer. The errors are
those of the cache's own encoder under the calibration. Errors of different rows are taken as independent.
"""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm
from transformers.cache_utils import DynamicCache

import gyre
from gyre.integrations.transformers.layer import device_name

from .budget import BITS
from .file import Calibration, Part
from .layer import LayerCalibration

SINK_TOKENS = 1  # rows whose errors do not count: GyreCache keeps them in 16 bits
TOKENS = 512  # of a text, which pass through the model at once
TEXTS = 4


class _Rows(DynamicCache):
    """Takes one step of all layers, and keeps keys and values in the graph."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        for rows in (key_states, value_states):
            if not rows.requires_grad:  # the first layer's: no weight has a gradient
                rows.requires_grad_()
            rows.retain_grad()
        self.rows.append((key_states, value_states))
        return key_states, value_states


def pieces(texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """At most TEXTS texts of TOKENS tokens from all over the given ones, each with the token that starts a text before it."""
    found = [
        torch.cat([text[:1], text[begin : begin + TOKENS - 1]])
        for text in texts
        for begin in range(1, max(2, len(text) - TOKENS + 2), TOKENS - 1)
    ]
    return [found[int(i)] for i in torch.linspace(0, len(found) - 1, min(TEXTS, len(found))).round()]


def sensitivities(
    model, texts: list[torch.Tensor], calibration: Calibration, progress: bool = True, seed: int = 0
) -> dict[str, list[tuple[float, float]]]:
    """By format, for each layer what its keys and its values add to the mean divergence per token. texts: see pieces()."""
    found = {name: [[0.0, 0.0] for _ in calibration.layers] for name in BITS}
    device = gyre.Device(device_name(model.device))
    per_layer = [LayerCalibration.of(calibration, i, (True, True)).on(device) for i in range(len(calibration.layers))]
    with tqdm(total=len(texts) * len(per_layer), unit="layer", file=sys.stderr, disable=not progress) as bar:
        bar.set_description("sensitivities")
        for number, text in enumerate(texts):
            every = _gradients(model, text, seed + number)
            for i, (parts, own, layer) in enumerate(zip(every, per_layer, calibration.layers)):
                for name in BITS:
                    for side, (rows, gradient) in enumerate(parts):
                        error = _restored(name, "kv"[side], rows, own[side], layer[side], device) - rows
                        added = (gradient * error).sum(-1)[SINK_TOKENS:].square().sum() / 2
                        found[name][i][side] += added.item() / (len(text) * len(texts))
                bar.update(1)
    return {name: [tuple(pair) for pair in pairs] for name, pairs in found.items()}


def _gradients(model, text: torch.Tensor, seed: int) -> list[tuple]:
    """For each layer, of K and V: rows [tokens, kv_heads, head_dim] in f32, and the gradient."""
    before, needed = model.config._attn_implementation, [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    model.set_attn_implementation("eager")  # every model has it, with soft caps, windows and sink logits
    try:
        with torch.enable_grad():
            cache = _Rows()
            log_p = model(text[None].to(model.device), past_key_values=cache, use_cache=True).logits[0].float().log_softmax(-1)
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.multinomial(log_p.detach().exp().cpu(), 1, generator=generator).to(log_p.device)
            log_p.gather(1, drawn).sum().backward()
    finally:
        model.set_attn_implementation(before)
        for parameter, need in zip(model.parameters(), needed):
            parameter.requires_grad_(need)
    by_token = lambda x: x.detach()[0].transpose(0, 1).float().contiguous()
    return [tuple((by_token(x), by_token(x.grad)) for x in pair) for pair in cache.rows]


def _restored(name: str, role: str, rows: torch.Tensor, own: gyre.KvCalibration, part: Part, device: gyre.Device) -> torch.Tensor:
    """The rows as the cache stores them in a format."""
    tokens, heads, head_dim = rows.shape
    buffer = gyre.KvBuffer.allocate(device, format=name, role=role, kv_heads=heads, capacity=tokens, head_dim=head_dim)
    out = torch.empty_like(rows)
    encoder = gyre.Encoder(device)
    gyre.kv_quantize(encoder, **{role: rows, f"{role}_cache": buffer, f"{role}_calibration": own})
    gyre.kv_dequantize(encoder, buffer, out)
    encoder.submit().wait()
    if part.basis is not None:
        out = torch.einsum("thi,hij->thj", out, part.inverse.to(out.device))
    return out if part.mean is None else out + part.mean.to(out.device)
