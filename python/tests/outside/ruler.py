"""lm-eval's RULER tasks that need no download, through transformers with a GyreCache: ruler.py MODEL CALIBRATION [--limit N].

The other tasks of RULER ask the network: niah_single_2 and _3, niah_multikey_1, niah_multivalue and niah_multiquery for essays on the
Hugging Face hub, ruler_qa_squad and ruler_qa_hotpot for their questions. Scores are lm-eval's: the part of the wanted words that
an answer has. The compressed caches must score as high as f16 within --loss. --caches names others than the default ones; f16 is the
first in any case. The interval of 95 % is for the difference to f16, by drawing the same questions anew (bootstrap)."""

import argparse
import os
import random
import sys

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre.integrations.transformers import enable

TASKS = ("niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_fwe")
CACHES = {
    "f16": {"k": "f16", "v": "f16"},
    "default": {},  # tq8 + tq4
    "tq8": {"k": "tq8", "v": "tq8"},
    "tq4": {"k": "tq4", "v": "tq4"},
    "tq4-calibrated": {"k": "tq4", "v": "tq4"},
}


def answers(model, tokenizer, tasks, given):
    """By task: (answer, score) of each question."""
    language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=given.length + given.tokens)
    found = evaluate(language_model, tasks, limit=given.limit, bootstrap_iters=0, verbosity="ERROR")
    return {task: [(s["resps"][0][0], s[str(given.length)]) for s in found["samples"][task]] for task in TASKS}


def interval(found, f16, draws=2000):
    """Of the difference of the mean scores, 95 %."""
    chance = random.Random(0)
    differences = [[a[1] - b[1] for a, b in zip(found[task], f16[task], strict=True)] for task in TASKS]
    means = sorted(
        sum(sum(chance.choices(task, k=len(task))) / len(task) for task in differences) / len(TASKS) for _ in range(draws)
    )
    return means[draws // 40], means[-draws // 40 - 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("--limit", type=int, default=5, help="questions of each task")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--loss", type=float, default=0.1, help="how much lower the mean score of a compressed cache may be")
    parser.add_argument("--caches", nargs="+", default=["default", "tq4-calibrated"], choices=list(CACHES))
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tasks = TaskManager(metadata={"max_seq_lengths": [given.length], "pretrained": given.model}).load(list(TASKS))
    for task in tasks["tasks"].values():
        task.set_config(key="generation_kwargs", value={"max_gen_toks": given.tokens}, update=True)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    print(f"{'cache':16}" + "".join(f"{task:>17}" for task in TASKS) + "             mean  answers as with f16, mean - f16", flush=True)
    f16, best, failed = None, 0.0, []
    for name in dict.fromkeys(["f16", *given.caches]):
        options = CACHES[name] | ({"calibration": given.calibration} if name.endswith("calibrated") else {})
        found = answers(enable(model, **options), tokenizer, tasks, given)
        f16 = f16 or found
        means = [sum(score for _, score in found[task]) / len(found[task]) for task in TASKS]
        mean, total = sum(means) / len(TASKS), sum(map(len, found.values()))
        same = sum(a == b for task in TASKS for a, b in zip(found[task], f16[task], strict=True))
        low, high = interval(found, f16)
        row = f"{name:16}" + "".join(f"{100 * score:15.1f} %" for score in means)
        print(f"{row}{100 * mean:15.1f} %  {same} of {total}, {100 * low:+.1f} to {100 * high:+.1f}", flush=True)
        best = mean if name == "f16" else best
        if mean < best - given.loss:
            failed.append(name)
    if failed:
        print("FAILED:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
