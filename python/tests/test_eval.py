"""python -m gyre.eval."""

import json
import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import TEXT, load, stored_model

from gyre import eval as gyre_eval


def run(*options: str) -> subprocess.CompletedProcess:
    model = str(stored_model("tiny-d128"))
    return subprocess.run([sys.executable, "-m", "gyre.eval", model, str(TEXT), *options], capture_output=True, text=True)


def test_json_table_and_chart(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    chart = tmp_path / "chart.png"
    options = ["--formats", "f16", "tq8", "tq8/tq4", "--context", "100", "--windows", "2", "--tail", "32", "--threads", "1"]
    done = run(*options, "--json", "--plot", str(chart))
    assert done.returncode == 0, done.stderr
    assert "1000/1000" in done.stderr  # the progress bar
    about = json.loads(done.stdout)
    assert (about["unit"], about["windows"], about["positions"]) == ("byte", 2, 200)
    assert [(row["format"], row["tail"]) for row in about["rows"]] == [
        ("f16", 0), ("tq8", 0), ("tq8", 32), ("tq8/tq4", 0), ("tq8/tq4", 32)]
    assert chart.read_bytes().startswith(b"\x89PNG") and matplotlib.__version__
    done = run(*options, "--quiet")
    assert "2 x 100 bytes" in done.stdout and "200 positions" in done.stdout and done.stdout.count("tq8/tq4") == 2
    assert "step/s" not in done.stderr


def test_numbers_are_those_of_a_plain_calculation():
    path = stored_model("tiny-d128")
    (text,), unit = gyre_eval.read_windows(str(path), TEXT.read_bytes(), 300, 1)
    assert unit == "byte" and text[:3].tolist() == [256, *TEXT.read_bytes()[:2]]
    wanted = gyre_eval.settings(["tq8", "tq2", "f16"], tail=40)
    assert [(s.name, s.tail) for s in wanted] == [("tq8", 0), ("tq8", 40), ("tq2", 0), ("tq2", 40), ("f16", 0)]
    tq8, tq8_tail, tq2, tq2_tail, f16 = gyre_eval.evaluate(load(path, "gyre"), [text], wanted, progress=False)
    with torch.no_grad():
        logits = load(path, "sdpa")(text[None, :-1]).logits[0]
    bits = torch.nn.functional.cross_entropy(logits, text[1:]).item() / math.log(2)
    assert abs(f16.bits - bits) < 1e-3 and abs(tq8.bits - bits) < 1e-2
    assert (f16.kld_mean, f16.kld_max, f16.same_top1) == (0, 0, 1)
    assert 0 < tq8.kld_mean < 1e-4 < tq2_tail.kld_mean < tq2.kld_mean
    assert tq8.kld_mean <= tq8.kld_999 <= tq8.kld_max and tq8.same_top1 > 0.98 > tq2.same_top1
    # 4 layers, 2 KV heads, K and V, 128 coordinates and a 16-bit scale each.
    assert 4 * 2 * 2 * 256 <= f16.bytes_per_token < 1.01 * 4 * 2 * 2 * 256
    assert 4 * 2 * 2 * 130 <= tq8.bytes_per_token < 1.05 * 4 * 2 * 2 * 130 < tq8_tail.bytes_per_token


@pytest.mark.parametrize("options, message", [
    (["--context", "20000"], "need 20000 bytes"), (["--formats", "tq9", "--context", "4"], "tq9")])
def test_refusals(options, message):
    done = run(*options)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
