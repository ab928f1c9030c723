"""What Gyre's pages cost a real model under vLLM: vllm_quality.py MODEL TEXTS [--calibration FILE], in an environment with vLLM.

MODEL is a folder, TEXTS one of scripts/quality_texts.py. Every cache is a process of its own. It predicts the beginning of each
text; all tokens attend over what is stored. Compared with vLLM's own attention in float32: perplexity, how often the same token is
the most probable, and the divergence over the reference's 20 most probable tokens and the rest as one (a lower bound). Then it
answers prompts, all at once: how many answers are equal, and after how many tokens the others part."""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys

PREDICTED = ("documentation", "manual", "licence", "code")
CACHES = {
    "vLLM's own, f32": None,
    "f32": {"k": "f32", "v": "f32"},
    "tq4, calibrated": {"k": "tq4", "v": "tq4"},
    "tq4": {"k": "tq4", "v": "tq4"},
    "tq8": {"k": "tq8", "v": "tq8"},
    "tq8 + tq4": {"k": "tq8", "v": "tq4"},
    "tq8 + tq4, calibrated": {"k": "tq8", "v": "tq4"},
}
MOST = 20
ANSWER = 32  # tokens


def predict(name, model, texts, tokens, calibration):
    """For each text and position: the logprobs of the most probable tokens, and the right one's. And tokens of answers."""
    from vllm import LLM, SamplingParams

    from gyre.eval.text import read_tokens

    read = [read_tokens("vllm_quality", str(model), (texts / f"{text}.txt").read_bytes()) for text in PREDICTED]
    prompts = [[start, *ids][:tokens] for ids, start, _ in read]
    questions = [[start, *ids[at : at + 23 + 97 * i]] for ids, start, _ in read for i, at in enumerate((tokens, 1500))]
    gyres = {}
    if CACHES[name] is not None:
        own = {"calibration": str(calibration)} if name.endswith("calibrated") else {}
        gyres = dict(attention_backend="CUSTOM", additional_config={"gyre": {**CACHES[name], **own}})
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=tokens + 8,
        max_num_batched_tokens=max(512, tokens // 4),
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        max_num_seqs=8,
        max_logprobs=MOST,
        **gyres,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=MOST, detokenize=False)
    rows = []
    for prompt in prompts:
        (out,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        for token, found in zip(prompt[1:], out.prompt_logprobs[1:]):
            most = sorted(found.items(), key=lambda item: -item[1].logprob)[:MOST]
            rows.append([found[token].logprob, {str(t): x.logprob for t, x in most}])
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    outs = llm.generate([{"prompt_token_ids": p} for p in questions], sampling, use_tqdm=False)
    return {"rows": rows, "answers": [list(out.outputs[0].token_ids) for out in outs]}


def divergence(reference, other):
    """Over the tokens that both list, and all others as one."""
    both = reference.keys() & other.keys()
    p, q = {t: math.exp(reference[t]) for t in both}, {t: math.exp(other[t]) for t in both}
    rest_p, rest_q = max(1 - sum(p.values()), 1e-9), max(1 - sum(q.values()), 1e-9)
    return max(sum(p[t] * (reference[t] - other[t]) for t in both) + rest_p * math.log(rest_p / rest_q), 0.0)


def summary(found, reference):
    rows, wanted = found["rows"], reference["rows"]
    count = len(rows)
    top = sum(max(a, key=a.get) == max(b, key=b.get) for (_, a), (_, b) in zip(rows, wanted, strict=True))
    mean = sum(divergence(b, a) for (_, a), (_, b) in zip(rows, wanted)) / count
    pairs = list(zip(found["answers"], reference["answers"], strict=True))
    parted = [next(i for i, (x, y) in enumerate(zip(a, b)) if x != y) for a, b in pairs if a != b]
    return (
        f"divergence {mean:.2e}  same top 1 {100 * top / count:6.2f} %  perplexity {math.exp(-sum(right for right, _ in rows) / count):8.4f}"
        f"  ({count} tokens)  {len(pairs) - len(parted)} of {len(pairs)} answers equal, others part at {sorted(parted)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--calibration", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("build/vllm-quality"), help="keeps logs and what was predicted")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        given.out.write_text(json.dumps(predict(given.one, given.model, given.texts, given.tokens, given.calibration)))
        return 0
    reference, failed = None, 0
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    given.work.mkdir(parents=True, exist_ok=True)
    for name in CACHES:
        if name.endswith("calibrated") and given.calibration is None:
            continue
        out = given.work / f"{name} {given.tokens}.json"
        log = out.with_suffix(".log")
        if not out.exists():
            with open(log, "w") as written:
                command = [sys.executable, __file__, *sys.argv[1:], "--one", name, "--out", str(out)]
                subprocess.run(command, env=environment, stdout=written, stderr=written)
        if not out.exists():
            print(f"{name:24}FAILED, see {log}\n{log.read_text(errors='replace')[-2000:]}", flush=True)
            failed += 1
            continue
        found = json.loads(out.read_text())
        reference = reference or found
        print(f"{name:24}{summary(found, reference)}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
