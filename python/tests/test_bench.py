"""bench/hf_step.py compares like with like: every cache predicts what PyTorch's does."""

import importlib.util
import pathlib
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    spec = importlib.util.spec_from_file_location("hf_step", ROOT / "bench/hf_step.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.measure(script.load(ROOT / "python/tests/data/tiny-d128"), 700, 2, time.perf_counter)


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
