"""Hugging Face models with Gyre's cache and attention against the same models with their own."""

import copy
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import RANDOM, load, prompt, random_model, random_tokens, stored_model

from gyre.integrations.transformers import GyreCache

GREEDY = dict(max_new_tokens=200, min_new_tokens=200, do_sample=False)


def exact(model, **options) -> GyreCache:
    return GyreCache(model.config, k="f32", v="f32", **options)


def logits(model, ids, cache, pieces) -> torch.Tensor:
    """Logits of all tokens, fed in pieces."""
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=True).logits[0] for part in ids.split(pieces, dim=1)]
    return torch.cat(parts)


@pytest.mark.parametrize("stock", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["tiny-d128", "small-swa-d256"])
def test_greedy_text_is_that_of_stock_attention(name, stock):
    path = stored_model(name)
    ids = prompt(700)  # longer than the window of small-swa-d256 and a step of the cache
    expected = load(path, stock).generate(ids, **GREEDY)
    model = load(path, "gyre")
    cache = exact(model)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("name", ["tiny-d128", "small-swa-d256"])
def test_logits_of_an_f16_cache(name):
    path = stored_model(name)
    ids = prompt(900)
    with torch.no_grad():
        expected = load(path, "sdpa")(ids).logits[0]
    model = load(path, "gyre")
    pieces = [700] + [1] * 200
    cache = GyreCache(model.config, k="f16", v="f16")
    error = (logits(model, ids, cache, pieces) - expected).abs()
    # Weights of 8 bits in a prompt add to what f16 costs, 7e-3: together 1.6e-2 to 3e-2, as the last bits fall.
    coarse = "weights of 8 bits" in cache.describe()[0].kernel
    assert 0 < error[:700].max() < (4e-2 if coarse else 2e-2)
    assert 0 < error[700:].max() < 2e-2


def test_compressed_text_is_close():
    path = stored_model("tiny-d128")
    ids = prompt(400)
    with torch.no_grad():
        expected = load(path, "sdpa")(ids).logits[0].log_softmax(-1)
    model = load(path, "gyre")
    divergence = {}
    for k, v in (("tq8", "tq8"), ("tq8", "tq4"), ("tq2", "tq2")):
        given = logits(model, ids, GyreCache(model.config, k=k, v=v, tail=0, sink_tokens=0), 50).log_softmax(-1)
        divergence[k, v] = (expected.exp() * (expected - given)).sum(-1).mean()
    assert divergence["tq8", "tq8"] < 1e-4
    assert divergence["tq8", "tq8"] < divergence["tq8", "tq4"] < 2e-3 < divergence["tq2", "tq2"]


# 40 tokens: more than any window. In one piece, in steps of the cache, in odd pieces, one by one.
@pytest.mark.parametrize("pieces, step_tokens", [(40, 512), (40, 8), ([5, 1, 20, 14], 512), ([17, 2, 21], 3), (1, 512)])
@pytest.mark.parametrize("name", RANDOM)
def test_random_models(name, pieces, step_tokens):
    ids = random_tokens(40)
    with torch.no_grad():
        expected = random_model(name, "eager")(ids).logits[0]
    model = random_model(name, "gyre")
    if "shared" in name and isinstance(pieces, list):  # layers that share take a step as a whole
        step_tokens = max(step_tokens, *pieces)
    given = logits(model, ids, exact(model, step_tokens=step_tokens), pieces)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in RANDOM if "window" in name])
def test_the_window_of_random_models_matters(name):
    ids = random_tokens(40)
    with torch.no_grad():
        narrow, wide = (random_model(name, "eager", **more)(ids).logits for more in ({}, {"sliding_window": 400}))
    assert (narrow - wide).abs().max() > 0.1


def test_the_caps_and_sinks_of_random_models_matter():
    ids = random_tokens(40)
    with torch.no_grad():
        caps, none = (
            random_model("gemma2-caps-window-9", "eager", **more)(ids).logits
            for more in ({}, {"attn_logit_softcapping": None})
        )
        assert (caps - none).abs().max() > 0.1
        model = random_model("gpt-oss-sinks-window-6", "eager")
        sinks = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-100)
        assert (sinks - model(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("name", RANDOM)
def test_random_models_generate(name):
    ids = random_tokens(30)
    greedy = dict(max_new_tokens=40, min_new_tokens=40, do_sample=False)
    expected = random_model(name, "eager").generate(ids, **greedy)
    model = random_model(name, "gyre")
    assert torch.equal(model.generate(ids, past_key_values=exact(model), **greedy), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(dtype):
    ids = random_tokens(40)
    with torch.no_grad():
        expected = random_model("qwen3-window-13", "eager").to(dtype)(ids).logits[0].float()
    model = random_model("qwen3-window-13", "gyre").to(dtype)
    given = logits(model, ids, GyreCache(model.config, k="f16", v="f16"), [30] + [1] * 10).float()
    assert (given - expected).abs().mean() < (0.1 if dtype == torch.bfloat16 else 0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device here")
@pytest.mark.parametrize("name", RANDOM)
def test_random_models_on_cuda(name):
    ids = random_tokens(40).cuda()
    with torch.no_grad():
        expected = random_model(name, "eager").cuda()(ids).logits[0]
    model = random_model(name, "gyre").cuda()
    cache = exact(model, step_tokens=8)
    # Enough steps in flight, without a look at the results, that a stream that does not wait would show.
    given = logits(model, ids, cache, [21] + [1] * 19)
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-3)
    assert all("cuda" in layer.store.shape.device.name for layer in cache.layers)


def test_sampling_is_that_of_stock_attention():
    path = stored_model("tiny-d128")
    ids = prompt(100)
    sample = dict(max_new_tokens=60, do_sample=True, temperature=0.8, top_k=40)
    texts = []
    for attention in ("sdpa", "gyre"):
        model = load(path, attention)
        torch.manual_seed(3)
        texts.append(
            model.generate(ids, **sample, **({"past_key_values": exact(model)} if attention == "gyre" else {}))
        )
    assert torch.equal(*texts)


def test_prefill_in_chunks_and_prompt_lookup():
    ids = prompt(300)
    path = stored_model("tiny-d128")
    few = dict(max_new_tokens=60, do_sample=False)
    expected = load(path, "sdpa").generate(ids, **few)
    model = load(path, "gyre")
    assert torch.equal(model.generate(ids, past_key_values=exact(model), prefill_chunk_size=77, **few), expected)
    assert torch.equal(model.generate(ids, past_key_values=exact(model), prompt_lookup_num_tokens=6, **few), expected)


def test_assisted_decoding():
    ids = random_tokens(20)
    few = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False)
    expected = random_model("qwen3-window-13", "eager").generate(ids, **few)
    model = random_model("qwen3-window-13", "gyre")
    assistant = random_model("qwen3", "eager")  # the same weights without a window: sometimes right
    cache = exact(model)
    assert torch.equal(model.generate(ids, past_key_values=cache, assistant_model=assistant, **few), expected)


def test_prompt_lookup_over_rings():
    ids = random_tokens(12).repeat(1, 6)
    few = dict(max_new_tokens=60, min_new_tokens=60, do_sample=False)
    expected = random_model("gemma3-window-5", "eager").generate(ids, **few)
    model = random_model("gemma3-window-5", "gyre")
    assert torch.equal(model.generate(ids, past_key_values=exact(model), prompt_lookup_num_tokens=4, **few), expected)


def test_a_conversation_goes_on_in_the_same_cache():
    model = random_model("gemma3-window-5", "gyre")
    few = dict(max_new_tokens=15, min_new_tokens=15, do_sample=False)
    cache = exact(model)
    first = model.generate(random_tokens(20), past_key_values=cache, **few)
    ids = torch.cat([first, random_tokens(9)], dim=1)
    expected = random_model("gemma3-window-5", "eager").generate(ids, **few)
    assert torch.equal(model.generate(ids, past_key_values=cache, **few), expected)


def test_crop_reset_and_copies():
    model = random_model("qwen3-window-13", "gyre")
    ids = random_tokens(60)
    made = lambda: GyreCache(model.config, k="tq8", v="tq4", tail=0, sink_tokens=0, step_tokens=16)
    expected = logits(model, ids, made(), [50, 10])[50:]
    cropped = made()
    logits(model, ids[:, :50], cropped, 50)
    copied = copy.deepcopy(cropped)
    logits(model, random_tokens(8), cropped, 8)
    cropped.crop(-8)
    assert cropped.get_seq_length() == 50 and cropped.get_mask_sizes(3, 0) == (53, 0)
    for cache in (cropped, copied):
        assert torch.equal(logits(model, ids[:, 50:], cache, 10), expected)
        cache.crop(0)
        assert cache.get_seq_length() == 60
    cropped.reset()
    assert cropped.get_seq_length() == 0 and copied.get_seq_length() == 60
    assert torch.equal(logits(model, ids, cropped, [50, 10])[50:], expected)


def test_the_examples_of_the_document(capsys, monkeypatch, tmp_path):
    root = pathlib.Path(__file__).parents[2]
    (tmp_path / "python").symlink_to(root / "python")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (root / "docs/transformers.md").read_text(), re.DOTALL))
    names = {}
    exec(compile(code, "docs/transformers.md", "exec"), names)
    assert capsys.readouterr().out.count("The cache of a model is") == 2
    assert names["again"].get_seq_length() == names["cache"].get_seq_length() > 40


def test_what_is_stored():
    model = random_model("qwen3-window-13", "gyre")
    cache = GyreCache(
        model.config, k=["tq8", "f16", "tq8", "tq4"], v="f16", tail=20, sink_tokens=4, capacity=300, step_tokens=8
    )
    assert cache.nbytes == 0 and cache.get_max_length() == 300
    logits(model, random_tokens(40), cache, 40)
    layers = [info.layer for info in cache.describe()]
    assert [(layer.k, layer.window, layer.tail, layer.sink_tokens) for layer in layers] == [
        ("tq8", 13, 20, 0),
        ("f16", 0, 0, 0),
        ("tq8", 13, 20, 0),
        ("tq4", 0, 20, 4),
    ]
    assert [info.slots for info in cache.describe()] == [20, 300, 20, 296]
    assert cache.nbytes >= sum(info.nbytes for info in cache.describe()) > 0
    assert cache.is_sliding == [True, False, True, False]


def test_compressed_layers_have_a_tail_and_a_sink_token_by_default():
    config = random_model("gemma3-window-5", "gyre").config
    stored = [layer.stored for layer in GyreCache(config).layers]
    assert {(layer.k, layer.v, layer.tail) for layer in stored} == {("tq8", "tq4", 128)}
    assert {(bool(layer.window), layer.sink_tokens) for layer in stored} == {(False, 1), (True, 0)}
    for options in (dict(k="f16", v="f16"), dict(k="tq4", v="tq4", tail=0, sink_tokens=0)):
        assert all((layer.stored.tail, layer.stored.sink_tokens) == (0, 0) for layer in GyreCache(config, **options).layers)
