"""Every setting predicts the same text through its own cache."""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm

import gyre
from gyre.integrations.transformers import GyreCache

from .baselines import RoundedCache
from .rows import REFERENCE, Row, Setting, Statistics


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
) -> list[Row]:
    """One row per setting, in order. texts: token ids, the first of each is not predicted. device: of the caches; by
    default where the model is. step: tokens that pass through model and cache at a time."""
    reference = Setting(REFERENCE, REFERENCE)
    every = [reference] + [setting for setting in wanted if setting != reference]
    statistics = {setting: Statistics() for setting in every}
    size = {}
    tokens = sum(len(text) - 1 for text in texts) * len(every)
    with torch.inference_mode(), tqdm(total=tokens, unit="token", file=sys.stderr, disable=not progress) as bar:
        for text in texts:
            ids = text.to(model.device)
            capacity = len(text) - 1
            caches = {s: make_cache(model.config, s, capacity, step, device) for s in every}
            for begin in range(0, capacity, step):
                end = min(begin + step, capacity)
                expected = None
                for setting, cache in caches.items():
                    logits = model(ids[None, begin:end], past_key_values=cache, use_cache=True).logits[0]
                    log_p = logits.double().log_softmax(-1)
                    expected = log_p if expected is None else expected
                    statistics[setting].add(log_p, expected, ids[begin + 1 : end + 1])
                bar.update(len(every) * (end - begin))
            size = {setting: cache.nbytes / cache.get_seq_length() for setting, cache in caches.items()}
    return [statistics[setting].row(setting, size[setting]) for setting in wanted]
