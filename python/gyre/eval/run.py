"""Every setting predicts the same text through its own cache."""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm

import gyre
from gyre.integrations.transformers import GyreCache
from gyre.integrations.transformers.config import layer_dims

from .baselines import RoundedCache
from .rows import REFERENCE, Setting
from .statistics import Row, Statistics


def make_cache(config, setting: Setting, capacity: int, step: int, device: gyre.Device | None):
    if setting.baseline:
        return RoundedCache(config, setting.baseline, capacity)
    more = {} if setting.calibration is None else {"calibration": setting.calibration}
    return GyreCache(
        config,
        k=setting.k,
        v=setting.v,
        tail=setting.tail,
        sink_tokens=setting.sink_tokens,
        capacity=capacity,
        step_tokens=step,
        device=device,
        **more,
    )


def evaluate(
    model,
    texts: list[torch.Tensor],
    wanted: list[Setting],
    device: gyre.Device | None = None,
    progress: bool = True,
    step: int = 1,
    batch: int = 1,
) -> list[Row]:
    """One row per setting, in order. texts: token ids, the first of each is not predicted. device: of the caches; by
    default where the model is. step: tokens that pass through model and cache at a time. batch: texts that do, which must be
    equally long."""
    reference = Setting(REFERENCE, REFERENCE)
    every = [reference] + [setting for setting in wanted if setting != reference]
    statistics = {setting: Statistics() for setting in every}
    tokens = sum(len(text) - 1 for text in texts) * len(every)
    with torch.inference_mode(), tqdm(total=tokens, unit="token", file=sys.stderr, disable=not progress) as bar:
        for at in range(0, len(texts), batch):
            ids = torch.stack(texts[at : at + batch]).to(model.device)
            capacity = ids.shape[1] - 1
            caches = {s: make_cache(model.config, s, capacity, step, device) for s in every}
            for begin in range(0, capacity, step):
                end = min(begin + step, capacity)
                targets, expected = ids[:, begin + 1 : end + 1].flatten(), None
                for setting, cache in caches.items():
                    logits = model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits.flatten(0, 1)
                    log_p = logits.float().log_softmax(-1)
                    expected = log_p if expected is None else expected
                    statistics[setting].add(log_p, expected, targets)
                    bar.update(targets.numel())
    longest = max(len(text) - 1 for text in texts)
    return [statistics[setting].row(setting, decoding_bytes(model.config, setting, longest)) for setting in wanted]


def decoding_bytes(config, setting: Setting, tokens: int) -> float:
    """Bytes per token of a cache that holds this many and decodes one at a time. Larger steps need larger rings."""
    if setting.baseline:
        return RoundedCache(config, setting.baseline, tokens).bytes_of(tokens) / tokens
    cache = make_cache(config, setting, tokens, 1, gyre.Device("cpu"))
    total = 0
    for layer, dims in zip(cache.layers, layer_dims(config)):
        dims = (1, layer.stored.head_dim) if layer.stored.latent else dims
        total += layer.make_store(1, *dims, 1, torch.device("cpu")).nbytes
    return total / tokens
