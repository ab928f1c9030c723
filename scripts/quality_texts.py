"""The texts of `make quality`: what every machine with Python and this repository has. usage: scripts/quality_texts.py FOLDER

Four kinds of text are predicted; another two are for calibration.
"""

import argparse
import asyncio.base_events
import pathlib
import pydoc_data.topics
import re
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PREDICTED = ("documentation", "manual", "licence", "code")
CALIBRATION = "calibration"


def source(module) -> str:
    return pathlib.Path(module.__file__).read_text()


def topics(first: int, last: int | None) -> str:
    """Python's language reference, of which pydoc has a copy."""
    every = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(every[first:last]))


def write(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "documentation": (ROOT / "python/tests/data/eval.txt").read_text(errors="replace"),
        "manual": topics(0, 20),
        "licence": (ROOT / "LICENSE").read_text(),
        "code": source(argparse),
        CALIBRATION: source(tarfile)[20000:40000] + topics(40, 50)[:20000] + source(asyncio.base_events)[20000:30000],
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
