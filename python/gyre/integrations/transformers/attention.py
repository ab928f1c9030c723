"""The attention function and the mask function "gyre"."""

from __future__ import annotations

import torch

from .config import refused
from .layer import DTYPES, Step


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Step,
    value: Step,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, tokens, head_dim], out [batch, tokens, heads, head_dim]; attention_mask is what the mask
    function "gyre" returned."""
    if not isinstance(key, Step) or key is not value:
        raise refused(
            "there is no GyreCache: pass past_key_values=GyreCache(model.config), with use_cache=True, or call "
            "gyre.integrations.transformers.enable(model)"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise refused(
            "attention is causal over everything in the cache, and a mask [batch, tokens] can hide padding; the mask "
            f"given is {list(attention_mask.shape)}"
        )
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
    if layer.sharing and torch.compiler.is_compiling():
        raise refused("torch.compile is not supported over layers that share keys and values")
    window = kwargs.get("sliding_window", layer.window) or 0
    if window != layer.window:
        raise refused(
            f"the model attends over a window of {window} (0: all), the cache was made for {layer.window}: make it "
            "with the config of this model"
        )
    if layer.latent:
        return _latent_attention(module, query, key, attention_mask, scaling, softcap, s_aux), None
    batch, kv_heads, tokens, head_dim = key.k.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    sink_logits = None if s_aux is None else s_aux.detach().float().contiguous()
    if torch.compiler.is_compiling():
        attend = torch.ops.gyre.attention
        return attend(query, key.k, key.v, layer.state, attention_mask, scale, softcap or 0.0, sink_logits), None
    if query.shape != (batch, query.shape[1], tokens, head_dim) or query.shape[1] % kv_heads != 0:
        raise refused(
            f"queries must be [{batch}, a multiple of {kv_heads}, {tokens}, {head_dim}], got {list(query.shape)}"
        )
    if query.dtype not in DTYPES or query.device != layer.torch_device or query.requires_grad:
        raise refused(
            f"queries must be float32, float16 or bfloat16 on {layer.torch_device}, without gradients; got "
            f"{query.dtype} on {query.device}"
        )
    out = layer.attend(key, query, attention_mask, scale=scale, soft_cap=softcap or 0.0, sink_logits=sink_logits)
    return out, None


def _latent_attention(module, query: torch.Tensor, key: Step, mask, scaling, softcap, s_aux) -> torch.Tensor:
    """The up-projections of K and V are applied to the query and to the output instead of to all keys (absorbed)."""
    if torch.compiler.is_compiling():
        raise refused("torch.compile is not supported over latent layers")
    if scaling is None:
        raise refused("latent attention needs the model's scaling")
    rotary = key.v.shape[3]
    nope = query.shape[3] - rotary
    heads, latent = query.shape[1], key.k.shape[3]
    up = module.kv_b_proj.weight.view(heads, -1, latent)  # rows of K, then of V
    absorbed = torch.einsum("bhtn,hnl->bhtl", query[..., :nope], up[:, :nope])
    sink_logits = None if s_aux is None else s_aux.detach().float().contiguous()
    out = key.layer.attend(
        key,
        torch.cat((absorbed, query[..., nope:]), dim=-1),
        mask,
        scale=scaling,
        soft_cap=softcap or 0.0,
        sink_logits=sink_logits,
    )
    return torch.einsum("bthl,hvl->bthv", out, up[:, nope:])


def attention_mask(
    *args, attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs
) -> torch.Tensor | None:
    """A GyreCache layer knows what its queries see: the mask says which columns are padding, bool [batch, tokens], and
    is None where there is none. Other masks are refused."""
    if not allow_is_causal_skip:
        raise refused(
            "only causal attention, with or without a window, is supported; the model asks for another mask "
            "(bidirectional, packed, or blocks of tokens that see each other)"
        )
    if attention_mask is None or torch.compiler.is_compiling():
        return attention_mask  # a compiled model looks at its numbers when it runs
    seen = kwargs.get("q_offset", 0) + kwargs.get("q_length", 0)
    batch = kwargs.get("batch_size", attention_mask.shape[0])
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < seen:
        raise refused(f"the attention mask must be [{batch}, {seen}], got {list(attention_mask.shape)}")
    return None if attention_mask.all() else attention_mask
