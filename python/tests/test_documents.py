"""The Python in the documents runs, and prints what they say it prints."""

import importlib.metadata
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def blocks(document):
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_quick_start_prints_what_the_readme_says(capsys):
    readme = (ROOT / "README.md").read_text()
    (code,) = (block for block in blocks("README.md") if "gyre.KvCache(" in block)
    exec(compile(code, "README.md", "exec"), {})
    words, number = re.fullmatch(r"(.*: )(\d+\.\d{4})\n", capsys.readouterr().out).groups()
    said = re.search(re.escape(words) + r"([\d.]+)", readme.split("## Python")[1]).group(1)
    assert float(number) == pytest.approx(float(said), abs=1e-3)


def test_the_python_document_runs_from_top_to_bottom():
    names = {}
    for code in blocks("docs/python.md"):
        exec(compile(code, "docs/python.md", "exec"), names)
    assert names["cache"].length == 9


def test_the_extras_of_the_documents_exist():
    text = "".join((ROOT / name).read_text() for name in ("docs/python.md", "docs/transformers.md"))
    named = set(re.findall(r"\.\[(\w+)\]`", text))
    assert {"numpy", "bf16", "transformers", "eval"} <= named
    assert named <= set(importlib.metadata.metadata("gyre-kv").get_all("Provides-Extra"))
