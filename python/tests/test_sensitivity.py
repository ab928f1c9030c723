"""What gradients predict a cache costs, against what it costs."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import BYTE_START, TEXT, load, random_model, random_tokens, stored_model

from gyre.calibrate.budget import BITS
from gyre.calibrate.run import calibrate
from gyre.calibrate.sensitivity import SINK_TOKENS, TEXTS, TOKENS, pieces, sensitivities
from gyre.eval import Setting, evaluate

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few")


def ids(begin: int, count: int) -> torch.Tensor:
    return torch.tensor([BYTE_START, *TEXT.read_bytes()[begin : begin + count]])


@pytest.fixture(scope="module")
def tiny():
    model = load(stored_model("tiny-d128"), "gyre")
    text = ids(8192, 2048)
    return model, calibrate(model, [text], 1024, progress=False), text


def test_the_prediction_holds(tiny):
    model, calibration, text = tiny
    costs = sensitivities(model, pieces([text]), calibration, progress=False)
    assert model.config._attn_implementation == "gyre" and all(p.requires_grad for p in model.parameters())
    settings = [Setting(name, name, sink_tokens=SINK_TOKENS, calibration=calibration) for name in ("tq3", "tq4", "tq5")]
    rows = evaluate(model, [ids(0, 512), ids(4096, 512)], settings, progress=False, step=256)
    for setting, row in zip(settings, rows):
        predicted = sum(k + v for k, v in costs[setting.k])
        assert 0.7 < predicted / row.kld_mean < 1.4, (setting.k, predicted, row.kld_mean)


def test_more_bits_cost_less_in_every_part(tiny):
    model, calibration, text = tiny
    costs = sensitivities(model, pieces([text])[:1], calibration, progress=False)
    assert set(costs) == set(BITS) and all(len(pairs) == 4 for pairs in costs.values())
    for layer in range(4):
        for side in (0, 1):
            falling = [costs[name][layer][side] for name in ("tq2", "tq4", "tq6", "tq8")]
            assert falling == sorted(falling, reverse=True) and falling[-1] > 0


@pytest.mark.parametrize("name", ["gemma2-caps-window-9", "gemma3-window-5", "gpt-oss-sinks-window-6", "gemma4-shared-window-9"])
def test_other_models_have_gradients(name):
    model = random_model(name, "eager")
    text = random_tokens(120)[0]
    calibration = calibrate(model, [text], 256, progress=False)
    costs = sensitivities(model, [text], calibration, progress=False)
    assert len(costs["tq4"]) == len(calibration.layers) and all(one > 0 for pair in costs["tq4"] for one in pair)


def test_pieces_start_as_texts_do():
    text = torch.arange(1000, 1000 + 3 * TOKENS)
    found = pieces([text, torch.arange(50)])
    assert len(found) == TEXTS == 4 and all(len(each) <= TOKENS for each in found)
    assert all(each[0] in (1000, 0) for each in found) and found[0].tolist() == text[:TOKENS].tolist()
    assert [len(each) for each in pieces([torch.arange(20)])] == [20]
