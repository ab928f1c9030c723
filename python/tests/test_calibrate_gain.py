"""What calibrations are worth on rows of a real model that they have not seen, and what they are worth when they are made badly."""

import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import BYTE_START, TEXT, load, stored_model
from feedback_reference import restored

from gyre.calibrate.run import GAINS, calibrate

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few")

SOURCE = pathlib.Path(__file__).parent / "test_ops.py"  # text of another kind
HELD_OUT = TEXT.read_bytes()[:512]
UNSEEN = TEXT.read_bytes()[8192:10240]


def ids(text: bytes) -> torch.Tensor:
    return torch.tensor([BYTE_START, *text])


@pytest.fixture(scope="module")
def model():
    return load(stored_model("tiny-d128"), "sdpa")


@pytest.fixture(scope="module")
def rows(model):
    """Queries, keys and values of the last layer for text that no calibration sees, from position 3584 on."""
    seen = {}

    def see(module, query, key, value, mask, **how):
        seen[module.layer_idx] = query, key, value
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, **how)

    transformers.AttentionInterface.register("gyre_test_rows", see)
    masks = transformers.masking_utils.AttentionMaskInterface
    masks.register("gyre_test_rows", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("gyre_test_rows")
    with torch.no_grad():
        model(ids(HELD_OUT)[None], position_ids=torch.arange(3584, 4097)[None])
    model.set_attn_implementation("sdpa")
    return seen[3]


def made(model, text: bytes, capacity: int = 4096, **options):
    return calibrate(model, [ids(text)], capacity, progress=False, **options)


def errors(model, rows, calibration, name="tq4") -> tuple[float, float]:
    """Mean squared errors of scores (K) and of the output projection (V) in the last layer."""
    q, k, v = (x[0, :, 16:] for x in rows)
    out = model.model.layers[3].self_attn.o_proj.weight.unflatten(1, (8, 128))
    k_error = v_error = 0.0
    for head in range(2):
        parts = (None, None) if calibration is None else calibration.layers[3]
        gains = (1.0,) if calibration is None else GAINS
        k_off = restored(name, k[head], parts[0], head, True, gains) - k[head]
        v_off = restored(name, v[head], parts[1], head, False, gains) - v[head]
        scores = torch.einsum("gtd,nd->gtn", q[4 * head : 4 * head + 4], k_off)
        scores = scores - scores.mean(-1, keepdim=True)  # softmax does not see what all keys have in common
        k_error += scores.square().mean().item()
        v_error += torch.einsum("ogd,nd->ogn", out[:, 4 * head : 4 * head + 4], v_off).square().mean().item()
    return k_error, v_error


def ratios(model, rows, calibration, name="tq4") -> tuple[float, float]:
    with torch.no_grad():
        (k, v), (k_plain, v_plain) = (errors(model, rows, which, name) for which in (calibration, None))
    return k / k_plain, v / v_plain


@pytest.fixture(scope="module")
def good(model):
    return made(model, UNSEEN)


@pytest.mark.parametrize("name", ["tq2", "tq3", "tq4", "tq5"])
def test_a_calibration_pays_at_every_size(model, rows, good, name):
    k, v = ratios(model, rows, good, name)
    assert k < 0.7 and v < 0.4


def test_feedback_alone_pays_less(model, rows):
    k, v = ratios(model, rows, made(model, UNSEEN, transform=False))
    assert k < 0.85 and v < 0.5


def test_weights_alone_pay_less(model, rows):
    k, v = ratios(model, rows, calibrate(model, None, 0))
    assert k < 0.9 and v < 0.4


def test_text_of_another_kind_will_do(model, rows):
    k, v = ratios(model, rows, made(model, SOURCE.read_bytes()[:2048]))
    assert k < 0.7 and v < 0.4


def test_512_tokens_will_do(model, rows):
    k, v = ratios(model, rows, made(model, UNSEEN[:512]))
    assert k < 0.7 and v < 0.4


def test_keys_beyond_the_range_lose_it_all(model, rows, good):
    """Why a capacity beyond the range is warned about: these keys are at positions 3584 to 4096."""
    k, v = ratios(model, rows, made(model, UNSEEN, 1024))
    right_k, right_v = ratios(model, rows, good)
    assert k > 1.5 * right_k and v == pytest.approx(right_v)
