"""Points vLLM's own attention tests at Gyre's plugin: `pytest -p gyre_shim`, in a folder with vLLM's tests/ (scripts/outside.sh).

The tests hand a backend plain caches, [blocks, heads, tokens, K and V], which Gyre's pages are not. The shim stores what such a
cache holds in pages of the same dtype, lossless, and calls the plugin's own classes. What the plugin refuses by name counts as
skipped, with its message. GYRE_OUTSIDE_EVERY=n runs every n-th test.
"""

import os

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import gyre
from gyre.integrations.vllm.backend import GyreBackend, GyreMetadataBuilder
from gyre.integrations.vllm.config import Formats
from gyre.integrations.vllm.layer import GyreImpl
from gyre.integrations.vllm.pages import DTYPES, LayerPages, queue_of


def pages_of(k: torch.Tensor, v: torch.Tensor, latent: bool = False) -> LayerPages:
    """Pages with these K and V, or latents and rotary parts, [blocks, tokens, heads, head_dim]."""
    if k.dtype not in DTYPES or (latent and k.dtype == torch.float32):
        raise NotImplementedError(f"gyre: {'latent ' * latent}caches of {k.dtype} are not supported")
    blocks, tokens, heads, head_dim = k.shape
    formats, queue = Formats(DTYPES[k.dtype], DTYPES[v.dtype]), queue_of(k.device)
    dims = (heads, head_dim, v.shape[-1], tokens)
    memory = torch.zeros(blocks, formats.page_bytes(*dims, latent), dtype=torch.uint8, device=k.device)
    pages = LayerPages(queue, memory, formats, *dims, latent=latent)
    slots = torch.arange(blocks * tokens, device=k.device)
    pages.write(k.flatten(0, 1), v.flatten(0, 1), queue.wrap(slots))
    return pages


class ShimImpl(GyreImpl):
    def pages_of(self, kv_cache) -> LayerPages:
        if self.pages is None:
            dim = kv_cache.shape[-1] // 2
            k, v = (kv_cache[..., part].transpose(1, 2).contiguous() for part in (slice(0, dim), slice(dim, None)))
            self.pages = pages_of(k, v)
            self._sinks = None if self.sinks is None else self.pages.queue.wrap(self.sinks.float().contiguous())
        return self.pages


class ShimBuilder(GyreMetadataBuilder):
    def _announce(self) -> None:
        pass  # there are no layers

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.slot_mapping = common_attn_metadata.slot_mapping
        return metadata


class ShimBackend(GyreBackend):
    @staticmethod
    def get_impl_cls():
        return ShimImpl

    @staticmethod
    def get_builder_cls():
        return ShimBuilder


# In place of vLLM's CPU kernels, test_cpu_attn.py.
_stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, **others):
    if others.get("kv_cache_dtype", "auto") != "auto":
        raise NotImplementedError(f"gyre: --kv-cache-dtype {others['kv_cache_dtype']} is not supported")
    blocks, _, tokens, _ = key_cache.shape
    shape = (blocks * tokens, *key.shape[1:])
    k, v = (torch.zeros(shape, dtype=key.dtype).index_copy_(0, slot_mapping.long(), x) for x in (key, value))
    _stored[key_cache.data_ptr()] = tuple(x.view(blocks, tokens, *key.shape[1:]) for x in (k, v))


def attention(query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, **others):
    if not causal or others.get("dynamic_causal") is not None:
        raise NotImplementedError("gyre: attention must be causal")
    pages = pages_of(*_stored[key_cache.data_ptr()])
    queue, window = pages.queue, others["sliding_window"]
    wrap = lambda x: None if x is None else queue.wrap(x.float().contiguous())
    queries = (query_start_loc[1:] - query_start_loc[:-1]).max().item()
    step = queue.step(
        slots=query_start_loc,
        table=others["block_table"],
        kv_lengths=seq_lens,
        cu_seqlens_q=query_start_loc,
        is_prefill=None,
        max_query_length=queries,
        max_kv_length=seq_lens.max().item(),
    )
    step.tokens = query.shape[0]
    options = {"soft_cap": others["softcap"], "sink_logits": wrap(others["s_aux"]), "alibi_slopes": wrap(others["alibi_slopes"])}
    pages.attend(query, output, step, scale, window=max(window, 0), **options)


def latent_decode(out, query, kv_cache, scale, block_tables, seq_lens):
    """In place of vLLM's CPU kernel, test_mla_decode_cpu.py: one query of each request."""
    latent, tokens = out.shape[-1], len(query)
    pages = pages_of(kv_cache[:, :, None, :latent], kv_cache[:, :, None, latent:], latent=True)
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    step = pages.queue.step(seq_lens, block_tables, seq_lens, starts, None, max_query_length=1, max_kv_length=seq_lens.max().item())
    pages.attend(query, out, step, scale)


def pytest_configure(config):
    register_backend(AttentionBackendEnum.CUSTOM, "gyre_shim.ShimBackend")


def pytest_collection_modifyitems(config, items):
    every = int(os.environ.get("GYRE_OUTSIDE_EVERY", "1"))
    items[:] = items[::every]


def pytest_collection_finish(session):
    for module in {item.module for item in session.items}:
        if hasattr(module, "BACKENDS_TO_TEST"):
            module.BACKENDS_TO_TEST[:] = [AttentionBackendEnum.CUSTOM]
            module.is_torch_equal_or_newer = lambda version: False  # else FlexAttention is tested, too
        if hasattr(module, "cpu_attention_with_kv_cache"):
            module.cpu_attn_reshape_and_cache = reshape_and_cache
            module.cpu_attn_get_scheduler_metadata = lambda **_: None
            module.cpu_attention_with_kv_cache = attention
        if hasattr(module, "test_mla_decode_cpu"):
            module.ops.mla_decode_kvcache_cpu = latent_decode


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    error = None if call.excinfo is None else call.excinfo.value
    is_refusal = isinstance(error, (NotImplementedError, ValueError, gyre.Error)) and str(error).startswith("gyre:")
    if report.when == "call" and report.failed and is_refusal:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], f"refused by name: {error}")
