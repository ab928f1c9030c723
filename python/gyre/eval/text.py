"""Texts as the tokens of a model."""

from __future__ import annotations

import os

import torch
from transformers import AutoConfig, AutoTokenizer

import gyre

BYTE_START = 256  # of byte-level models: ids below are bytes


def read_tokens(op: str, model_dir: str, text: bytes) -> tuple[list[int], int, str]:
    """The tokens of a text, the one that starts a text, and what a token is."""
    if not os.path.isdir(model_dir):  # otherwise the name of a model on the network
        raise gyre.InvalidArgument(f"{op}: the model must be a folder, {model_dir} is not")
    try:
        config = AutoConfig.from_pretrained(model_dir).get_text_config(decoder=True)
    except ValueError as error:  # a folder without config.json, or of an unknown architecture
        raise gyre.InvalidArgument(f"{op}: {model_dir} is no folder of a Hugging Face model: {str(error).splitlines()[0]}") from None
    if not any(os.path.exists(os.path.join(model_dir, name)) for name in ("tokenizer.json", "tokenizer_config.json")):
        if config.vocab_size <= BYTE_START or config.vocab_size > 2 * BYTE_START:
            raise gyre.InvalidArgument(
                f"{op}: {model_dir} has no tokenizer and {config.vocab_size} tokens: not a byte-level model"
            )
        return list(text), BYTE_START, "byte"
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    try:
        ids = tokenizer(text.decode("utf-8"), add_special_tokens=False)["input_ids"]
    except UnicodeDecodeError as error:
        raise gyre.InvalidArgument(f"{op}: the text is not UTF-8: {error}") from None
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise gyre.InvalidArgument(f"{op}: the tokenizer of {model_dir} has no token that starts or ends a text")
    return ids, start, "token"


def made_for(model_dir: str) -> int | None:
    """Positions that a model was made for, if its config says so."""
    config = AutoConfig.from_pretrained(model_dir).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def read_windows(model_dir: str, text: bytes, context: int, windows: int) -> tuple[list[torch.Tensor], str]:
    """Texts of `context` tokens to predict, one after the other, each with a token before it; and what a token is."""
    ids, start, unit = read_tokens("eval", model_dir, text)
    positions = made_for(model_dir) or context
    if context > positions:
        raise gyre.InvalidArgument(f"eval: the model was made for {positions} positions, a context of {context} is more")
    if windows * context > len(ids):
        needed = windows * context
        raise gyre.InvalidArgument(
            f"eval: {windows} windows of {context} need {needed} {unit}s, the text has {len(ids)}"
        )
    return [torch.tensor([start, *ids[i * context : (i + 1) * context]]) for i in range(windows)], unit
