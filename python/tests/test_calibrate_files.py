""".gyrecal files, bits per layer, and python -m gyre.calibrate."""

import dataclasses
import itertools
import json
import os
import random
import stat
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")
safetensors_torch = pytest.importorskip("safetensors.torch")

import safetensors
from hf_models import TEXT, random_model, random_tokens, stored_model

import gyre
from gyre.calibrate import Budget, Calibration, CalibrationWarning, __main__
from gyre.calibrate import file as calibrate_file
from gyre.calibrate.budget import BITS, WORTH_A_LIST, best, scale_bits, uniform_formats
from gyre.calibrate.run import calibrate

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few")


@pytest.fixture(scope="module")
def made():
    model = random_model("qwen3", "eager")
    calibration = calibrate(model, [random_tokens(120)[0]], 256, name="random", progress=False)
    calibration.sensitivities, calibration.sensitivity_format = [(1e-3, 2e-3)] * 4, "tq3"
    calibration.budgets = [Budget(4.5, "coordinate", ["tq4"] * 4, ["tq3"] * 4, 4.25, 1e-3)]
    return model, calibration


def test_a_file_gives_back_what_was_saved(made, tmp_path):
    _, calibration = made
    for name in ("a", "b"):
        calibration.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    again = Calibration.load(tmp_path / "a")
    for one, other in zip(calibration.layers, again.layers):
        for a, b in zip(one, other):
            assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))
    said = lambda x: json.dumps({**dataclasses.asdict(x), "layers": len(x.layers)})
    assert said(again) == said(calibration)
    assert (again.dims, again.budget(4.5).k) == ([(2, 32, 32)] * 4, ["tq4"] * 4)
    with pytest.raises(gyre.InvalidArgument, match="no formats for 3 bits, there are for 4.5 by coordinate"):
        again.budget(3)


def test_the_names_and_shapes_in_a_file(made, tmp_path):
    made[1].save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
        assert list(file.metadata()) == ["gyrecal"]
    square, row = [2, 32, 32], [2, 32]
    parts = dict(basis=square, inverse=square, mean=row, factor=square, diagonal=row)
    assert shapes == {f"layers.{i}.{role}.{name}": parts[name] for i in range(4) for role in "kv" for name in parts}


def damaged(made, tmp_path, change):
    made[1].save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())
    change(tensors, metadata)
    reseal(tensors, metadata)
    safetensors_torch.save_file(tensors, tmp_path / "b", metadata)
    Calibration.load(tmp_path / "b")


def reseal(tensors, metadata):
    """The checksum of what a test has changed: what it refuses then is something else."""
    try:
        said = json.loads(metadata.get("gyrecal", "{"))
    except (ValueError, RecursionError):
        return
    if said.pop("checksum", None) is not None:
        metadata["gyrecal"] = json.dumps({**said, "checksum": calibrate_file._checksum(said, tensors)})


def about(**changes):
    return lambda tensors, metadata: metadata.update(gyrecal=json.dumps({**json.loads(metadata["gyrecal"]), **changes}))


def value(name, index, number):
    return lambda tensors, metadata: tensors[f"layers.1.k.{name}"].__setitem__(index, number)


def whole(name, matrix):
    return lambda tensors, metadata: tensors[f"layers.1.k.{name}"].copy_(matrix)


def rolled(tensors, metadata):
    """A basis and its inverse, but not what keys and queries could both be turned into."""
    whole("basis", torch.eye(32).roll(1, 0))(tensors, metadata)
    whole("inverse", torch.eye(32).roll(-1, 0))(tensors, metadata)


def stretched(tensors, metadata):
    """Rows that one coordinate fills: the others come back with its error."""
    scales = torch.ones(32)
    scales[0] = 100.0
    whole("basis", scales.diag())(tensors, metadata)
    whole("inverse", (1 / scales).diag())(tensors, metadata)


def about_budget(**changes):
    def change(tensors, metadata):
        (budget,) = json.loads(metadata["gyrecal"])["budgets"]
        about(budgets=[{**budget, **changes}])(tensors, metadata)

    return change


@pytest.mark.parametrize(
    "message, change",
    [
        ("no file that gyre.calibrate wrote", lambda tensors, metadata: metadata.pop("gyrecal")),
        ("of version 4", about(version=4)),
        ("description cannot be read", about(version=3)),
        ("description cannot be read", about(dims=[[2, 32, 32]] * 4)),
        ("description cannot be read", about(version="3" * 100000)),
        ("of version 1, which has no checksum: make it again", about(version=1)),
        ("description cannot be read", lambda tensors, metadata: metadata.update(gyrecal="[" * 100000)),
        ("description cannot be read", about(sensitivities=[[1e-3, float("nan")]] * 4)),
        ("description cannot be read", about_budget(predicted=float("inf"))),
        ("description cannot be read", about_budget(bits=10**400)),
        ("description cannot be read", about_budget(bits=True)),
        ("description cannot be read", about(tokens=10**400)),
        ("description cannot be read", lambda tensors, metadata: metadata.update(gyrecal="{")),
        ("description cannot be read", about(head_dim=0)),
        ("description cannot be read", about(gains=[])),
        ("description cannot be read", about(capacity=-1)),
        ("description cannot be read", about(extra=1)),
        ("description cannot be read", about(budgets=[{"bits": 4}])),
        ("description cannot be read", about_budget(bits="4.5")),
        ("description cannot be read", about_budget(by="layer")),
        ("description cannot be read", about_budget(k=["tq4"] * 3)),
        ("description cannot be read", about_budget(v="tq4")),
        ("description cannot be read", about_budget(v=["tq4", "tq4", "tq4", "f16"])),
        ("description cannot be read", about(sensitivities=[[1e-3, 2e-3]] * 3)),
        ("description cannot be read", about(sensitivities=[[1e-3]] * 4)),
        ("description cannot be read", about(sensitivities=[1e-3] * 4)),
        ("description cannot be read", about(gains=[0.2])),
        ("description cannot be read", about(gains=[1.0] * 9)),
        ("description cannot be read", about(model=5)),
        ("there is no layers.4.k.factor", about(layers=5, sensitivities=[], budgets=[])),
        ("other tensors: layers.3.k.basis", about(layers=3, sensitivities=[], budgets=[])),
        (r"layers.0.k.basis must be finite f32 \[2, 16, 16\]", about(head_dim=16)),
        ("there is no layers.2.v.inverse", lambda tensors, metadata: tensors.pop("layers.2.v.inverse")),
        ("there is no layers.2.v.diagonal", lambda tensors, metadata: tensors.pop("layers.2.v.diagonal")),
        ("there is no layers.2.k.basis", lambda tensors, metadata: [tensors.pop(f"layers.2.k.{x}") for x in ("basis", "inverse")]),
        ("must be finite", lambda tensors, metadata: tensors["layers.1.k.mean"].fill_(float("nan"))),
        ("layers.1.k.factor must be from -1000 to 1000, got 10000", value("factor", (0, 1, 2), 1e4)),
        ("layers.1.k.factor must be 0 on and below its diagonal", value("factor", (0, 2, 1), 0.1)),
        ("layers.1.k.factor multiplies the squared error of rows by", whole("factor", torch.full((32, 32), 3.0).triu(1))),
        ("layers.1.k.factor multiplies the squared error of rows by", value("factor", (1, 2, 9), 100.0)),
        ("layers.1.k.basis must be symmetric", rolled),
        ("layers.1.k.basis multiplies the squared error of rows by", stretched),
        ("layers.1.k.diagonal must be above 0", value("diagonal", (1, 3), 0.0)),
        ("layers.1.k.mean must be from -65504 to 65504", value("mean", (1, 3), 1e6)),
        ("layers.1.k.inverse times basis is .* from the identity", value("basis", (1, 3, 3), 5.0)),
        ("must be finite", lambda tensors, metadata: tensors.update({"layers.1.k.mean": torch.zeros(2, 32).half()})),
    ],
)
def test_damaged_files_are_refused(made, tmp_path, message, change):
    damaged(made, tmp_path, lambda tensors, metadata: None)  # nothing is wrong with the way there
    with pytest.raises(gyre.IoError, match=message) as refused:
        damaged(made, tmp_path, change)
    assert str(refused.value).count("calibration: ") == 1


def test_every_depth_of_a_description_is_refused(made, tmp_path):
    # What can just be read is too deep for the checksum, or for the message that names the version.
    limit = sys.getrecursionlimit()
    made[1].save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        whole = file.metadata()["gyrecal"][:-1]
    tensors = {"x": torch.zeros(1)}
    for key in ("version", "extra"):
        for depth in range(limit - 200, limit + 1):
            text = f'{whole}, "{key}": {"[" * depth}{"]" * depth}}}'
            safetensors_torch.save_file(tensors, tmp_path / "b", {"gyrecal": text})
            with pytest.raises(gyre.IoError, match="calibration: .*b: "):
                Calibration.load(tmp_path / "b")


def test_every_flipped_bit_is_refused(made, tmp_path):
    made[1].save(tmp_path / "a")
    good = (tmp_path / "a").read_bytes()
    generator = random.Random(1)
    for _ in range(200):
        bit = generator.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (tmp_path / "b").write_bytes(bad)
        with pytest.raises(gyre.IoError, match="calibration: .*b: "):
            Calibration.load(tmp_path / "b")


def test_a_file_is_replaced_as_a_snapshot_is(made, tmp_path):
    _, calibration = made
    mode = lambda name: stat.S_IMODE(os.stat(tmp_path / name).st_mode)
    calibration.save(tmp_path / "a")
    assert mode("a") == 0o600
    os.chmod(tmp_path / "a", 0o640)
    os.symlink("a", tmp_path / "link")
    inode = os.stat(tmp_path / "a").st_ino
    calibration.save(tmp_path / "link")
    assert os.path.islink(tmp_path / "link") and mode("a") == 0o640 and os.stat(tmp_path / "a").st_ino != inode
    os.symlink("nowhere", tmp_path / "broken")
    os.mkfifo(tmp_path / "pipe")
    for name in ("broken", "pipe", ".", "folder/"):
        with pytest.raises(gyre.IoError, match="calibrate: "):
            calibration.save(f"{tmp_path}/{name}")
    with pytest.raises(gyre.InvalidArgument, match="the path is empty"):
        calibration.save("")
    assert sorted(os.listdir(tmp_path)) == ["a", "broken", "link", "pipe"]


def test_a_save_that_fails_leaves_the_old_file(made, tmp_path, monkeypatch):
    made[1].save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    for name in ("open", "fsync", "rename"):
        with monkeypatch.context() as patch, pytest.raises(gyre.IoError, match="No space left on device"):
            patch.setattr(os, name, fail)
            made[1].save(tmp_path / "a")
        assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == before


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no safetensors")
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("text", ""), ("none", "No such file"), ("pipe", "is not a regular file"), (".", "is not a regular file")):
        with pytest.raises(gyre.IoError, match=f"{tmp_path.name}.*{name}.*{why}"):
            Calibration.load(tmp_path / name)


@pytest.mark.parametrize("path, message", [("", "the path is empty"), ("a\0b", "the path has a NUL at character 1")])
def test_paths_that_are_none(made, path, message):
    for call in (Calibration.load, made[1].save):
        with pytest.raises(gyre.InvalidArgument, match=message):
            call(path)


def test_another_model_is_refused(made):
    model, calibration = made
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration.check(model.config, 256)
    for name, changes in (("llama", {}), ("qwen3", dict(num_hidden_layers=3)), ("qwen3", dict(head_dim=64))):
        with pytest.raises(gyre.InvalidArgument, match="made for random, whose config differs from that of this"):
            calibration.check(random_model(name, "eager", **changes).config)


def test_a_range_that_is_too_short_is_warned_about_and_far_too_short_refused(made):
    model, calibration = made
    with pytest.warns(CalibrationWarning, match="for positions below 256, the cache has room for 257"):
        calibration.check(model.config, 257)
    with pytest.raises(gyre.InvalidArgument, match="capacity of 1025 is more than 4 times that"):
        calibration.check(model.config, 1025)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(model, None, 0).check(model.config, 1 << 20)  # from weights alone: no range


def cost(budget, stored):
    return sum((BITS[k] + BITS[v]) * count for k, v, count in zip(budget.k, budget.v, stored)) / (2 * sum(stored))


ERRORS = {name: 4.0**-bits for name, bits in BITS.items()}


def costs_of(sensitivities):
    return {name: [(k * error, v * error) for k, v in sensitivities] for name, error in ERRORS.items()}


def dims_of(costs):
    return [(2, 128)] * len(costs["tq4"])


@pytest.mark.parametrize("stored", [None, [4096, 512, 700]])
@pytest.mark.parametrize("bits", [2.125, 3.0, 4.125, 4.9, 8.125, 20])
@pytest.mark.parametrize(
    "dims, scales", [([(2, 128)] * 3, [0.125] * 3), ([(4, 256), (4, 256), (2, 512)], [0.0625] * 3), ([(1, 512), (2, 64), (2, 128)], [0.0625, 0.25, 0.125])]
)
def test_the_search_is_exact(stored, bits, dims, scales):
    costs = costs_of([(1e-3, 3e-4), (8e-3, 2e-3), (5e-4, 4e-3)])
    weights = [heads * dim * tokens for (heads, dim), tokens in zip(dims, stored or [1, 1, 1])]
    extra = sum(weight * scale for weight, scale in zip(weights, scales)) / sum(weights)
    if bits < 2 + extra:
        with pytest.raises(gyre.InvalidArgument, match=f"smallest format takes, {2 + extra:g}"):
            best(costs, dims, bits, stored)
        return
    found = best(costs, dims, bits, stored)
    units = [weight for weight in weights for _ in range(2)]
    predicted = lambda names: sum(costs[name][i // 2][i % 2] for i, name in enumerate(names))
    fitting = lambda names: sum(BITS[name] * unit for name, unit in zip(names, units)) / sum(units) + extra <= bits + 1e-9
    least = min(predicted(names) for names in itertools.product(BITS, repeat=6) if fitting(names))
    alike = min(predicted((k, v) * 3) for k in BITS for v in BITS if fitting((k, v) * 3))
    assert found.predicted == pytest.approx(least if least <= WORTH_A_LIST * alike else alike)
    assert found.is_list == (least <= WORTH_A_LIST * alike)
    assert found.used == pytest.approx(cost(found, weights) + extra) and found.used <= bits + 1e-9
    assert found.by == ("bytes" if stored else "coordinate")


@pytest.mark.parametrize("spread, is_list", [(1.2, False), (30.0, True)])
def test_layers_that_are_alike_get_no_list(spread, is_list):
    costs = costs_of([(1.0, 1.0), (spread, spread)] * 4)
    found = best(costs, dims_of(costs), 4.125)
    assert found.is_list == is_list and ("in all layers" in str(found)) != is_list
    assert uniform_formats(costs, 8) == ("tq4", "tq4") and uniform_formats(costs, 9) in (("tq4", "tq5"), ("tq5", "tq4"))
    if not is_list:
        assert (found.k, found.v, found.used) == (["tq4"] * 8, ["tq4"] * 8, 4.125)


def test_budgets_that_no_format_has_are_refused():
    with pytest.raises(gyre.InvalidArgument, match="2.1 bits is less than the smallest format takes, 2.125"):
        best(costs_of([(1, 1)]), [(1, 128)], 2.1)


def test_bits_of_scales():
    assert [scale_bits(d) for d in (128, 256, 512, 96, 1024)] == [16 / 128, 16 / 256, 32 / 512, 32 / 96, 64 / 1024]


def test_many_layers_are_searched_quickly():
    generator = torch.Generator().manual_seed(1)
    sensitivities = [tuple(pair) for pair in torch.rand(80, 2, generator=generator).tolist()]
    found = best(costs_of(sensitivities), [(2, 256), (1, 512)] * 40, 4.125, [4096, 1000] * 40)
    assert 4.1 < found.used <= 4.125


def run(tmp_path, *options):
    return __main__.main([str(stored_model("tiny-d128")), *map(str, options), "--out", str(tmp_path / "a.gyrecal")])


def test_the_command(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[:600])
    assert run(tmp_path, text, "--capacity", "512", "--budget", "4.125", "3.5", "--threads", "1") == 0
    done = capsys.readouterr()
    assert "moments" in done.err and "sensitivities" in done.err and "4/4" in done.err
    assert "warning: calibrate: 585 tokens are few" in done.err
    made = Calibration.load(tmp_path / "a.gyrecal")
    assert (made.recipe, made.model, made.capacity, made.tokens) == ("R", "tiny-d128", 512, 585)
    assert len(made.sensitivities) == 4 and all(one > 0 for pair in made.sensitivities for one in pair)
    # The last layers' keys cost most, and get most.
    assert made.sensitivities[3][0] > 3 * made.sensitivities[0][0]
    budget = made.budget(4.125)
    assert BITS[budget.k[3]] > BITS[budget.k[0]] and budget.used <= 4.125
    assert f"4.125 bits by coordinate, 4.125 used, predicted divergence {budget.predicted:.2e}: {budget}" in done.out


def test_the_command_without_a_text(tmp_path):
    command = [sys.executable, "-m", "gyre.calibrate", stored_model("tiny-d128"), "--no-text", "--out", tmp_path / "a.gyrecal"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "recipe Q, 4 layers, 2 KV heads, head_dim 128, 0 tokens, every position" in done.stdout
    assert Calibration.load(tmp_path / "a.gyrecal").layers[0][0].mean is None


def test_feedback_alone_has_no_basis(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[:300])
    assert run(tmp_path, text, "--no-transform", "--quiet") == 0
    assert "recipe F" in capsys.readouterr().out
    for part in Calibration.load(tmp_path / "a.gyrecal").layers[1]:
        assert part.basis is None and part.inverse is None and part.mean is None and part.factor.abs().max() > 0


def test_refusals_of_the_command(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_bytes(TEXT.read_bytes()[:100])
    assert run(tmp_path, text, "--quiet") == 1
    assert "85 tokens are too few for rows of 128 coordinates" in capsys.readouterr().err
    text.write_bytes(TEXT.read_bytes()[:16])
    assert run(tmp_path, text, "--no-text", "--budget", "4.125", "--quiet") == 1
    assert "too short for a budget" in capsys.readouterr().err
    assert __main__.main([str(tmp_path / "none"), str(TEXT)]) == 1
    assert "the model must be a folder" in capsys.readouterr().err
    assert __main__.main([str(stored_model("tiny-d128")), str(TEXT), "--out", str(tmp_path / "none" / "a")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    for options in ([], ["--no-text", "--budget", "4"], ["--no-text", "--no-transform", str(TEXT)], [str(TEXT), "--capacity", "0"]):
        with pytest.raises(SystemExit):
            run(tmp_path, *options)
    assert not (tmp_path / "a.gyrecal").exists()
