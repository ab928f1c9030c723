"""Names and numbers hidden in a text, and questions about them.

The text is read once. Each question is then asked on a copy of the cache, and the right answer is read after it: a question is answered
if every token of the answer is the most probable one in its place.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import torch

import gyre

from .rows import Setting
from .run import make_cache

_NAMES = (
    "Alice Bruno Carla David Elena Frank Grace Henry Irene Jacob Karen Louis Maria Nancy Oscar Paula Quinn Robert Sarah Thomas "
    "Ursula Victor Wendy Xavier"
).split()
_PROMPTS = "Q: What is the code of {name}?\nA: The code of {name} is", " {code}."


@dataclass
class Haystack:
    text: torch.Tensor
    questions: list[tuple[torch.Tensor, torch.Tensor]]  # and answers


@dataclass
class Found:
    """exact: of each question; parts: of each token of the answers."""

    exact: list[bool]
    parts: list[bool]


def haystacks(tokenizer, start: int, filler: str, count: int, names: int = 10, digits: int = 3, tokens: int = 1400) -> list[Haystack]:
    """Texts of about `tokens` tokens, with a code for each name at random places of the filler."""
    lines = [line for line in filler.splitlines() if len(line.split()) > 3]
    encode = lambda text: torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    found = []
    for seed in range(count):
        pick = random.Random(seed)
        codes = {name: "".join(pick.choice("0123456789") for _ in range(digits)) for name in pick.sample(_NAMES, names)}
        facts = [f"The code of {name} is {code}." for name, code in codes.items()]
        room = tokens - len(encode("\n".join(facts)))
        begin, body = pick.randrange(len(lines)), []
        while room > 0:
            body.append(lines[(begin + len(body)) % len(lines)])
            room -= len(encode(body[-1])) + 1
        for fact in facts:
            body.insert(pick.randrange(len(body) + 1), fact)
        text = torch.cat([torch.tensor([start]), encode("\n".join(body) + "\n\n")])
        asked = [
            (encode(_PROMPTS[0].format(name=name)), encode(_PROMPTS[1].format(code=code))) for name, code in codes.items()
        ]
        found.append(Haystack(text, asked))
    return found


def retrieve(model, haystack: Haystack, setting: Setting, device: gyre.Device | None = None) -> Found:
    longest = max(len(question) + len(answer) for question, answer in haystack.questions)
    cache = make_cache(model.config, setting, len(haystack.text) + longest, 512, device)
    found = Found([], [])
    with torch.inference_mode():
        model(haystack.text[None].to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1)
        for question, answer in haystack.questions:
            ids = torch.cat([question, answer[:-1]])[None].to(model.device)
            own = copy.deepcopy(cache)
            logits = model(ids, past_key_values=own, use_cache=True, logits_to_keep=len(answer)).logits[0]
            right = logits.argmax(-1).cpu() == answer
            found.exact.append(bool(right.all()))
            found.parts += right.tolist()
    return found
