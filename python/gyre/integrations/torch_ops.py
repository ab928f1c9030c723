"""Gyre's ops as ops of torch, with fake implementations and with what they write in their schemas, so that torch.compile
puts them into a graph without a break:

    torch.ops.gyre.kv_write          k and v to slots of pages
    torch.ops.gyre.rope_append       the same after rope, which also rotates q, in place
    torch.ops.gyre.paged_attention   queries of several sequences over pages
    torch.ops.gyre.attention         stores the new tokens of a GyreCache's layer and attends over all of them

Importing this module defines them. They run where torch runs: on the CPU at once, on CUDA on the current stream, where kernels over
pages can also be captured. Pages are uint8 [pages, gyre.kv_page_bytes(...)] of any stride.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch

import gyre

from .vllm.config import Formats
from .vllm.pages import LayerPages, Step, queue_of

_PAGES = "Tensor(a!) pages, Tensor slots, str k_format, str v_format, int page_tokens"
_SCHEMAS = {
    "kv_write": f"(Tensor k, Tensor v, {_PAGES}) -> ()",
    "rope_append": f"(Tensor(b!) q, Tensor k, Tensor v, Tensor positions, {_PAGES}, float base=10000.0, int? rotary_dim=None, "
    'str pairing="split_half", Tensor? frequencies=None) -> ()',
    "paged_attention": "(Tensor q, Tensor pages, Tensor page_table, Tensor kv_lengths, Tensor cu_seqlens_q, Tensor(a!) out, "
    "str k_format, str v_format, int kv_heads, int page_tokens, float scale, Tensor? is_prefill=None, int max_query_length=1, "
    "int max_kv_length=0, int window=0, float soft_cap=0.0, Tensor? sink_logits=None, Tensor? alibi_slopes=None) -> ()",
    "attention": "(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? mask, float scale, float soft_cap=0.0, "
    "Tensor? sink_logits=None) -> Tensor",
}
_library = torch.library.Library("gyre", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)


def _op(name: str, fake):
    """The decorated function is what the op does, `fake` what torch.compile sees of it."""

    def add(function):
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gyre::{name}", fake, lib=_library)
        return function

    return add


def _nothing(*args, **kwargs) -> None:
    return None


def _pages(pages: torch.Tensor, k_format: str, v_format: str, kv_heads: int, dims: tuple[int, int], page_tokens: int) -> LayerPages:
    if pages.dim() != 2:
        raise gyre.InvalidArgument(f"gyre: pages must be uint8 [pages, bytes], got {pages.dtype} {list(pages.shape)}")
    return LayerPages(queue_of(pages.device), pages, Formats(k_format, v_format), kv_heads, *dims, page_tokens)


@_op("kv_write", _nothing)
def kv_write(k, v, pages, slots, k_format, v_format, page_tokens) -> None:
    layer = _pages(pages, k_format, v_format, k.shape[1], (k.shape[2], v.shape[2]), page_tokens)
    layer.write(k, v, layer.queue.wrap(slots))


@_op("rope_append", _nothing)
def rope_append(
    q, k, v, positions, pages, slots, k_format, v_format, page_tokens, base=10000.0, rotary_dim=None, pairing="split_half", frequencies=None
) -> None:
    layer = _pages(pages, k_format, v_format, k.shape[1], (k.shape[2], v.shape[2]), page_tokens)
    queue = layer.queue
    wrap = lambda tensor: None if tensor is None else queue.wrap(tensor)
    rope = {"base": base, "rotary_dim": rotary_dim, "pairing": pairing}
    operands = map(wrap, (q, q, positions, None, None, frequencies))
    gyre.rope_append(queue.encoder, wrap(k), wrap(v), layer.pages, wrap(slots), *operands, **rope)
    queue.run()


@_op("paged_attention", _nothing)
def paged_attention(
    q,
    pages,
    page_table,
    kv_lengths,
    cu_seqlens_q,
    out,
    k_format,
    v_format,
    kv_heads,
    page_tokens,
    scale,
    is_prefill=None,
    max_query_length=1,
    max_kv_length=0,
    window=0,
    soft_cap=0.0,
    sink_logits=None,
    alibi_slopes=None,
) -> None:
    layer = _pages(pages, k_format, v_format, kv_heads, (q.shape[2], out.shape[2]), page_tokens)
    wrap = layer.queue.wrap
    step = Step(
        slots=None,
        table=wrap(page_table),
        kv_lengths=wrap(kv_lengths),
        cu_seqlens_q=wrap(cu_seqlens_q),
        is_prefill=None if is_prefill is None else wrap(is_prefill.view(torch.uint8)),
        tokens=q.shape[0],
        max_query_length=max_query_length,
        min_query_length=1,
        max_kv_length=max_kv_length or page_table.shape[1] * page_tokens,
    )
    extras = {"sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
    wrapped = {name: None if tensor is None else wrap(tensor) for name, tensor in extras.items()}
    layer.attend(q, out, step, scale, window, soft_cap, **wrapped)


class CacheLayer(Protocol):
    """A layer of a cache that stores tokens and attends over them in one call."""

    def store_and_attend(self, q, k, v, mask, **how) -> torch.Tensor: ...


_layers: weakref.WeakValueDictionary[int, CacheLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def state_of(layer: CacheLayer) -> torch.Tensor:
    """A tensor that stands for a layer's tokens in torch.ops.gyre.attention, which writes it: i64 [number, steps]."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor([number, 0], dtype=torch.int64)


def _attention_fake(q, k, v, state, mask, scale, soft_cap=0.0, sink_logits=None):
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, v.shape[-1])


@_op("attention", _attention_fake)
def attention(q, k, v, state, mask, scale, soft_cap=0.0, sink_logits=None) -> torch.Tensor:
    layer = _layers.get(int(state[0]))
    if layer is None:
        raise gyre.InvalidArgument("gyre::attention: the cache that the compiled model was called with is gone")
    out = layer.store_and_attend(q, k, v, mask, scale=scale, soft_cap=soft_cap, sink_logits=sink_logits)
    state[1] += 1
    return out
