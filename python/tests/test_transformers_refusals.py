"""What the transformers integration does not do is refused, and changes nothing."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import random_model, random_tokens

import gyre
from gyre.integrations.transformers import GyreCache

IDS = random_tokens(20)


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3-window-13", "gyre")


@pytest.fixture
def cache(model):
    return GyreCache(model.config, k="f32", v="f32", capacity=64)


def refuses(pattern: str):
    return pytest.raises(gyre.Error, match=pattern)


@torch.no_grad()
def forward(model, ids=IDS, **more):
    return model(ids, use_cache=True, **more)


def test_without_the_cache(model):
    with refuses("no GyreCache"):
        model.generate(IDS, max_new_tokens=2)
    with refuses("no GyreCache"), torch.no_grad():
        model(IDS, use_cache=False)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_attention(cache, attention):
    with refuses("attn_implementation"):
        forward(random_model("qwen3-window-13", attention), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_offloading(cache):
    with refuses("not supported"):
        cache.layers[0].offload()


def test_masks(model, cache):
    with refuses(r"mask must be \[1, 20\], got \[1, 7\]"):
        forward(model, attention_mask=torch.ones(1, 7), past_key_values=cache)
    with refuses(r"mask must be \[1, 20\], got \[2, 20\]"):
        forward(model, attention_mask=torch.ones(2, 20), past_key_values=cache)
    with refuses(r"mask given is \[1, 1, 20, 20\]"):
        forward(model, attention_mask=torch.zeros(1, 1, 20, 20), past_key_values=cache)
    forward(model, attention_mask=torch.ones_like(IDS), past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_bidirectional_attention(cache):
    config = random_model("gemma3-window-5", "eager").config
    config.use_bidirectional_attention = True
    with refuses("must be causal"):
        GyreCache(config)
    model = random_model("qwen3-window-13", "gyre")
    model.config.is_causal = False
    with refuses("only causal"):
        forward(model, past_key_values=cache)


def test_training_gradients_and_weights(model, cache):
    with refuses("no gradients"):
        model(IDS, past_key_values=cache)
    with refuses("no attention weights"):
        forward(model, past_key_values=cache, output_attentions=True)
    model.train()
    with refuses("training mode"):
        forward(model, past_key_values=cache)
    model.eval()
    assert cache.get_seq_length() == 0


def test_other_dtypes(cache):
    with refuses("float32, float16 or bfloat16"):
        forward(random_model("qwen3-window-13", "gyre").double(), past_key_values=cache)


def test_autocast(model, cache):
    """Keys come in float32 and values in bfloat16."""
    with refuses("one dtype, got torch.float32 and torch.bfloat16"), torch.autocast("cpu", dtype=torch.bfloat16):
        forward(model, past_key_values=cache)
    assert [layer.length for layer in cache.layers] == [0] * 4


def test_more_than_the_capacity(model, cache):
    forward(model, past_key_values=cache)
    with refuses("room for 64 tokens, holds 20, and was given 45"):
        forward(model, random_tokens(45), past_key_values=cache)
    forward(model, random_tokens(44), past_key_values=cache)
    with refuses("room for 64 tokens"):
        forward(model, random_tokens(1), past_key_values=cache)
    assert cache.get_seq_length() == 64


def test_the_cache_of_another_model(model):
    with refuses("window of 13"):
        forward(model, past_key_values=GyreCache(random_model("qwen2-window-7", "eager").config))
    with refuses("began with"):
        cache = GyreCache(model.config)
        forward(model, past_key_values=cache)
        forward(random_model("qwen3-window-13", "gyre", num_key_value_heads=3), past_key_values=cache)
    with refuses("has 4 layers"):
        other = random_model("llama", "gyre", num_hidden_layers=5)
        forward(other, past_key_values=GyreCache(random_model("llama", "gyre").config))


@pytest.mark.parametrize(
    "key, value",
    [
        ((1, 2, 4, 32), (1, 2, 4, 48)),
        ((1, 2, 4, 32), (1, 2, 5, 32)),
        ((2, 4, 32), (2, 4, 32)),
        ((1, 2, 0, 32), (1, 2, 0, 32)),
    ],
)
def test_shapes(cache, key, value):
    with refuses("same shape"):
        cache.update(torch.zeros(key), torch.zeros(value), 0)


def test_head_dims(model):
    with refuses("head_dim"):
        forward(
            random_model("llama", "gyre", head_dim=12), past_key_values=GyreCache(random_model("llama", "gyre").config)
        )


@pytest.mark.parametrize(
    "options, pattern",
    [
        (dict(k="tq9"), "tq9"),
        (dict(k=["tq8"]), "each of 4"),
        (dict(k="f16", v="f32", tail=8), "nothing better"),
        (dict(capacity=0), "positive"),
        (dict(tail=-1), "not be negative"),
        (dict(sink_tokens=-1), "not be negative"),
        (dict(step_tokens=0), "positive"),
        (dict(device="meta"), "CPU or a CUDA"),
    ],
)
def test_options(model, options, pattern):
    with refuses(pattern):
        GyreCache(model.config, **options)


@pytest.mark.parametrize(
    "changes, pattern",
    [
        (dict(layer_types=["chunked_attention"] * 4), "chunked_attention"),
        (dict(is_encoder_decoder=True), "encoder-decoder"),
    ],
)
def test_configs(changes, pattern):
    config = random_model("llama", "eager").config
    for name, value in changes.items():
        setattr(config, name, value)
    with refuses(pattern):
        GyreCache(config)


def test_crop(cache, model):
    forward(model, past_key_values=cache)
    with refuses("negative number, got 5"):
        cache.crop(5)
    with refuses("crop to -1"):
        cache.crop(-21)
    rings = GyreCache(model.config, k="f32", v="f32", step_tokens=4)
    forward(model, random_tokens(40), past_key_values=rings)
    with pytest.raises(gyre.Error):
        rings.crop(-20)
    assert [layer.length for layer in rings.layers] == [40] * 4
    rings.crop(-4)
    assert rings.get_seq_length() == 36


def test_an_interrupted_forward(cache):
    model = random_model("qwen3-window-13", "gyre")
    forward(model, past_key_values=cache)
    last = model.model.layers[2].mlp
    model.model.layers[2].mlp = _Broken()
    with pytest.raises(ZeroDivisionError):
        forward(model, past_key_values=cache)
    model.model.layers[2].mlp = last
    with refuses("interrupted"):
        forward(model, past_key_values=cache)
    cache.crop(-20)
    forward(model, past_key_values=cache)
    assert [layer.length for layer in cache.layers] == [40] * 4


class _Broken(torch.nn.Module):
    def forward(self, x):
        raise ZeroDivisionError
