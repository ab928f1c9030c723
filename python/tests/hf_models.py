"""Models for the tests: the stored one, others if they are there, and small random ones of several architectures."""

import os
import pathlib

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

DATA = pathlib.Path(__file__).parent / "data"
TEXT = DATA / "eval.txt"
BYTE_START = 256


def stored_model(name: str) -> pathlib.Path:
    """A model of the repository, or of the folder in GYRE_MODELS; otherwise the test is skipped."""
    for folder in (DATA, pathlib.Path(os.environ.get("GYRE_MODELS", DATA))):
        if (folder / name / "config.json").exists():
            return folder / name
    pytest.skip(f"{name} is not here: set GYRE_MODELS to the folder that has it")


def load(path: pathlib.Path, attention: str):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


def prompt(tokens: int) -> torch.Tensor:
    return torch.tensor([[BYTE_START, *TEXT.read_bytes()[: tokens - 1]]])


def padded(rows: list[torch.Tensor], left: bool = True, columns: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows, columns] and their mask."""
    columns = max(columns, *(len(row) for row in rows), 0)
    ids, mask = (torch.zeros(len(rows), columns, dtype=torch.long) for _ in range(2))
    for i, row in enumerate(rows):
        part = slice(columns - len(row), columns) if left else slice(0, len(row))
        ids[i, part], mask[i, part] = row, 1
    return ids, mask


_SIZES = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
)
_SHARED = dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    sliding_window=9,
    num_kv_shared_layers=3,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=61,
)
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# Architecture and what it adds to the sizes.
RANDOM = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", dict(num_key_value_heads=6)),
    "mistral-window-11": ("Mistral", dict(sliding_window=11)),
    "qwen2-window-7": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, layer_types=_MIXED)),
    "qwen3": ("Qwen3", {}),
    "qwen3-window-13": ("Qwen3", dict(use_sliding_window=True, sliding_window=13, layer_types=_MIXED)),
    "gemma2-caps-window-9": (
        "Gemma2",
        dict(sliding_window=9, attn_logit_softcapping=3.0, final_logit_softcapping=8.0, query_pre_attn_scalar=20),
    ),
    "gemma3-window-5": ("Gemma3", dict(sliding_window=5, query_pre_attn_scalar=24, layer_types=_MIXED)),
    "gemma3-window-1": ("Gemma3", dict(sliding_window=1, layer_types=_MIXED)),
    "gpt-oss-sinks-window-6": (
        "GptOss",
        dict(sliding_window=6, layer_types=_MIXED, num_local_experts=4, num_experts_per_tok=2),
    ),
    # The last three layers share the caches of layers 1 (two of them) and 2.
    "gemma4-shared-window-9": (
        "Gemma4",
        dict(_SHARED, global_head_dim=64),
    ),
    "gemma4-keys-are-values": (
        "Gemma4",
        dict(
            layer_types=_MIXED,
            sliding_window=9,
            global_head_dim=64,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            use_bidirectional_attention="vision",
        ),
    ),
    "gemma3n-shared-window-9": (
        "Gemma3n",
        dict(
            _SHARED,
            laurel_rank=8,
            intermediate_size=[64] * 6,
            activation_sparsity_pattern=[0.0] * 6,
        ),
    ),
}


def random_model(name: str, attention: str, **changes):
    architecture, more = RANDOM[name]
    text = "Text" if architecture in ("Gemma3", "Gemma3n", "Gemma4") else ""
    config = getattr(transformers, f"{architecture}{text}Config")(**{**_SIZES, **more, **changes})
    config._attn_implementation = attention
    torch.manual_seed(7)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(3, _SIZES["vocab_size"], (1, count), generator=torch.Generator().manual_seed(11))
