"""The options: what `additional_config["gyre"]` says about the formats of a layer. Neither torch nor vLLM is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gyre

DEFAULT_K, DEFAULT_V = "tq8", "tq8"  # pages have no 16-bit rows, without which 4-bit values change answers (docs/quality.md)
_SLIDING = "sliding_window"


class ConfigError(ValueError):
    """The options are wrong. Raised before vLLM takes any memory."""


@dataclass(frozen=True)
class Formats:
    """How one layer stores K and V; of a latent layer (MLA) the latent and the rotary part."""

    k: str = DEFAULT_K
    v: str = DEFAULT_V

    def __str__(self) -> str:
        return f"k {self.k}, v {self.v}"

    @property
    def compressed(self) -> tuple[bool, bool]:
        return tuple(name not in ("f32", "f16", "bf16") for name in (self.k, self.v))

    def page_bytes(self, kv_heads: int, head_dim: int, v_head_dim: int, page_tokens: int, latent: bool = False) -> int:
        shape = {"kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "page_tokens": page_tokens}
        return gyre.kv_page_bytes(k=self.k, v=self.v, latent=latent, **shape)

    def token_bytes(self, kv_heads: int, head_dim: int, v_head_dim: int, latent: bool = False) -> int:
        """Bytes of a token in all KV heads. A page has this many bytes for each of its tokens, because vLLM counts pages by tokens."""
        page, tile = self.page_bytes(kv_heads, head_dim, v_head_dim, 64, latent), 64
        smallest = self.page_bytes(kv_heads, head_dim, v_head_dim, 8, latent)
        if page % tile != 0 or smallest * 8 != page:
            raise ConfigError(
                f"gyre: pages of {self} with {kv_heads} KV heads of {head_dim} and {v_head_dim} are not a whole number "
                "of bytes per token"
            )
        return page // tile


def cache_dtypes() -> dict[str, Formats]:
    """Formats by the names that `--kv-cache-dtype` takes from vLLM 0.33 on: gyre_tq8_tq4, or gyre_tq8 for tq8_tq8."""
    names = [info.name for info in gyre.kv_formats() if info.name.startswith("tq")]
    pairs = {f"gyre_{k}_{v}": Formats(k, v) for k in names for v in names if k != v}
    return {**{f"gyre_{name}": Formats(name, name) for name in names}, **pairs}


@dataclass(frozen=True)
class Options:
    """`{"k": ..., "v": ..., "layers": {"0": {"k": ..., "v": ...}, "sliding_window": {...}}, "calibration": ...}`, or
    `{"calibration": ..., "budget": ...}`"""

    formats: Formats = Formats()
    layers: Mapping[int, Formats] = field(default_factory=dict)
    sliding: Formats | None = None
    calibration: str | None = None  # a file of gyre.calibrate
    budget: float | None = None  # bits that the calibration has formats for

    def of(self, layer: int | None, window: int | None) -> Formats:
        """A layer's own entry, else that of all with a sliding window, else the one for all."""
        if layer is not None and layer in self.layers:
            return self.layers[layer]
        if window is not None and self.sliding is not None:
            return self.sliding
        return self.formats

    @property
    def uniform(self) -> bool:
        return not self.layers and self.sliding is None


def parse(additional_config: Any, cache_dtype: str = "auto") -> Options:
    """The options in vLLM's `additional_config`, and the formats that `--kv-cache-dtype` names."""
    given = additional_config.get("gyre", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'gyre: additional_config["gyre"] must be an object, got {given!r}')
    _only(given, ("k", "v", "layers", "calibration", "budget"), 'additional_config["gyre"]')
    calibration, budget = _calibration(given)
    named = cache_dtypes().get(cache_dtype)
    doubled = [name for name in ("k", "v", "budget") if named is not None and name in given]
    if doubled:
        raise ConfigError(f'gyre: --kv-cache-dtype {cache_dtype} names the formats, and "{doubled[0]}" is given, too')
    formats = _formats(given, named or Formats(), "additional_config")
    layers = given.get("layers", {})
    if not isinstance(layers, Mapping):
        raise ConfigError(f'gyre: "layers" must be an object of layer numbers, got {layers!r}')
    numbered, sliding = {}, None
    for name, entry in layers.items():
        if not isinstance(entry, Mapping):
            raise ConfigError(f'gyre: layer {name!r} must be an object with "k" and "v", got {entry!r}')
        _only(entry, ("k", "v"), f"layer {name!r}")
        own = _formats(entry, formats, f"layer {name!r}")
        if name == _SLIDING:
            sliding = own
        elif str(name).isdecimal():
            numbered[int(name)] = own
        else:
            raise ConfigError(f'gyre: a layer must be a number or "{_SLIDING}", got {name!r}')
    return Options(formats, numbered, sliding, calibration, budget)


def _calibration(given: Mapping) -> tuple[str | None, float | None]:
    calibration, budget = given.get("calibration"), given.get("budget")
    if calibration is not None and not isinstance(calibration, str):
        raise ConfigError(f'gyre: "calibration" must be the path of a file, got {calibration!r}')
    if budget is None:
        return calibration, None
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ConfigError(f'gyre: "budget" must be a number of bits, got {budget!r}')
    if calibration is None:
        raise ConfigError(f'gyre: a budget of {budget:g} bits needs a "calibration", which has formats for it')
    named = [name for name in ("k", "v", "layers") if name in given]
    if named:
        raise ConfigError(f'gyre: "{named[0]}" is given, and a budget of {budget:g} bits: the calibration has formats for it')
    return calibration, float(budget)


def _formats(given: Mapping, default: Formats, where: str) -> Formats:
    formats = Formats(given.get("k", default.k), given.get("v", default.v))
    for side, name in (("k", formats.k), ("v", formats.v)):
        if not isinstance(name, str):
            raise ConfigError(f"gyre: {where}: {side} must be the name of a format, got {name!r}")
    try:
        formats.page_bytes(kv_heads=1, head_dim=128, v_head_dim=128, page_tokens=8)
    except gyre.Error as error:
        raise ConfigError(f"gyre: {where}: {error}") from error
    return formats


def _only(given: Mapping, known: tuple[str, ...], where: str) -> None:
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise ConfigError(f"gyre: {where} has {', '.join(map(repr, unknown))}; known are {', '.join(known)}")
