"""The tables and the chart of docs/quality.md: what each way to store keys and values costs SmolLM2-135M.

usage: scripts/quality.py FOLDER [--only TABLE ...] [--threads N] [--chart FILE]
FOLDER has smollm2-135m and texts (scripts/quality.sh makes them). Each finished part is kept there as a JSON file and is not
measured again.
"""

import argparse
import json
import pathlib
import random
import sys
from dataclasses import asdict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gyre
from gyre.calibrate.__main__ import main as calibrate
from gyre.calibrate.file import Calibration
from gyre.eval import Row, Setting, evaluate, greedy, plot, ratio, read_windows, retrieval
from gyre.eval.baselines import BASELINES
from gyre.eval.rows import percent, plus_minus
from gyre.eval.run import decoding_bytes
from gyre.eval.statistics import interval
from quality_texts import CALIBRATION, PREDICTED

CONTEXT, STEP, TAIL, SINKS = 2048, 512, 128, 1
BUDGETS = "4.25", "3.25"  # bits: as tq4 and tq3 at head_dim 64
TAILS = 0, 4, 8, 16, 32, 64, TAIL
LONG = 32768  # tokens, at which a tail takes a sixteenth of its bits at CONTEXT
ANSWER_TOKENS = 24
HAYSTACKS, QUESTIONS = 8, 10
QUESTIONS_ASKED = """What is the capital of France?
Write a short poem about the sea.
Explain what a hash table is.
List three uses for a paper clip.
Why is the sky blue?
Translate "good morning" into Spanish.
What is 17 plus 25?
Describe how bread is made.
Who wrote Hamlet?
Give me a recipe for pancakes.""".splitlines()
ABOUT_A_TEXT = """Summarize this text.
What is this text about?
Which word is the most important one in this text, and why?
Write a title for this text.
Continue this text.""".splitlines()


def mixed(k: str, v: str, calibration: Calibration | None = None, **exact) -> Setting:
    name = k if k == v else f"{k}/{v}"
    return Setting(k, v, calibration=calibration, label=f"{name}, R" if calibration else "", **exact)


def listed(r: Calibration, bits: str, **exact) -> Setting:
    """The formats of a budget, which can be the same in all layers."""
    budget = r.budget(float(bits))
    return Setting(tuple(budget.k), tuple(budget.v), calibration=r, label=f"--budget {bits}, R", **exact)


def groups(r: Calibration) -> dict[str, list[Setting]]:
    """The rows of the table, in parts that take some minutes each."""
    both = dict(tail=TAIL, sink_tokens=SINKS)
    others = lambda *names: [Setting("f32", "f32", BASELINES[name].residual, baseline=name) for name in names]
    return {
        "fp8": others("fp8"),
        "main": [
            mixed("tq4", "tq4"),
            mixed("tq4", "tq4", r),
            mixed("tq4", "tq4", r, sink_tokens=SINKS),
            mixed("tq4", "tq4", **both),
            mixed("tq4", "tq4", r, **both),
            mixed("tq8", "tq4"),
            mixed("tq8", "tq4", **both),
        ],
        "fine": [mixed("tq8", "tq8"), mixed("tq8", "tq6"), mixed("tq6", "tq6"), mixed("tq8", "tq4", r), mixed("tq8", "tq4", r, **both)],
        "five": [mixed("tq5", "tq5"), mixed("tq5", "tq5", r), mixed("tq4", "tq4", r, tail=TAIL), listed(r, BUDGETS[0])],
        "low": [
            *others("q4_0-rotated"),
            mixed("tq3", "tq3", r, **both),
            mixed("tq2", "tq2", r, **both),
        ],
        "others": [*others("nvfp4", "kivi4"), mixed("tq3", "tq3", r), mixed("tq2", "tq2", r)],
    }


def tails(r: Calibration) -> dict[str, list[Setting]]:
    """The columns of the table of tails: a sink token, and a tail of each length."""
    columns = {
        "tq8/tq4": lambda **exact: mixed("tq8", "tq4", **exact),
        "tq4, R": lambda **exact: mixed("tq4", "tq4", r, **exact),
        "tq3, R": lambda **exact: mixed("tq3", "tq3", r, **exact),
        f"--budget {BUDGETS[1]}, R": lambda **exact: listed(r, BUDGETS[1], **exact),
        "tq2, R": lambda **exact: mixed("tq2", "tq2", r, **exact),
    }
    return {name: [make(tail=tail, sink_tokens=SINKS) for tail in TAILS] for name, make in columns.items()}


class Lab:
    def __init__(self, folder: pathlib.Path, threads: int):
        self.folder, self.path = folder, str(folder / "smollm2-135m")
        torch.set_num_threads(threads)
        self.device = gyre.Device("cpu", threads=threads)
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="gyre").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.calibration = Calibration.load(self._calibrated(threads))

    def _calibrated(self, threads: int) -> pathlib.Path:
        out = self.folder / "r.gyrecal"
        if not out.exists():
            text = self.folder / "texts" / f"{CALIBRATION}.txt"
            options = ["--capacity", CONTEXT, "--tokens", 8192, "--budget", *BUDGETS, "--out", out, "--threads", threads]
            if calibrate([self.path, str(text), *map(str, options)]):
                sys.exit(1)
        return out

    def text(self, name: str) -> bytes:
        return (self.folder / "texts" / f"{name}.txt").read_bytes()

    def kept(self, name: str, make):
        """What make() gives, from a file if it was made before."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            made = make()
            path.write_text(json.dumps(made, indent=1))
        return json.loads(path.read_text())

    def measured(self, name: str, settings: list[Setting]) -> list[Row]:
        windows = [read_windows(self.path, self.text(text), CONTEXT, 1)[0][0] for text in PREDICTED]
        make = lambda: [asdict(row) for row in evaluate(self.model, windows, settings, self.device, True, STEP)]
        return [Row(**row) for row in self.kept(name, make)]

    def rows(self, wanted: list[str]) -> list[Row]:
        parts = groups(self.calibration).items()
        return [row for name, settings in parts if not wanted or name in wanted for row in self.measured(name, settings)]

    def tails(self) -> dict[str, list[Row]]:
        return {name: self.measured(f"tails-{plain(name)}", settings) for name, settings in tails(self.calibration).items()}

    def prompts(self) -> list[torch.Tensor]:
        """Half of them are shorter than the tail, the others are about a text of some hundred tokens."""
        asked = list(QUESTIONS_ASKED)
        for i, question in enumerate(ABOUT_A_TEXT * 2):
            text = self.text(PREDICTED[i % len(PREDICTED)]).decode()
            begin = 1500 + 700 * i
            asked.append(f"{question}\n\n{text[begin:begin + 1600]}")
        chat = lambda text: self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return [torch.tensor(self.tokenizer(chat(text), add_special_tokens=False)["input_ids"]) for text in asked]

    def greedy(self, settings: list[Setting]) -> list[dict]:
        prompts = self.prompts()
        answers = lambda: [ids.tolist() for ids in greedy.answers(self.model, prompts, ANSWER_TOKENS, self.device)]
        expected = [torch.tensor(ids) for ids in self.kept("answers", answers)]
        make = lambda s: lambda: greedy.equal_tokens(self.model, prompts, expected, s, self.device)
        return [dict(label=label_of(s), equal=self.kept(f"greedy-{file_of(s)}", make(s))) for s in settings]

    def retrieval(self, settings: list[Setting]) -> list[dict]:
        start = self.tokenizer.bos_token_id
        stacks = retrieval.haystacks(self.tokenizer, start, self.text("manual").decode(), HAYSTACKS, QUESTIONS)
        make = lambda s: lambda: [asdict(retrieval.retrieve(self.model, one, s, self.device)) for one in stacks]
        return [dict(label=label_of(s), texts=self.kept(f"retrieval-{file_of(s)}", make(s))) for s in settings]


def label_of(setting: Setting) -> str:
    exact = [f"sink {setting.sink_tokens}"] * bool(setting.sink_tokens) + [f"tail {setting.tail}"] * bool(setting.tail)
    return ", ".join([setting.name, *exact])


def file_of(setting: Setting) -> str:
    return plain(label_of(setting))


def plain(label: str) -> str:
    return label.replace("/", "+").replace(", ", "-").replace(" ", "")


def bits(bytes_per_token: float, model) -> float:
    config = model.config
    return 8 * bytes_per_token / (2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


def print_rows(rows: list[Row], model) -> None:
    fp8 = next(row for row in rows if row.format == "fp8")
    print("| K/V | 16-bit rows | bits | KLD mean | / fp8 | KLD 99.9 % | same top 1 | perplexity |\n|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row.kld_mean):
        exact = ", ".join([f"sink {row.sink_tokens}"] * bool(row.sink_tokens) + [f"tail {row.tail}"] * bool(row.tail)) or "none"
        times, (low, high) = ratio(row, fp8)
        relative = "1" if row is fp8 else f"{times:.2g} [{low:.2g}, {high:.2g}]"
        name = f"*{row.format}*" if row.kind == "baseline" else row.format
        print(
            f"| {name} | {exact} | {bits(row.bytes_per_token, model):.2f} | {plus_minus(row.kld_mean, row.kld_mean_95)} | {relative} | "
            f"{plus_minus(row.kld_999, row.kld_999_95)} | {percent(row.same_top1, row.same_top1_95)} | {row.perplexity:.3f} |"
        )


def print_tails(found: dict[str, list[Row]], fp8: Row, model) -> None:
    """Mean divergences, relative to FP8's in brackets, and the 99.9th percentiles."""
    taken = lambda tokens, **exact: bits(decoding_bytes(model.config, mixed("tq4", "tq4", **exact), tokens), model)
    added = lambda tail, tokens: taken(tokens, tail=tail, sink_tokens=SINKS) - taken(tokens)
    mean = lambda row: f"{plus_minus(row.kld_mean, row.kld_mean_95)} ({row.kld_mean / fp8.kld_mean:.2g})"
    percentile = lambda row: plus_minus(row.kld_999, row.kld_999_95)
    for title, cell in (("KLD mean (/ fp8)", mean), ("KLD 99.9 %", percentile)):
        print(f"\n{title}, sink {SINKS}\n\n| tail | bits at {CONTEXT} | at {LONG} | {' | '.join(found)} |")
        print("|---|---|---|" + "---|" * len(found))
        for tail, *rows in zip(TAILS, *found.values()):
            more = " | ".join(f"+{added(tail, tokens):.3f}" for tokens in (CONTEXT, LONG))
            print(f"| {tail} | {more} | {' | '.join(map(cell, rows))} |")


def print_greedy(found: list[dict]) -> None:
    print(f"\n| cache | answers with {ANSWER_TOKENS} equal tokens | equal tokens, mean |\n|---|---|---|")
    for each in found:
        equal = each["equal"]
        whole = sum(count == ANSWER_TOKENS for count in equal)
        print(f"| {each['label']} | {whole} of {len(equal)} | {sum(equal) / len(equal):.1f} |")


def print_retrieval(found: list[dict]) -> None:
    """Differences from f16 with their interval: texts are drawn again, with all of their questions."""
    exact = {each["label"]: torch.tensor([one["exact"] for one in each["texts"]], dtype=torch.float64) for each in found}
    parts = {each["label"]: [p for one in each["texts"] for p in one["parts"]] for each in found}
    print(f"\n| cache | right answers of {HAYSTACKS * QUESTIONS} | right tokens | less than f16, 95 % |\n|---|---|---|---|")
    pick = random.Random(0)
    drawn = [[pick.randrange(HAYSTACKS) for _ in range(HAYSTACKS)] for _ in range(1000)]
    for label, right in exact.items():
        less = (exact["f16"] - right).mean(1)
        low, high = interval(torch.stack([less[d].mean() for d in drawn]))
        tokens = sum(parts[label]) / len(parts[label])
        print(f"| {label} | {int(right.sum())} | {100 * tokens:.1f} % | {100 * less.mean():+.1f} % [{100 * low:+.1f}, {100 * high:+.1f}] |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=[], help="main, fine, five, low, others, tails, greedy, retrieval (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chart", help="file for the chart, when all rows are there")
    options = parser.parse_args()
    lab = Lab(options.folder, options.threads)
    r, both = lab.calibration, dict(tail=TAIL, sink_tokens=SINKS)
    chosen = [Setting("f16", "f16"), mixed("tq8", "tq4", **both), mixed("tq4", "tq4", r, **both), mixed("tq8", "tq8"), mixed("tq8", "tq6")]
    chosen += [mixed("tq4", "tq4", r), mixed("tq8", "tq4"), mixed("tq4", "tq4"), Setting("f32", "f32", baseline="fp8")]
    wanted = [name for name in options.only if name not in ("tails", "greedy", "retrieval")]
    if wanted or not options.only:
        rows = lab.rows(["fp8", *wanted] if wanted else [])
        print_rows(rows, lab.model)
        if options.chart:
            plot(rows, f"SmolLM2-135M, {len(PREDICTED)} texts of {CONTEXT} tokens", options.chart)
    if not options.only or "tails" in options.only:
        (fp8,) = lab.rows(["fp8"])
        print_tails(lab.tails(), fp8, lab.model)
    if not options.only or "greedy" in options.only:
        print_greedy(lab.greedy(chosen))
    if not options.only or "retrieval" in options.only:
        print_retrieval(lab.retrieval(chosen[:3]))


if __name__ == "__main__":
    main()
