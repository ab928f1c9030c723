"""python -m gyre.eval."""

import json
import math
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import TEXT, load, random_model, stored_model

import gyre
from gyre import eval as gyre_eval
from gyre.eval.__main__ import main
from gyre.eval.chart import place_labels
from gyre.eval.run import decoding_bytes
from gyre.eval.statistics import Statistics


def run(*options: str) -> int:
    return main([str(stored_model("tiny-d128")), str(TEXT), *options])


def test_json_and_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    chart = tmp_path / "chart.png"
    assert (
        run(
            "--formats",
            "f16",
            "tq8",
            "tq8/tq4",
            "--context",
            "40",
            "--windows",
            "2",
            "--tail",
            "32",
            "--json",
            "--plot",
            str(chart),
        )
        == 0
    )
    done = capsys.readouterr()
    assert "400/400" in done.err  # the progress bar
    about = json.loads(done.out)
    assert (about["unit"], about["windows"], about["positions"]) == ("byte", 2, 80)
    assert [row["label"] for row in about["rows"]] == [
        "f16",
        "tq8",
        "tq8, sink 1, tail 32",
        "tq8/tq4",
        "tq8/tq4, sink 1, tail 32",
    ]
    for row in about["rows"][1:]:
        for name in ("kld_mean", "kld_999", "same_top1"):
            low, high = row[f"{name}_95"]
            assert low <= row[name] <= high
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_a_table():
    command = [
        sys.executable,
        "-m",
        "gyre.eval",
        stored_model("tiny-d128"),
        TEXT,
        "--formats",
        "tq8/tq4",
        "--context",
        "40",
        "--tail",
        "16",
        "--threads",
        "1",
        "--quiet",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 x 40 bytes" in done.stdout and "40 positions" in done.stdout and done.stdout.count("| tq8/tq4 |") == 2
    assert "token/s" not in done.stderr


def test_numbers_are_those_of_a_plain_calculation():
    path = stored_model("tiny-d128")
    (text,), unit = gyre_eval.read_windows(str(path), TEXT.read_bytes(), 200, 1)
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


def test_steps_see_the_tail_that_single_tokens_see():
    path = stored_model("tiny-d128")
    (text,), _ = gyre_eval.read_windows(str(path), TEXT.read_bytes(), 300, 1)
    wanted = [gyre_eval.Setting("tq8", "tq4", 64)]
    model = load(path, "gyre")
    (singly,), (at_once,), (in_steps,) = (
        gyre_eval.evaluate(model, [text], wanted, progress=False, step=step) for step in (1, 300, 128)
    )
    # CPUs with AMX multiply the tail's rows in bf16 where a step has many tokens.
    assert abs(in_steps.bits - singly.bits) < 4e-4 and abs(at_once.bits - singly.bits) < 4e-4
    assert at_once.kld_mean < 1.1 * singly.kld_mean and in_steps.kld_mean < 1.1 * singly.kld_mean


def test_models_with_a_tokenizer(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = "the cache holds keys and values of a layer".split()
    vocabulary = {word: i for i, word in enumerate(["<s>", "<unk>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>").save_pretrained(tmp_path)
    random_model("gemma3-window-5", "eager").save_pretrained(tmp_path)
    text = tmp_path / "text"
    text.write_text(" ".join(words * 4))
    (ids,), unit = gyre_eval.read_windows(str(tmp_path), text.read_bytes(), 20, 1)
    assert unit == "token" and ids[:4].tolist() == [0, 2, 3, 4]
    assert (
        main([str(tmp_path), str(text), "--context", "20", "--formats", "tq4", "--tail", "0", "--sink-tokens", "0", "--quiet"]) == 0
    )
    assert "| perplexity |" in (out := capsys.readouterr().out) and "1 x 20 tokens" in out and "| tq4 | 0 | 0 |" in out
    with pytest.raises(gyre.Error, match="not UTF-8"):
        gyre_eval.read_windows(str(tmp_path), b"\xff", 1, 1)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(gyre.Error, match="no token that starts or ends"):
        gyre_eval.read_windows(str(tmp_path), b"the cache", 1, 1)


def refused(capsys, message: str, *options: str) -> None:
    """Before anything is decoded: no bar was drawn."""
    assert run(*options) == 1
    done = capsys.readouterr()
    assert message in done.err and "token/s" not in done.err and done.out == ""


@pytest.mark.parametrize(
    "options, message",
    [
        (["--context", "16385"], "made for 16384 positions, a context of 16385 is more"),
        (["--context", "9000", "--windows", "2"], "need 18000 bytes"),
        (["--formats", "tq9"], "tq9"),
        (["--formats", "tq8/"], 'no format is called ""'),
        (["--device", "abacus"], "no device abacus"),
        (["--formats", "tq4", "--relative-to", "fp8"], "--relative-to must be one of tq4; got fp8"),
        (["--formats", "f16", "tq4", "--relative-to", "f16"], "--relative-to must be one of tq4; got f16"),
    ],
)
def test_refusals(options, message, capsys):
    refused(capsys, message, *options)


def test_json_has_no_column_for_relative_to(capsys):
    with pytest.raises(SystemExit):
        run("--formats", "tq4", "fp8", "--relative-to", "fp8", "--json")
    assert "--relative-to adds a column to the table" in capsys.readouterr().err


def test_charts_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    refused(capsys, "no folder", "--plot", str(tmp_path / "none" / "chart.png"))
    refused(capsys, "must end in one of", "--plot", str(tmp_path / "chart.abc"))


@pytest.mark.parametrize(
    "option, value", [("context", 0), ("context", -1), ("windows", 0), ("tail", -1), ("sink-tokens", -1), ("threads", -1), ("step", 0)]
)
def test_numbers_out_of_range(option, value, capsys):
    with pytest.raises(SystemExit):
        run(f"--{option}", str(value))
    assert f"argument --{option}: must be at least" in capsys.readouterr().err


def test_a_model_must_be_a_folder(tmp_path, capsys):
    assert main([str(tmp_path / "none"), str(TEXT)]) == 1
    assert "the model must be a folder" in capsys.readouterr().err
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main([str(tmp_path), str(TEXT)]) == 1
    assert "is no folder of a Hugging Face model" in capsys.readouterr().err


def test_a_chart_without_points_brings_no_warning(tmp_path, recwarn):
    pytest.importorskip("matplotlib")
    gyre_eval.plot([gyre_eval.Row("f16", 0, 0, 1, 2, 0, 0, 0, 1, 4096)], "f16", str(tmp_path / "chart.png"))
    assert [str(one.message) for one in recwarn] == []


def test_a_format_named_twice_is_one_row():
    assert [setting.name for setting in gyre_eval.settings(["tq8", "tq8/tq8", "f16", "f16"])] == ["tq8", "f16"]


def test_windows_of_several_texts_in_batches(tmp_path, capsys):
    other = tmp_path / "other"
    other.write_bytes(TEXT.read_bytes()[9000:])
    options = ["--formats", "tq4", "fp8", "--context", "60", "--windows", "2", "--step", "20", "--tail", "16", "--json", "--quiet"]
    found = []
    for batch in ("1", "3"):
        assert main([str(stored_model("tiny-d128")), str(TEXT), str(other), *options, "--batch", batch]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["windows"] == 4 and found[0]["text"] == "eval.txt, other"
    for one, several in zip(*(each["rows"] for each in found)):
        assert several["kld_mean"] == pytest.approx(one["kld_mean"], rel=0.05) and several["label"] == one["label"]
        assert several["bytes_per_token"] == one["bytes_per_token"]


def test_intervals_and_ratios():
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(64 * 40, 7, generator=generator).log_softmax(-1)
    near, far = (Statistics() for _ in range(2))
    for statistics, size in ((near, 0.1), (far, 0.2)):
        noise = size * torch.randn(reference.shape, generator=torch.Generator().manual_seed(2))
        statistics.add((reference + noise).log_softmax(-1), reference, torch.zeros(len(reference), dtype=torch.long))
    near, far = (each.row(gyre_eval.Setting("tq4", "tq4"), 100.0) for each in (near, far))
    assert near.kld_mean_95[0] < near.kld_mean < near.kld_mean_95[1] < far.kld_mean_95[0]
    assert near.kld_mean_95[1] - near.kld_mean_95[0] < 0.2 * near.kld_mean
    value, (low, high) = gyre_eval.ratio(far, near)
    assert low < value < high and 3.5 < value < 4.5 and high - low < 0.5  # the same noise: narrower than either
    lines = gyre_eval.table([near, far], "byte", near).splitlines()
    assert len({line.count("|") for line in lines}) == 1 and "| / tq4 |" in lines[0]
    assert "| 1 [1, 1] |" in lines[2] and f"| {value:.2g} [{low:.2g}, {high:.2g}] |" in lines[3]


def test_bytes_are_those_of_a_cache_that_decodes():
    config = load(stored_model("tiny-d128"), "gyre").config
    tail = decoding_bytes(config, gyre_eval.Setting("tq4", "tq4", 128, 1), 4096)
    plain = decoding_bytes(config, gyre_eval.Setting("tq4", "tq4"), 4096)
    assert 1.0 < (tail - plain) * 4096 / (129 * 4 * 2 * 2 * 256) < 1.1  # 16-bit rows of 4 layers, 2 heads, K and V


def test_labels_cover_neither_points_nor_each_other(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(10, 7))
    rows = [gyre_eval.Row(f"tq{i}, calibrated", 0, 0, 1, 2, 10.0 ** -(3 + i % 3 / 10), 0, 0, 1, 4000 + 10 * i) for i in range(12)]
    axes.set(xscale="log", yscale="log")
    axes.plot([row.bytes_per_token for row in rows], [row.kld_mean for row in rows], "o")
    axes.margins(0.3)
    figure.canvas.draw()
    boxes = place_labels(axes, rows)
    assert len(boxes) == 12
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    points = [axes.transData.transform((row.bytes_per_token, row.kld_mean)) for row in rows]
    assert not any(box.contains(*point) for box in boxes for point in points)
    gyre_eval.plot(rows, "twelve", str(tmp_path / "chart.svg"))
    assert "<svg" in (tmp_path / "chart.svg").read_text()
