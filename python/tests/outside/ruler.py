"""lm-eval's RULER tasks that need no download, through transformers with a GyreCache: ruler.py MODEL CALIBRATION [--limit N].

The other tasks of RULER ask the network: niah_single_2 and _3, niah_multikey_1, niah_multivalue and niah_multiquery for essays on the
Hugging Face hub, ruler_qa_squad and ruler_qa_hotpot for their questions. Scores are lm-eval's: the part of the wanted words that
an answer has. The compressed caches must score as high as f16 within --loss."""

import argparse
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from gyre.integrations.transformers import enable

TASKS = ("niah_single_1", "niah_multikey_2", "ruler_vt", "ruler_fwe")


def caches(calibration):
    return {
        "f16": {"k": "f16", "v": "f16"},
        "tq8 + tq4 (default)": {},
        "tq4, calibrated": {"k": "tq4", "v": "tq4", "calibration": calibration},
    }


def answers(model, tokenizer, tasks, given):
    """By task: (answer, score) of each question."""
    language_model = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=given.length + given.tokens)
    found = evaluate(language_model, tasks, limit=given.limit, bootstrap_iters=0, verbosity="ERROR")
    return {task: [(s["resps"][0][0], s[str(given.length)]) for s in found["samples"][task]] for task in TASKS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("calibration")
    parser.add_argument("--limit", type=int, default=5, help="questions of each task")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--loss", type=float, default=0.1, help="how much lower the mean score of a compressed cache may be")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tasks = TaskManager(metadata={"max_seq_lengths": [given.length], "pretrained": given.model}).load(list(TASKS))
    for task in tasks["tasks"].values():
        task.set_config(key="generation_kwargs", value={"max_gen_toks": given.tokens}, update=True)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    print(f"{'cache':24}" + "".join(f"{task:>17}" for task in TASKS) + "             mean  answers as with f16", flush=True)
    f16, best, failed = None, 0.0, []
    for name, options in caches(given.calibration).items():
        found = answers(enable(model, **options), tokenizer, tasks, given)
        f16 = f16 or found
        means = [sum(score for _, score in found[task]) / len(found[task]) for task in TASKS]
        mean, total = sum(means) / len(TASKS), sum(map(len, found.values()))
        same = sum(a == b for task in TASKS for a, b in zip(found[task], f16[task], strict=True))
        row = f"{name:24}" + "".join(f"{100 * score:15.1f} %" for score in means)
        print(f"{row}{100 * mean:15.1f} %  {same} of {total}", flush=True)
        best = mean if name == "f16" else best
        if mean < best - given.loss:
            failed.append(name)
    if failed:
        print("FAILED:", ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
