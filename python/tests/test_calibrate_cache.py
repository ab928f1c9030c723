"""GyreCache(calibration=...): what is stored is what the reference stores, and it pays."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import TEXT, load, random_model, random_tokens, stored_model
from feedback_reference import restored

import gyre
from gyre import eval as gyre_eval
from gyre.calibrate import Budget, CalibrationWarning
from gyre.calibrate.run import calibrate
from gyre.integrations.transformers import GyreCache

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few")


def attended(q, k, v, scale):
    scores = scale * torch.einsum("gtd,nd->gtn", q, k)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("gtn,nd->gtd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("kind", ["R", "Q", "F"])
@pytest.mark.parametrize("formats", [("tq4", "tq3"), ("tq2", "tq4"), ("tq5", "tq6")])
def test_attention_is_over_the_rows_of_the_reference(kind, formats):
    model = random_model("qwen3", "eager")
    texts = None if kind == "Q" else [random_tokens(300)[0]]
    calibration = calibrate(model, texts, 512, transform=kind != "F", progress=False)
    cache = GyreCache(model.config, *formats, tail=0, sink_tokens=0, calibration=calibration, capacity=64)
    q, k, v = (torch.randn(1, heads, 40, 32, generator=torch.Generator().manual_seed(9)) for heads in (6, 2, 2))
    layer = cache.layers[2]
    out = layer.attend(layer.update(k, v)[0], q, None, scale=0.2)[0]
    for head in range(2):
        parts = [part for part in calibration.layers[2]]
        rows = [
            restored(name, x[0, head], part, head, x is k, calibration.gains) for name, x, part in zip(formats, (k, v), parts)
        ]
        expected = attended(q[0, 3 * head : 3 * head + 3], *rows, 0.2)
        # A code at a tie of two levels may be the other one.
        assert (out[:, 3 * head : 3 * head + 3].transpose(0, 1) - expected).norm() < 0.02 * expected.norm()


@pytest.fixture(scope="module")
def tiny():
    model = load(stored_model("tiny-d128"), "gyre")
    text = torch.tensor([256, *TEXT.read_bytes()[8192 : 8192 + 2048]])
    return model, calibrate(model, [text], 1024, progress=False)


@pytest.mark.parametrize("step", [1, 128])
def test_a_calibration_pays_in_prompts_and_in_decoding(tiny, step):
    model, calibration = tiny
    (text,), _ = gyre_eval.read_windows(str(stored_model("tiny-d128")), TEXT.read_bytes(), 384, 1)
    wanted = gyre_eval.settings(["tq4"], 64, 0, [calibration])
    assert [(s.name, s.tail, s.kind) for s in wanted] == [
        ("tq4", 0, "formats"),
        ("tq4, R", 0, "calibrated"),
        ("tq4", 64, "formats"),
        ("tq4, R", 64, "calibrated"),
    ]
    plain, better, tail, better_tail = gyre_eval.evaluate(model, [text], wanted, progress=False, step=step)
    assert better.kld_mean < 0.6 * plain.kld_mean and better_tail.kld_mean < 0.8 * tail.kld_mean
    assert better.bytes_per_token == plain.bytes_per_token


def test_a_batch_in_pages_gives_what_one_sequence_gives(tiny):
    """Both get the same rows: a model's matrix products depend on the size of the batch, and codes amplify that."""
    model, calibration = tiny
    config, random = model.config, torch.Generator().manual_seed(9)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    rows = [torch.randn(2, count, 40, 128, generator=random) for count in heads]

    def through_a_layer(q, k, v):
        layer = GyreCache(config, "tq4", "tq4", tail=0, sink_tokens=0, capacity=128, calibration=calibration).layers[1]
        return layer.attend(layer.update(k, v)[0], q, None, scale=0.1)

    each = torch.cat([through_a_layer(*(x[i : i + 1] for x in rows)) for i in range(2)])
    torch.testing.assert_close(through_a_layer(*rows), each, atol=1e-5, rtol=1e-5)


def test_files_name_their_calibration(tiny, tmp_path):
    model, calibration = tiny
    ids = torch.tensor([[256, *TEXT.read_bytes()[:40]]])
    make = lambda which: GyreCache(model.config, "tq4", "tq4", tail=0, sink_tokens=0, capacity=64, calibration=which)
    cache = make(calibration)
    with torch.inference_mode():
        model(ids, past_key_values=cache, use_cache=True)
    assert all(info.calibration for info in cache.describe())
    cache.save(tmp_path / "a", ids)
    again = make(calibration)
    again.load(tmp_path / "a", ids)
    assert again.get_seq_length() == 40
    other = copy.deepcopy(calibration)
    other.layers[1][0].mean[0, 0] += 0.5
    for which in (other, None):
        with pytest.raises(gyre.Error, match="calibration"):
            make(which).load(tmp_path / "a", ids)


def test_an_inverse_that_is_none_is_refused(tiny):
    model, calibration = tiny
    wrong = copy.deepcopy(calibration)
    wrong.layers[1][0].inverse[1, 3, 4] += 0.1
    cache = GyreCache(model.config, "tq4", "tq4", tail=0, sink_tokens=0, capacity=64, calibration=wrong)
    with pytest.raises(gyre.InvalidArgument, match="inverse times matrix of k, head 1"), torch.inference_mode():
        model(torch.tensor([[256, 65]]), past_key_values=cache, use_cache=True)


def test_formats_of_a_budget(tiny):
    model, calibration = tiny
    calibration = copy.copy(calibration)
    calibration.budgets = [Budget(4.125, "coordinate", ["tq3", "tq4", "tq5", "tq5"], ["tq3", "tq4", "tq4", "tq4"], 4.125, 0)]
    cache = GyreCache(model.config, calibration=calibration, budget=4.125, capacity=64)
    assert [layer.stored.k for layer in cache.layers] == calibration.budgets[0].k
    assert [layer.stored.v for layer in cache.layers] == calibration.budgets[0].v
    labels = [setting.name for setting in gyre_eval.settings([], 0, 0, [calibration])]
    assert labels == ["4.125 bits by coordinate", "4.125 bits by coordinate, R"]


def test_calibrations_of_one_recipe_are_rows_of_their_own(tiny):
    model, calibration = tiny
    calibration, other = copy.copy(calibration), copy.deepcopy(calibration)
    formats = ["tq2"] * 4, ["tq2"] * 4
    other.layers[3][0].factor.zero_()
    calibration.budgets = other.budgets = [Budget(2.125, "coordinate", *formats, 2.125, 0)]
    wanted = gyre_eval.settings(["tq4"], 0, 0, [calibration, other])
    mixed = "2.125 bits by coordinate"
    names = ["tq4", "tq4, R", "tq4, R2", mixed, f"{mixed}, R", f"{mixed} of R2", f"{mixed} of R2, R2"]
    assert [setting.name for setting in wanted] == names
    assert [setting.calibration for setting in wanted[1:3]] == [calibration, other]
    text = torch.tensor([256, *TEXT.read_bytes()[:60]])
    _, first, second, *_ = gyre_eval.evaluate(model, [text], wanted[:3], progress=False, step=60)
    assert first.kld_mean != second.kld_mean


@pytest.mark.parametrize("name", ["gemma2-caps-window-9", "gpt-oss-sinks-window-6"])
def test_models_whose_attention_goes_with_no_mean(name):
    model = random_model(name, "gyre")
    calibration = calibrate(model, [random_tokens(300)[0]], 512, progress=False)
    for k, v in calibration.layers:
        assert k.mean is None and (v.mean is None) == name.startswith("gpt-oss")
    ids = random_tokens(80)
    with torch.inference_mode():
        made = lambda name, which: GyreCache(model.config, name, name, tail=0, sink_tokens=0, capacity=128, calibration=which)
        exact, plain, calibrated = (
            model(ids, past_key_values=made(*each), use_cache=True).logits
            for each in (("f16", None), ("tq8", None), ("tq8", calibration))
        )
    assert (calibrated - exact).norm() < 1.2 * (plain - exact).norm()


@pytest.mark.parametrize(
    "message, options",
    [
        ("a budget of 4 bits needs a calibration", dict(calibration=None, budget=4)),
        ("formats are given, and a budget", dict(k="tq4", budget=4)),
        ("no formats for 4 bits, there are for none", dict(budget=4)),
        ("compressed both or neither, layer 0", dict(k="tq4", v="f16")),
        ("no layer is compressed", dict(k="f16", v="f16")),
        ("more than 4 times", dict(capacity=4097)),
    ],
)
def test_refusals(tiny, message, options):
    with pytest.raises(gyre.InvalidArgument, match=message):
        GyreCache(tiny[0].config, **{"calibration": tiny[1], **options})


def test_the_calibration_of_another_model_is_refused(tiny):
    with pytest.raises(gyre.InvalidArgument, match="whose config differs from that of this llama model"):
        GyreCache(random_model("llama", "eager").config, calibration=tiny[1])


def test_ranges(tiny):
    model, calibration = tiny
    with pytest.warns(CalibrationWarning, match="below 1024, the cache has room for 2000"):
        GyreCache(model.config, calibration=calibration, capacity=2000)
    short = copy.copy(calibration)
    short.capacity = 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = GyreCache(model.config, calibration=short)  # grows: nothing is wrong yet
        assert cache.get_max_length() == 80
        with torch.inference_mode():
            model(torch.tensor([[256] * 20]), past_key_values=cache, use_cache=True)
    with pytest.warns(CalibrationWarning, match="below 20"), torch.inference_mode():
        model(torch.tensor([[65]]), past_key_values=cache, use_cache=True)
