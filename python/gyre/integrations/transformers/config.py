"""What a Hugging Face config says about a cache's layers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

import gyre
from gyre.calibrate.layer import LayerCalibration
from gyre.calibrate.file import Calibration


def refused(message: str) -> gyre.InvalidArgument:
    return gyre.InvalidArgument(f"gyre.integrations.transformers: {message}")


def chosen_formats(config, k, v, calibration: Calibration | None, budget: float | None) -> tuple:
    """GyreCache's k and v, or those that a calibration found for a budget."""
    if latent_dims(config) is not None:
        if budget is not None:
            raise refused("latent layers (MLA) take no budget")
        return "tq8" if k is None else k, "tq8" if v is None else v
    if budget is None:
        return "tq8" if k is None else k, "tq4" if v is None else v
    if calibration is None:
        raise refused(f"a budget of {budget:g} bits needs a calibration, which has formats for it")
    if k is not None or v is not None:
        raise refused(f"formats are given, and a budget of {budget:g} bits: the calibration has formats for it")
    found = calibration.budget(budget)
    return found.k, found.v


def layer_calibrations(calibration: Calibration | None, stored: list[gyre.KvLayer]) -> list[LayerCalibration | None]:
    """The calibration of each layer; None where nothing is compressed."""
    if calibration is None:
        return [None] * len(stored)
    per_layer = [
        LayerCalibration.of(calibration, i, (_compressed((layer.k,)), _compressed((layer.v,)))) for i, layer in enumerate(stored)
    ]
    if not any(per_layer):
        raise refused("no layer is compressed: a calibration would do nothing")
    return per_layer


# Without them the default formats change every second answer of SmolLM2-135M within a few words (docs/quality.md).
DEFAULT_TAIL, DEFAULT_SINK_TOKENS = 128, 1


def stored_layers(
    config, k: str | Sequence[str], v: str | Sequence[str], tail: int | None = None, sink_tokens: int | None = None
) -> list[gyre.KvLayer]:
    """How each layer is stored; the arguments are GyreCache's."""
    windows = _windows(config)
    formats = list(zip(_each(k, len(windows), "k"), _each(v, len(windows), "v")))
    compressed = any(map(_compressed, formats))
    tail = DEFAULT_TAIL * compressed if tail is None else tail
    sink_tokens = DEFAULT_SINK_TOKENS * compressed if sink_tokens is None else sink_tokens
    if tail < 0 or sink_tokens < 0:
        raise refused(f"tail and sink_tokens must not be negative, got {tail} and {sink_tokens}")
    if (tail or sink_tokens) and not compressed:
        raise refused(f"no layer is compressed: a 16-bit tail of {tail} and sink_tokens of {sink_tokens} would keep nothing better")
    return [_stored(pair, window, tail, sink_tokens, latent_dims(config)) for pair, window in zip(formats, windows)]


def latent_dims(config) -> tuple[int, int] | None:
    """Coordinates of the latent and of the rotary part, where the model's own cache stores these (MLA)."""
    config = config.get_text_config(decoder=True)
    if not hasattr(config, "kv_lora_rank"):
        return None
    if getattr(config, "index_topk", None):
        raise refused(f"{config.model_type} attends to index_topk={config.index_topk} tokens that an indexer chooses: not supported")
    return (config.kv_lora_rank, config.qk_rope_head_dim) if _caches_latents(type(config)) else None


@functools.cache
def _caches_latents(config_class: type) -> bool:
    """Attention of such models has an expand_kv(), which makes keys and values of what the cache returns."""
    try:
        modeling = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return False
    return any(isinstance(thing, type) and hasattr(thing, "expand_kv") for thing in vars(modeling).values())


def stored_count(config) -> int:
    """Layers with keys and values of their own. Those behind them share the cache of the last one of their kind (Gemma 3n and 4)."""
    config = config.get_text_config(decoder=True)
    return config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)


def sharing_layers(config) -> list[int]:
    """For each layer with a cache: how many layers behind share it."""
    config = config.get_text_config(decoder=True)
    count = stored_count(config)
    shared = [0] * count
    for kind in (getattr(config, "layer_types", None) or [])[count:]:
        shared[max(i for i in range(count) if config.layer_types[i] == kind)] += 1
    return shared


def layer_dims(config) -> list[tuple[int, int]]:
    """KV heads and head_dim of each layer with a cache of keys and values."""
    config = config.get_text_config(decoder=True)
    of = lambda own: (own.num_key_value_heads, getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads)
    return [of(config.per_layer_config[i]) for i in range(stored_count(config))]


def _windows(config) -> list[int]:
    """The window of each layer with a cache, 0 for all, as the model's own cache would read it from the config."""
    config = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise refused("encoder-decoder models are not supported")
    bidirectional = getattr(config, "use_bidirectional_attention", False)
    if bidirectional and bidirectional != "vision":  # with images the model asks for a mask that is refused
        raise refused("attention must be causal, the config has use_bidirectional_attention")
    types = getattr(config, "layer_types", None)
    if types is None:
        chunked = getattr(config, "attention_chunk_size", None) is not None
        sliding = getattr(config, "sliding_window", None) is not None
        types = ["sliding_attention" if sliding else "chunked_attention" if chunked else "full_attention"]
        types *= config.num_hidden_layers
    types = types[: stored_count(config)]
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise refused(f"layers must be full_attention or sliding_attention, got {kind}")
    return [config.sliding_window if kind == "sliding_attention" else 0 for kind in types]


def _each(formats: str | Sequence[str], layers: int, name: str) -> list[str]:
    if isinstance(formats, str):
        return [formats] * layers
    if len(formats) != layers:
        raise refused(f"{name} must be one format or one for each of {layers} layers, got {len(formats)}")
    return list(formats)


def _compressed(formats: tuple[str, ...]) -> bool:
    return any(name not in ("f32", "f16", "bf16") for name in formats)


def _stored(
    formats: tuple[str, str], window: int, tail: int, sink_tokens: int, latent: tuple[int, int] | None
) -> gyre.KvLayer:
    if not _compressed(formats):
        tail = sink_tokens = 0
    if window:
        sink_tokens = 0  # the window leaves them
    dims = {} if latent is None else dict(kv_heads=1, head_dim=latent[0], v_head_dim=latent[1], latent=True)
    return gyre.KvLayer(k=formats[0], v=formats[1], window=window, tail=tail, sink_tokens=sink_tokens, **dims)
