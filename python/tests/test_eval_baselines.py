"""Other ways to store keys and values, as gyre.eval rounds them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import random_model, random_tokens

from gyre import eval as gyre_eval
from gyre.eval import baselines
from gyre.eval.baselines import BASELINES, RoundedCache
from gyre.eval.chart import frontier


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def error(x, rounded):
    return ((x - rounded).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("name, least, most", [("fp8", 5e-4, 9e-4), ("q4_0-rotated", 6e-3, 9e-3), ("nvfp4", 8e-3, 1.1e-2)])
def test_squared_errors_of_gaussian_rows(name, least, most):
    x = gaussian(2, 200, 128)
    assert least < error(x, BASELINES[name].round(x)) < most


def test_q4_0_is_that_of_llama_cpp():
    x = torch.tensor([-4.0, 3.9, 1.0, 0.1] + [0.0] * 28)
    assert baselines._q4_0(x)[:5].tolist() == [-4.0, 3.5, 1.0, 0.0, 0.0]  # scale 0.5, levels -8 to 7
    assert baselines._q4_0(torch.zeros(64)).abs().max() == 0


def test_nvfp4_has_the_levels_of_e2m1():
    x = torch.tensor([6.0, -6.0, 0.2, 0.3, 1.2, 1.3, 2.4, 2.6, 3.4, 3.6, 4.9, 5.1, 0.0, -0.7, -0.8, -3.4])
    expected = [6.0, -6.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 0.0, -0.5, -1.0, -3.0]
    assert baselines._nvfp4(x).tolist() == expected


def test_kivi_rounds_keys_by_channel_and_values_by_row():
    x = gaussian(1, 128, 128)
    x[:, :, 5] += 100  # a channel of outliers does not disturb the others of its rows
    by_channel, by_row = baselines._between_extremes(x, 1), baselines._between_extremes(x, -1)
    assert error(x[..., :5], by_channel[..., :5]) < 0.01 < 0.5 < error(x[..., :5], by_row[..., :5])


def exact_cache(monkeypatch, model, capacity):
    monkeypatch.setitem(BASELINES, "exact", baselines.Baseline(32, lambda x: x))
    return RoundedCache(model.config, "exact", capacity)


@pytest.mark.parametrize("name", ["llama", "gemma2-caps-window-9", "gemma3-window-5", "gpt-oss-sinks-window-6"])
@pytest.mark.parametrize("step", [1, 8])
def test_without_rounding_it_is_the_models_own_attention(monkeypatch, name, step):
    model, ids = random_model(name, "gyre"), random_tokens(40)
    cache = exact_cache(monkeypatch, model, 40)
    with torch.inference_mode():
        parts = [model(ids[:, i : i + step], past_key_values=cache, use_cache=True).logits for i in range(0, 40, step)]
        expected = random_model(name, "eager")(ids).logits
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-3, rtol=2e-3)


def test_what_kivi_keeps_exact():
    layer = baselines._RoundedLayer(BASELINES["kivi4"], baselines.gyre.KvLayer("f32", "f32"), 300)
    x = gaussian(1, 2, 300, 128)
    for i in range(300):
        layer._write(x[:, :, i : i + 1], x[:, :, i : i + 1])
        layer._let_go()
    exact = lambda stored: [i for i in range(300) if torch.equal(stored[:, :, i], x[:, :, i])]
    assert exact(layer.k) == list(range(256, 300)) and exact(layer.v) == list(range(172, 300))
    assert error(x[:, :, :256], layer.k[:, :, :256]) < 0.02 and error(x[:, :, :172], layer.v[:, :, :172]) < 0.02


def test_rows_of_baselines():
    wanted = gyre_eval.settings(["tq4", "fp8", "kivi4"], tail=16)
    assert [(s.name, s.tail, s.kind) for s in wanted] == [
        ("tq4", 0, "formats"),
        ("tq4", 16, "formats"),
        ("fp8", 0, "baseline"),
        ("kivi4", 128, "baseline"),
    ]
    model = random_model("gemma3-window-5", "gyre")
    rows = gyre_eval.evaluate(model, [random_tokens(50)[0]], wanted[2:3], progress=False)
    # 4 layers, 2 KV heads, K and V, 32 coordinates of a byte; layers with a window store 5 of 49 tokens.
    assert rows[0].bytes_per_token == pytest.approx(2 * 2 * 32 * (2 + 2 * 5 / 49)) and 0 < rows[0].kld_mean < 0.1


def test_the_frontier():
    row = lambda name, size, kld: gyre_eval.Row(name, 0, 0, 1, 2, kld, 0, 0, 1, size)
    rows = [row("a", 10, 1e-3), row("b", 5, 1e-2), row("c", 8, 2e-2), row("d", 20, 1e-3), row("e", 10, 2e-3)]
    assert [each.format for each in frontier(rows)] == ["b", "a"]
