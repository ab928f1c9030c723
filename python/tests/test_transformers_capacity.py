"""How much a GyreCache holds: growth, a cache that generate() makes, and a word at the start."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import random_model, random_tokens

import gyre
from gyre.integrations.transformers import GyreCache, enable, stores

FEW = dict(max_new_tokens=15, min_new_tokens=15, do_sample=False)


@pytest.fixture
def small_start(monkeypatch):
    monkeypatch.setattr(stores, "_FIRST_TOKENS", 20)


@torch.no_grad()
def logits(model, ids, cache, pieces) -> torch.Tensor:
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(pieces, 1)], 1)


@pytest.mark.parametrize("batch, paged", [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("more", [dict(k="f32", v="f32"), dict(k="tq8", v="tq4", tail=20, sink_tokens=4)])
def test_a_cache_that_grows_has_the_bits_of_a_large_one(small_start, batch, paged, more):
    model = random_model("qwen3-window-13", "gyre")
    ids = torch.cat([random_tokens(300).roll(i, 1) for i in range(batch)])
    pieces = [15, 1, 1, 1, 1, 1, 1, 60, 1, 150, 1, 67]
    options = dict(step_tokens=16, paged=paged, **more)
    growing, large = GyreCache(model.config, **options), GyreCache(model.config, capacity=512, **options)
    logits(model, ids[:, :15], growing, 15), logits(model, ids[:, :15], large, 15)
    first = growing.nbytes
    assert first < large.nbytes
    given, expected = (logits(model, ids[:, 15:], cache, pieces[1:]) for cache in (growing, large))
    assert torch.equal(given, expected)
    assert first < growing.nbytes <= large.nbytes and growing.get_max_length() == 512
    assert growing.get_seq_length() == 300
    if paged:
        growing.batch_repeat_interleave(2)
        assert growing.batch_size == 2 * batch


def test_beams_that_grow_still_share(small_start):
    model = random_model("llama", "gyre", max_position_embeddings=4096)
    cache = GyreCache(model.config, k="f32", v="f32")
    logits(model, random_tokens(130).repeat(4, 1), cache, 130)
    cache.reorder_cache(torch.tensor([2, 2, 2, 2]))
    logits(model, random_tokens(4).view(4, 1), cache, 1)
    before = cache.nbytes
    assert [(group.used, group.shared) for group in cache.describe()] == [(6, 2)] * 4
    for _ in range(2):
        logits(model, random_tokens(400).view(4, 100), cache, 100)
    assert cache.nbytes > before
    assert [group.shared for group in cache.describe()] == [2] * 4
    assert len({id(layer.columns) for layer in cache.layers}) == 1


def test_a_default_cache():
    expected = random_model("gemma3-window-5", "eager").generate(random_tokens(20), **FEW)
    model = enable(random_model("gemma3-window-5", "eager"), k="f32", v="f32")
    assert torch.equal(model.generate(random_tokens(20), **FEW), expected)
    answer = model.generate(input_ids=random_tokens(20), return_dict_in_generate=True, **FEW)
    assert torch.equal(answer.sequences, expected)
    assert isinstance(answer.past_key_values, GyreCache) and answer.past_key_values.layers[0].stored.k == "f32"
    assert isinstance(model, transformers.Gemma3ForCausalLM) and type(model).__name__ == "Gemma3ForCausalLM"
    enable(model, k="f16", v="f16")
    answer = model.generate(random_tokens(20), return_dict_in_generate=True, **FEW)
    assert answer.past_key_values.layers[0].stored.k == "f16"
    mine = GyreCache(model.config)
    model.generate(random_tokens(20), past_key_values=mine, **FEW)
    assert mine.get_seq_length() == 34
    beams = dict(num_beams=3, max_new_tokens=8, do_sample=False)
    expected = random_model("gemma3-window-5", "eager").generate(random_tokens(20), **beams)
    assert torch.equal(enable(model, k="f32", v="f32").generate(random_tokens(20), **beams), expected)


class _Never(torch.nn.Module):
    def forward(self, *args, **kwargs):
        raise AssertionError("the model ran")


def test_a_word_at_the_start():
    model = enable(random_model("llama", "gyre"), capacity=64)
    layers, ids = model.model.layers, random_tokens(50)
    model.generate(ids, max_new_tokens=15, min_new_tokens=15)  # the last one is not stored
    model.model.layers = torch.nn.ModuleList([_Never()])
    config = transformers.GenerationConfig(max_new_tokens=16)
    for options in (dict(max_new_tokens=16), dict(max_length=66), dict(generation_config=config), dict()):
        with pytest.raises(gyre.Error, match="would be 6[59], the cache has room for 64"):
            model.generate(ids, **options)
    with pytest.raises(gyre.Error, match="would be 65, the cache has room for 64"):
        model.generate(ids, max_new_tokens=16, past_key_values=GyreCache(model.config, capacity=64))
    with pytest.raises(gyre.Error, match="would be 513, the cache has room for 512"):
        enable(model).generate(ids, max_new_tokens=464)
    with pytest.raises(gyre.Error, match="no prompt"):
        model.generate(max_new_tokens=4)
    model.model.layers = layers
    cache = GyreCache(model.config, capacity=64)
    model.generate(ids, max_new_tokens=2, min_new_tokens=2, past_key_values=cache)
    with pytest.raises(gyre.Error, match="would be 65"):  # new tokens alone, behind 51
        model.generate(ids[:, :4], attention_mask=torch.ones(1, 55), max_new_tokens=11, past_key_values=cache)


def test_options_that_enable_refuses():
    model = random_model("llama", "eager")
    kind = type(model)
    with pytest.raises(gyre.Error, match="tq9"):
        enable(model, k="tq9")
    assert type(model) is kind and model.config._attn_implementation == "eager"


def test_repr():
    model = random_model("qwen3-window-13", "gyre")
    cache = GyreCache(model.config, k=["tq8", "f16", "tq8", "f16"], v="f16", capacity=300)
    assert repr(cache) == "GyreCache(0 of 300 tokens, batch=-1, layers=4, f16/f16, tq8/f16, nbytes=0)"
    logits(model, random_tokens(20).view(2, 10), cache, 10)
    assert repr(cache).startswith("GyreCache(10 of 300 tokens, batch=2, layers=4, f16/f16, tq8/f16, nbytes=")


def test_nothing_is_said_at_exit():
    """nanobind reports objects that outlive the interpreter."""
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from hf_models import random_model, random_tokens
from gyre.integrations.transformers import GyreCache, enable
model = enable(random_model("llama", "gyre"))
first = model.generate(random_tokens(9), max_new_tokens=3)
cache = GyreCache(model.config, device="cpu")
model.generate(random_tokens(18).view(2, 9), max_new_tokens=3, past_key_values=cache)
"""
    folder = __file__.rpartition("/")[0]
    ended = subprocess.run(
        [sys.executable, "-c", code, folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "GYRE_LEAK_WARNINGS": "1"},
    )
    assert ended.returncode == 0 and "leak" not in ended.stderr, ended.stderr
