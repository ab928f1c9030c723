"""bench/hf_step.py compares like with like: every cache predicts what PyTorch's does."""

import pathlib
import sys
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    sys.path.insert(0, str(ROOT / "bench"))
    import hf_step

    model = hf_step.load(ROOT / "python/tests/data/tiny-d128", torch.device("cpu"))
    return hf_step.measure(model, 700, 2, time.perf_counter)


@pytest.mark.parametrize(
    "name, bound",
    [
        ("sdpa, StaticCache", 3e-5),
        ("eager, DynamicCache", 3e-5),
        ("gyre, f32", 3e-5),
        ("gyre, f16", 1e-2),
        ("gyre, tq8", 0.3),
    ],
)
def test_the_rows_of_hf_step_agree(rows, name, bound):
    assert rows[name]["median_ms"] > 0
    assert rows[name]["logits_differ"] <= bound
