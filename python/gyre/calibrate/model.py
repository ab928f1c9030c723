"""The attention modules of a transformers model: where their projections and norms are, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import gyre


@dataclass(frozen=True)
class Attention:
    """One layer's. input_norm: what its input passed through."""

    module: torch.nn.Module
    input_norm: torch.nn.Module
    model_type: str
    index: int
    heads: int
    kv_heads: int
    head_dim: int

    def before_rotary(self, name: str) -> torch.nn.Module:
        """The module whose output is the query ("q") or the key ("k") before rotation."""
        return getattr(self.module, f"{name}_norm", None) or getattr(self.module, f"{name}_proj")

    @property
    def keys_may_have_a_mean(self) -> bool:
        """Without it all scores of a query change by the same: a softmax does not see that, a soft cap and a sink do."""
        return getattr(self.module, "attn_logit_softcapping", None) is None and self.values_may_have_a_mean

    @property
    def values_may_have_a_mean(self) -> bool:
        """It is added to what attention gives, so the probabilities must sum to 1: with a sink they do not."""
        return getattr(self.module, "sinks", None) is None

    def value_weights(self) -> torch.Tensor:
        """What an error in a value's coordinates costs: the sum over the query heads of W_o,h^T W_o,h, f64 [kv_heads, d, d]."""
        out = self.module.o_proj.weight.detach().double().cpu()  # [hidden, heads * head_dim]
        columns = out.unflatten(1, (self.kv_heads, -1, self.head_dim))  # [hidden, kv_heads, group, d]
        return torch.einsum("nhgi,nhgj->hij", columns, columns)

    def second_moment(self, name: str) -> torch.Tensor:
        """E[x x^T] of queries, keys or values from the weights alone: of an input whose coordinates are independent before the
        norm's gains. f64 [kv_heads, d, d]; queries: the mean over the heads that share a KV head."""
        gain = _gain(self.input_norm, self.module.q_proj.in_features, self.model_type).double().cpu()
        weight = getattr(self.module, f"{name}_proj").weight.detach().double().cpu() * gain
        heads = weight.unflatten(0, (-1, self.head_dim))
        moments = heads @ heads.transpose(1, 2)
        norm = getattr(self.module, f"{name}_norm", None)
        if norm is not None:
            own = _gain(norm, self.head_dim, self.model_type).double().cpu()
            energy = moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
            moments = moments / energy * own[:, None] * own[None, :]
        return moments.unflatten(0, (self.kv_heads, -1)).mean(1)


def _gain(norm: torch.nn.Module, size: int, model_type: str) -> torch.Tensor:
    """An RMS norm's gains, whether its weights are these or these less 1: what it makes of ones."""
    weight = next(norm.parameters())
    with torch.no_grad():
        gain = norm(torch.ones(1, size, dtype=weight.dtype, device=weight.device))[0]
    if not gain.abs().max() > 0:
        raise gyre.InvalidArgument(f"calibrate: {model_type}: the input norm is no RMS norm")
    return gain


def attentions(model) -> list[Attention]:
    """The attention of each layer; models that are built otherwise are refused by name."""
    config = model.config.get_text_config(decoder=True)
    layers = getattr(model.get_decoder(), "layers", None)
    found = []
    for index, layer in enumerate(layers if layers is not None else []):
        module, norm = getattr(layer, "self_attn", None), getattr(layer, "input_layernorm", None)
        linear = all(hasattr(getattr(module, f"{name}_proj", None), "weight") for name in "qkvo")
        if not linear or norm is None:
            break
        head_dim = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found.append(
            Attention(
                module,
                norm,
                config.model_type,
                index,
                module.q_proj.out_features // head_dim,
                module.k_proj.out_features // head_dim,
                head_dim,
            )
        )
    if not found or len(found) != config.num_hidden_layers:
        raise gyre.InvalidArgument(
            f"calibrate: {config.model_type} is not built as Llama, Qwen and Gemma models are: every layer must have "
            "self_attn with q_proj, k_proj, v_proj, o_proj, and input_layernorm"
        )
    return found
