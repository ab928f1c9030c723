"""The KV cache of a Hugging Face model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

import gyre
from gyre.calibrate.file import FARTHEST, Calibration

from . import files
from .columns import Columns
from .config import chosen_formats, layer_calibrations, refused, sharing_layers, stored_layers
from .layer import GyreLayer, device_name
from .stores import Scratch

_DEFAULT_CAPACITY = 8192  # of models that do not say what they were made for


class GyreCache(Cache):
    """A KV cache for `past_key_values`, of a model loaded with attn_implementation="gyre".

    config: the model's; layers with a sliding window become rings.
    k, v: how keys and values are stored ("f32", "f16", "bf16", "tq8" ... "tq2"), one for all layers or one each, without those that
        share another's cache (Gemma 3n and 4). Of DeepSeek-V3 the latent and the rotary part (default: tq8 both; no f32).
    tail: this many of the newest tokens stay in 16 bits, in layers that are compressed (default: 128).
    sink_tokens: this many of the first tokens stay in 16 bits, in layers that are compressed and have no window (default: 1).
    capacity: tokens of a row, whose memory is taken at the first tokens. By default the cache grows up to what the
        model was made for.
    step_tokens: prefills longer than this are processed in chunks. Window layers keep this many extra slots, which is also how
        far crop() can go back. Layers that others share take a step as a whole: it may have this many tokens, or as many as the first.
    paged: True: one sequence, too, is stored in pages, as batches are, so that it can become several.
    device: a gyre.Device, or its name; by default where the keys are.
    calibration: a file of gyre.calibrate, or a Calibration: compressed layers lose less in the same bytes.
    budget: bits per coordinate that the calibration found formats for, one list for each layer, in place of k and v.
    """

    def __init__(
        self,
        config,
        k: str | Sequence[str] | None = None,
        v: str | Sequence[str] | None = None,
        tail: int | None = None,
        sink_tokens: int | None = None,
        capacity: int | None = None,
        step_tokens: int = 512,
        paged: bool = False,
        device: gyre.Device | torch.device | str | None = None,
        calibration: Calibration | str | os.PathLike | None = None,
        budget: float | None = None,
    ):
        if calibration is not None and not isinstance(calibration, Calibration):
            calibration = Calibration.load(calibration)
        k, v = chosen_formats(config, k, v, calibration, budget)
        stored = stored_layers(config, k, v, tail, sink_tokens)
        grows = capacity is None
        if calibration is not None:
            calibration.check(config, capacity)
        if grows:
            made_for = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
            capacity = made_for or _DEFAULT_CAPACITY
            if calibration is not None and calibration.capacity:
                capacity = min(capacity, FARTHEST * calibration.capacity)
        if capacity <= 0 or step_tokens <= 0:
            raise refused(f"capacity and step_tokens must be positive, got {capacity} and {step_tokens}")
        if device is not None and not isinstance(device, gyre.Device):
            device = gyre.Device(device_name(torch.device(device)))
        self.columns = Columns()
        self.calibration, self._warned = calibration, not grows
        per_layer = layer_calibrations(calibration, stored)
        common = (self.columns, capacity, grows, step_tokens, paged, device, Scratch())
        make = lambda layer, layer_calibration, sharing: GyreLayer(layer, *common, layer_calibration, sharing)
        super().__init__(layers=[make(*each) for each in zip(stored, per_layer, sharing_layers(config))])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Takes the new tokens of a layer, [batch, kv_heads, tokens, head_dim], and hands them to Gyre's attention."""
        if not 0 <= layer_idx < len(self.layers):
            raise refused(f"the cache has {len(self.layers)} layers, got layer {layer_idx}")
        if torch.compiler.is_compiling():  # torch.ops.gyre.attention checks the step when it runs
            step = self.layers[layer_idx].step(key_states, value_states)
            return step, step
        length = self.layers[layer_idx].length
        self._warn_beyond(length + key_states.shape[-2])
        # Layers get a step one after the other, so the layer before has it and, at the first, all have the same.
        whole = (
            self.layers[layer_idx - 1].length == length + key_states.shape[-2]
            if layer_idx > 0
            else all(layer.length == length for layer in self.layers)
        )
        if not whole:
            raise refused(
                "a forward pass was interrupted, layers hold different numbers of tokens: call reset(), or crop() "
                f"to a length that all have; they have {[layer.length for layer in self.layers]}"
            )
        return self.layers[layer_idx].update(key_states, value_states)

    def _warn_beyond(self, tokens: int) -> None:
        """Warns once when the cache grows out of the range of its calibration."""
        if self.calibration is not None and not self._warned and tokens > (self.calibration.capacity or tokens):
            self._warned = True
            self.calibration.warn_range(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the newest tokens, given as a negative number; columns, where rows are padded."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:
            raise refused(f"crop takes the number of tokens to drop as a negative number, got {tokens_to_remove}")
        length = self.get_seq_length() + tokens_to_remove
        shortest = min(layer.length for layer in self.layers)
        if not 0 <= length <= shortest:
            raise refused(f"crop to {length} tokens, but there are {shortest}")
        # Only rings can refuse; all of them have the same window, so the first one does before anything changed.
        for layer in sorted(self.layers, key=lambda layer: not layer.is_sliding):
            layer.rollback(length)
        self.columns.crop(length)

    def reset(self) -> None:
        """Drops all tokens."""
        super().reset()
        self.columns.crop(0)

    def require(self, tokens: int) -> None:
        """Refuses what there will be no room for: `tokens` in all, those that are there included."""
        capacity = self.get_max_length()
        if tokens > capacity:
            raise refused(
                f"prompt and new tokens would be {tokens}, the cache has room for {capacity}: pass a larger capacity "
                "to GyreCache, or ask for fewer tokens"
            )

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """The batch becomes these of its rows; one that is there several times is shared, not copied."""
        rows = [int(row) for row in (indices.tolist() if isinstance(indices, torch.Tensor) else indices)]
        batch = self.batch_size
        if batch < 0:
            raise refused("the cache is empty, there are no rows to choose from")
        if not rows or any(not 0 <= row < batch for row in rows):
            raise refused(f"rows must be from 0 to {batch - 1}, got {rows}")
        if any(layer.length != self.columns.length for layer in self.layers):
            raise refused("a forward pass was interrupted: call reset() or crop() first")
        for layer in self.layers:
            layer.select(rows)
        self.columns.select(rows)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices([row for row in range(self.batch_size) for _ in range(repeats)])

    def save(self, path: str | os.PathLike, token_ids: torch.Tensor | Sequence) -> None:
        """Writes a file with the tokens and what is stored of them, as a whole or not at all. token_ids: [batch,
        tokens], padding included; those behind what is in the cache are left out."""
        files.save(self, path, token_ids)

    def load(self, path: str | os.PathLike, token_ids: torch.Tensor | Sequence) -> None:
        """A new cache, made with the same options, becomes the one that was saved, on the device of token_ids. These
        are a prompt that must begin with the tokens of the file, and otherwise is refused; of a prompt that is all of
        them the last token is left to be computed."""
        files.load(self, path, token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, bookkeeping included; 0 before the first tokens."""
        return sum(layer.store.nbytes for layer in self.layers if layer.store is not None)

    def describe(self) -> list:
        """Says what the cache stores: a KvLayerInfo per layer or, in pages, a KvGroupInfo per kind of pages; empty
        before the first tokens."""
        return [info for layer in self.layers if layer.store is not None for info in layer.store.describe()]

    def __repr__(self) -> str:
        kinds = sorted({f"{layer.stored.k}/{layer.stored.v}" for layer in self.layers})
        return (
            f"GyreCache({self.get_seq_length()} of {self.get_max_length()} tokens, batch={self.batch_size}, "
            f"layers={len(self.layers)}, {', '.join(kinds)}, nbytes={self.nbytes})"
        )
