"""scripts/measure_step.py, with a model that is small enough."""

import importlib.util
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")

PATH = pathlib.Path(__file__).parents[2] / "scripts" / "measure_step.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("measure_step", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(module.SHAPES, "tiny", (64, 128, 2, 4, 2, 16, 100))
    return module


def test_the_time_of_a_step_and_of_a_token(script, capsys, monkeypatch):
    taken = []

    def seconds(run, device, rounds):
        assert run().shape == (len(taken) * 2 + 1, 100)
        taken.append(rounds)
        return 4e-3 + 1e-4 * len(taken)

    monkeypatch.setattr(script, "seconds", seconds)
    script.main(["tiny", "--device", "cpu", "--dtype", "float32", "--tokens", "1", "3", "5", "--rounds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny, float32, CPU") and lines[1] == "    1 tokens: 4.100 ms" and taken == [2, 2, 2]
    assert lines[-1] == "--step-ms 4.1 --token-us 50"


def test_a_run_on_a_cpu(script, capsys):
    script.main(["tiny", "--device", "cpu", "--tokens", "1", "2", "--rounds", "1"])
    assert re.search(r"--step-ms [\d.e+-]+ --token-us [\d.e+-]+", capsys.readouterr().out)


def test_cuda_steps_run_once_and_are_then_replayed(script, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(script, "captured", lambda run: lambda: calls.append("replay"))
    assert script.seconds(lambda: calls.append("run"), torch.device("cuda"), 2) >= 0
    assert calls == ["wait", "run", "wait"] + ["wait", "replay", "wait"] * 2


@pytest.mark.parametrize("wrong", [["--tokens", "1"], ["--tokens", "4", "2"], ["--tokens", "0", "2"], ["--rounds", "0"], ["--device"]])
def test_arguments_that_are_refused(script, wrong):
    with pytest.raises(SystemExit):
        script.main(["tiny", *wrong])
