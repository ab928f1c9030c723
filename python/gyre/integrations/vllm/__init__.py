"""Gyre's pages as an attention backend of vLLM.

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype gyre_tq8_tq4
    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"gyre": {"k": "tq8", "v": "tq4"}}'

The first takes vLLM 0.33. For models with latent attention (MLA) the pair is the latent's format and the rotary part's.

vLLM finds `register` through the entry point `vllm.general_plugins` and calls it in every process. Nothing changes for
those who do not ask for CUSTOM. docs/engines.md has the options and what is not supported.
"""

from __future__ import annotations

__all__ = ["register"]

_HERE = __name__


def register() -> None:
    """Makes `--attention-backend CUSTOM` Gyre's. May be called more than once in a process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from .route import NAMES

    # The CPU platform takes no choice: it asks for the class of CPU_ATTN, or of a backend for MLA. `route` gives
    # vLLM's own class for these unless CUSTOM was asked for.
    for name in NAMES:
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], f"{_HERE}.route.{name}")
    _register_cache_dtypes()


def _register_cache_dtypes() -> None:
    """Names for `--kv-cache-dtype`, which vLLM takes from plugins since 0.33."""
    import torch
    import vllm.config.cache as cache
    from vllm.v1.kv_cache_interface import KVQuantMode

    from .config import cache_dtypes

    if not hasattr(cache, "register_kv_cache_dtype"):
        return

    class Handler:
        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> KVQuantMode:
            return KVQuantMode.CUSTOM

    for name in cache_dtypes():
        if cache.get_kv_cache_dtype_handler(name) is None:
            cache.register_kv_cache_dtype(name)(type("Handler", (Handler,), {"name": name}))
