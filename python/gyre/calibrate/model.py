"""The attention modules of a transformers model: where their projections and norms are, and their weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

import gyre


@dataclass(frozen=True)
class Attention:
    """One layer's. input_norm: what its input passed through. readers: attention of the layers that share its keys and values, without
    k_proj and v_proj."""

    module: torch.nn.Module
    input_norm: torch.nn.Module
    model_type: str
    index: int
    heads: int
    kv_heads: int
    head_dim: int
    readers: list[Attention] = field(default_factory=list)

    def projection(self, name: str) -> torch.nn.Module:
        """"q", "k" or "v"; values may be the projected keys (Gemma 4)."""
        module = getattr(self.module, f"{name}_proj")
        return self.module.k_proj if module is None and name == "v" else module

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
        """What an error in a value's coordinates costs: the sum over the query heads of W_o,h^T W_o,h, f64 [kv_heads, d, d], of the
        layer and of those that share its values."""
        weights = 0
        for each in (self, *self.readers):
            out = each.module.o_proj.weight.detach().double().cpu()  # [hidden, heads * head_dim]
            columns = out.unflatten(1, (self.kv_heads, -1, self.head_dim))  # [hidden, kv_heads, group, d]
            weights = weights + torch.einsum("nhgi,nhgj->hij", columns, columns)
        return weights

    def second_moment(self, name: str) -> torch.Tensor:
        """E[x x^T] of queries, keys or values from the weights alone: of an input whose coordinates are independent before the
        norm's gains. f64 [kv_heads, d, d]; queries: the mean over the heads that share a KV head, also in layers that share keys."""
        if name == "q" and self.readers:
            alone = [replace(each, readers=[], kv_heads=self.kv_heads) for each in (self, *self.readers)]
            return torch.stack([each.second_moment("q") for each in alone]).mean(0)
        gain = _gain(self.input_norm, self.module.q_proj.in_features, self.model_type).double().cpu()
        weight = self.projection(name).weight.detach().double().cpu() * gain
        heads = weight.unflatten(0, (-1, self.head_dim))
        moments = heads @ heads.transpose(1, 2)
        norm = getattr(self.module, f"{name}_norm", None)
        if norm is not None:
            own = _gain(norm, self.head_dim, self.model_type).double().cpu() if list(norm.parameters()) else torch.ones(self.head_dim)
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
    """The attention of each layer with keys and values of its own; models that are built otherwise are refused by name."""
    config = model.config.get_text_config(decoder=True)
    layers = getattr(model.get_decoder(), "layers", None)
    found, layers_read = [], 0
    for index, layer in enumerate(layers if layers is not None else []):
        module, norm = getattr(layer, "self_attn", None), getattr(layer, "input_layernorm", None)
        shares = getattr(module, "is_kv_shared_layer", False)
        keys_are_values = getattr(module, "v_norm", None) is not None and getattr(module, "v_proj", 0) is None
        names = "qo" if shares else "qko" if keys_are_values else "qkvo"
        linear = all(hasattr(getattr(module, f"{name}_proj", None), "weight") for name in names)
        if not linear or norm is None:
            break
        head_dim = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = module.q_proj.out_features // head_dim
        kv_heads = 0 if shares else module.k_proj.out_features // head_dim
        attention = Attention(module, norm, config.model_type, index, heads, kv_heads, head_dim)
        if shares:
            next(owner for owner in reversed(found) if owner.module.layer_type == module.layer_type).readers.append(attention)
        else:
            found.append(attention)
        layers_read += 1
    if not found or layers_read != config.num_hidden_layers:
        raise gyre.InvalidArgument(
            f"calibrate: {config.model_type} is not built as Llama, Qwen and Gemma models are: every layer must have "
            "self_attn with q_proj, k_proj, v_proj, o_proj, and input_layernorm"
        )
    return found
