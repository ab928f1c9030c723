"""How long greedy answers stay those of the f16 cache.

A cache reads the prompt and the answer of the f16 cache in one pass. Up to the first token that it would have chosen otherwise, that is
what it would have read in free decoding.
"""

from __future__ import annotations

import torch

import gyre
from gyre.integrations.transformers import GyreCache

from .rows import REFERENCE, Setting
from .run import make_cache

_STEP = 512


def answers(model, prompts: list[torch.Tensor], tokens: int, device: gyre.Device | None = None) -> list[torch.Tensor]:
    """The greedy answer of an f16 cache to each prompt, token by token."""
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            cache = GyreCache(model.config, k=REFERENCE, v=REFERENCE, capacity=len(prompt) + tokens, device=device)
            ids, answer = prompt.to(model.device), []
            for _ in range(tokens):
                logits = model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
                ids = logits.argmax(-1, keepdim=True)
                answer.append(ids)
            found.append(torch.cat(answer).cpu())
    return found


def equal_tokens(
    model, prompts: list[torch.Tensor], expected: list[torch.Tensor], setting: Setting, device: gyre.Device | None = None
) -> list[int]:
    """For each prompt, how many tokens of the expected answer come before the first that the setting's cache would not choose."""
    return [_equal(_choices(model, prompt, answer, setting, device), answer) for prompt, answer in zip(prompts, expected)]


def _choices(model, prompt, answer, setting: Setting, device) -> torch.Tensor:
    """The most probable token in the place of each token of the answer."""
    ids = torch.cat([prompt, answer[:-1]]).to(model.device)
    cache = make_cache(model.config, setting, len(ids), _STEP, device)
    with torch.inference_mode():
        logits = model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=len(answer)).logits[0]
    return logits.argmax(-1).cpu()


def _equal(chosen: torch.Tensor, answer: torch.Tensor) -> int:
    differs = (chosen != answer).nonzero()
    return int(differs[0]) if len(differs) else len(answer)
