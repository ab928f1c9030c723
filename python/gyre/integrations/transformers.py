"""Hugging Face models on a Gyre cache.

    import gyre.integrations.transformers as gyre_hf

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="gyre")
    cache = gyre_hf.GyreCache(model.config, k="tq8", v="tq4")
    model.generate(**inputs, past_key_values=cache)

Importing this module registers the attention function and the mask function "gyre". The model is not
patched: it calls the cache's update(), which hands a step to the attention function where others hand
the whole history, and the attention function stores the step and attends over what is stored.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

import gyre

from ._layers import refused, stored_layers

__all__ = ["GyreCache", "attention", "attention_mask"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DEFAULT_CAPACITY = 8192


@functools.cache
def _open(name: str) -> gyre.Device:
    return gyre.Device(name)


def _device_name(device: torch.device) -> str:
    if device.type not in ("cpu", "cuda"):
        raise refused(f"tensors must be on the CPU or a CUDA device, got {device}")
    return f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"


class _Step:
    """What update() returns in place of keys and values: the new tokens of one layer.

    It is no tensor, so that an attention function that does not know it cannot take the newest tokens for
    the whole history.
    """

    def __init__(self, layer: GyreLayer, k: torch.Tensor, v: torch.Tensor):
        self.layer, self.k, self.v = layer, k, v

    def __getattr__(self, name: str):
        raise self._misused()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise cls._misused()

    @staticmethod
    def _misused() -> gyre.InvalidArgument:
        return refused(
            "a GyreCache is read by Gyre's attention only: load the model with "
            'attn_implementation="gyre", or call model.set_attn_implementation("gyre")'
        )


class GyreLayer(CacheLayerMixin):
    """The keys and values of one layer. A cache of its own, so that a prefill of any length can pass through a
    layer in pieces, storing and attending by turns, as rings need it."""

    is_compileable = False
    batch_size = 1

    def __init__(self, stored: gyre.KvLayer, capacity: int, step_tokens: int, device: gyre.Device | None):
        super().__init__()
        self.stored = stored
        self.capacity = capacity
        self.step_tokens = step_tokens
        self.device = device
        self.window = stored.window
        self.is_sliding = stored.window > 0
        self.cache: gyre.KvCache | None = None
        self.encoder: gyre.Encoder | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        name = _device_name(key_states.device)
        device = self.device or _open(name)
        if device.name != name:
            raise refused(f"the cache is on {device.name}, the keys are on {name}")
        self.cache = gyre.KvCache(
            device,
            kv_heads=key_states.shape[1],
            head_dim=key_states.shape[3],
            capacity=self.capacity,
            layers=[self.stored],
            step_tokens=min(self.step_tokens, self.capacity),
        )
        self.encoder = gyre.Encoder(device)
        self.heads_and_dim = (key_states.shape[1], key_states.shape[3])
        self.torch_device = key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[_Step, _Step]:
        k, v = key_states, value_states
        if k.dim() != 4 or k.shape != v.shape or k.numel() == 0:
            raise refused(
                "keys and values must have the same shape [1, kv_heads, tokens, head_dim], with tokens; got "
                f"{list(k.shape)} and {list(v.shape)}"
            )
        if k.shape[0] != 1:
            raise refused(f"the batch must be 1, got {k.shape[0]} (beams and several returned sequences are a batch)")
        if k.dtype not in _DTYPES or v.dtype not in _DTYPES:
            raise refused(f"keys and values must be float32, float16 or bfloat16, got {k.dtype} and {v.dtype}")
        if k.dtype != v.dtype:
            raise refused(
                f"keys and values must have one dtype, got {k.dtype} and {v.dtype}: load the model in one, without "
                "torch.autocast"
            )
        if k.requires_grad or v.requires_grad:
            raise refused("there are no gradients: run the model under torch.no_grad() or torch.inference_mode()")
        tokens = k.shape[2]
        if self.length + tokens > self.capacity:
            raise refused(
                f"the cache has room for {self.capacity} tokens, holds {self.length}, and was given {tokens}: pass a "
                "larger capacity to GyreCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        if (k.shape[1], k.shape[3]) != self.heads_and_dim:
            raise refused(
                f"this layer began with (kv_heads, head_dim) {self.heads_and_dim}, got {(k.shape[1], k.shape[3])}"
            )
        if not k.device == v.device == self.torch_device:
            raise refused(
                f"this layer's cache is on {self.torch_device}, keys and values are on {k.device} and {v.device}"
            )
        step = _Step(self, k, v)
        return step, step

    def attend(
        self, step: _Step, query: torch.Tensor, scale: float, soft_cap: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Stores the step and attends: [1, heads, tokens, head_dim] to [1, tokens, heads, head_dim]."""
        q, k, v = (_token_major(x) for x in (query, step.k, step.v))
        out = torch.empty(q.shape, dtype=query.dtype, device=query.device)
        tokens = q.shape[0]
        for begin in range(0, tokens, self.step_tokens):
            part = slice(begin, min(begin + self.step_tokens, tokens))
            self.cache.extend(self.encoder, part.stop - begin)
            self.cache.append(self.encoder, 0, k[part], v[part])
            self.cache.attend(self.encoder, 0, q[part], out[part], scale=scale, soft_cap=soft_cap, sinks=sinks)
            fence = self.encoder.submit()
        if out.is_cuda:
            # Gyre's stream waits for torch's where DLPack hands tensors over; here torch's waits for Gyre's.
            gyres = torch.cuda.ExternalStream(self.cache.device.stream, device=out.device)
            torch.cuda.current_stream(out.device).wait_stream(gyres)
        else:
            fence.wait()
        return out.unsqueeze(0)

    @property
    def length(self) -> int:
        return self.cache.length if self.cache is not None else 0

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.capacity

    def truncate(self, tokens: int) -> None:
        if tokens > 0:
            self.cache.truncate(self.encoder, tokens)
            self.encoder.submit().wait()

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.clear(self.encoder)
            self.encoder.submit().wait()

    def __deepcopy__(self, memo: dict) -> GyreLayer:
        other = copy.copy(self)
        if self.cache is not None:
            other.encoder = gyre.Encoder(self.cache.device)
            other.cache = self.cache.fork(self.encoder)
            self.encoder.submit().wait()
        return other

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise _unsupported("reordering (beam search)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise _unsupported("repeating the batch")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise _unsupported("selecting from the batch")

    def offload(self) -> None:
        raise _unsupported("offloading")

    def prefetch(self) -> None:
        raise _unsupported("offloading")


def _unsupported(what: str) -> gyre.InvalidArgument:
    return refused(f"{what} is not supported: the batch is 1 and the cache stays where it is")


class GyreCache(Cache):
    """A KV cache for `past_key_values`, of a model loaded with attn_implementation="gyre". Batch 1.

    config: the model's; layers with a sliding window become rings.
    k, v: how keys and values are stored ("f32", "f16", "bf16", "tq8" ... "tq2"), one for all layers or one each.
    tail: so many of the newest tokens stay in 16 bits, in layers that are compressed.
    sinks: so many of the first do, in layers that are compressed and have no window.
    capacity: tokens in all; by default what the model was made for, 8192 at most. Memory is taken at once.
    step_tokens: a longer prefill passes in pieces of so many; rings have room for so many more.
    device: a gyre.Device, or its name; by default where the keys are.
    """

    def __init__(
        self,
        config,
        k: str | Sequence[str] = "tq8",
        v: str | Sequence[str] = "tq4",
        tail: int = 0,
        sinks: int = 0,
        capacity: int | None = None,
        step_tokens: int = 512,
        device: gyre.Device | torch.device | str | None = None,
    ):
        stored = stored_layers(config, k, v, tail, sinks)
        if capacity is None:
            made_for = getattr(config.get_text_config(decoder=True), "max_position_embeddings", _DEFAULT_CAPACITY)
            capacity = min(made_for, _DEFAULT_CAPACITY)
        if capacity <= 0 or step_tokens <= 0:
            raise refused(f"capacity and step_tokens must be positive, got {capacity} and {step_tokens}")
        if device is not None and not isinstance(device, gyre.Device):
            device = _open(_device_name(torch.device(device)))
        super().__init__(layers=[GyreLayer(layer, capacity, step_tokens, device) for layer in stored])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Takes the new tokens of a layer, [1, kv_heads, tokens, head_dim], and hands them to Gyre's attention."""
        if not 0 <= layer_idx < len(self.layers):
            raise refused(f"the cache has {len(self.layers)} layers, got layer {layer_idx}")
        length = self.layers[layer_idx].length
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

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the newest tokens, given as a negative number."""
        if tokens_to_remove > 0:
            raise refused(f"crop takes the number of tokens to drop as a negative number, got {tokens_to_remove}")
        length = self.get_seq_length() + tokens_to_remove
        shortest = min(layer.length for layer in self.layers)
        if not 0 <= length <= shortest:
            raise refused(f"crop to {length} tokens, but there are {shortest}")
        # Only rings can refuse; all of them have the same window, so the first one does before anything changed.
        for layer in sorted(self.layers, key=lambda layer: not layer.is_sliding):
            layer.truncate(layer.length - length)

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored, bookkeeping included; 0 before the first tokens."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)

    def describe(self) -> list:
        """What is really stored, per layer; empty before the first tokens."""
        return [info for layer in self.layers if layer.cache is not None for info in layer.cache.describe()]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: _Step,
    value: _Step,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function "gyre": query [1, heads, tokens, head_dim], out [1, tokens, heads, head_dim]."""
    if not isinstance(key, _Step) or key is not value:
        raise refused("there is no GyreCache: pass past_key_values=GyreCache(model.config), with use_cache=True")
    if attention_mask is not None:
        raise refused("attention is causal over everything in the cache; the mask given asks for more: leave it out")
    if module.training or dropout:
        raise refused("the model is in training mode or has dropout: call model.eval()")
    if kwargs.get("output_attentions"):
        raise refused("output_attentions: there are no attention weights to return")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise refused("attention must be causal")
    for name in ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            raise refused(f"the attention argument {name} is not supported")
    layer = key.layer
    window = kwargs.get("sliding_window", layer.window) or 0
    if window != layer.window:
        raise refused(
            f"the model attends over a window of {window} (0: all), the cache was made for {layer.window}: make it "
            "with the config of this model"
        )
    _, kv_heads, tokens, head_dim = key.k.shape
    if query.shape != (1, query.shape[1], tokens, head_dim) or query.shape[1] % kv_heads != 0:
        raise refused(f"queries must be [1, a multiple of {kv_heads}, {tokens}, {head_dim}], got {list(query.shape)}")
    if query.dtype not in _DTYPES or query.device != layer.torch_device or query.requires_grad:
        raise refused(
            f"queries must be float32, float16 or bfloat16 on {layer.torch_device}, without gradients; got "
            f"{query.dtype} on {query.device}"
        )
    scale = head_dim**-0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    return layer.attend(key, query, scale, softcap or 0.0, sinks), None


def attention_mask(
    *args, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs
) -> None:
    """The mask function "gyre": no mask is made, because a GyreCache layer knows what its queries see. What would need
    one is refused."""
    if not allow_is_causal_skip:
        raise refused(
            "only causal attention, with or without a window, is supported; the model asks for another mask "
            "(bidirectional, packed, or blocks of tokens that see each other)"
        )
    if attention_mask is None:
        return
    seen = kwargs.get("q_offset", 0) + kwargs.get("q_length", 0)
    if attention_mask.shape[0] != 1:
        raise refused(f"the batch must be 1, got {attention_mask.shape[0]}")
    if attention_mask.shape[-1] < seen or not attention_mask.all():
        raise refused(f"the attention mask must be 1 for all {seen} tokens (no padding): leave it out")


def _token_major(x: torch.Tensor) -> torch.Tensor:
    x = x[0].transpose(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


AttentionInterface.register("gyre", attention)
AttentionMaskInterface.register("gyre", attention_mask)
