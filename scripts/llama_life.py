#!/usr/bin/env python3
"""llama-server under load with and without libggml-gyre.so: the same requests, and do the answers agree? (docs/llama_cpp.md)

Eight clients ask at once, with shared and own prompts, answers that outgrow a slot's context (context shift) and slots that are
saved and restored in between. Every answer is greedy. ggml's kernel rounds queries and sums that Gyre's does not, so answers part
where two tokens are nearly as likely; then the texts before them differ. What is printed is how far apart the stock server found
the two tokens where answers part. The stock server also runs twice, to show what it does to itself.
usage: scripts/llama_life.py [--rounds 8] [--type q4_0] [--way wrap] [--library ... --sanitizer libasan.so]
"""

import argparse
import json
import os
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/llama"
PORT = 18080
CLIENTS = 8


def call(path: str, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def ask(prompt: str, tokens: int, slot: int) -> list[dict]:
    """The answer's tokens, each with the likeliest and their logarithms."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "id_slot": slot, "return_tokens": True, "cache_prompt": True,
            "ignore_eos": True, "seed": 1, "n_probs": 8}
    return [{"id": token["id"], "likely": {top["id"]: top["logprob"] for top in token["top_logprobs"]}}
            for token in call("/completion", body)["completion_probabilities"]]


def client(number: int, text: str, options, answers: dict, errors: list):
    try:
        for turn in range(options.rounds):
            own = text[1000 * number + 300 * turn :][: options.context // 2 + 40 * (turn % 3)]
            prompt = text[: options.context // 2] + own if turn % 2 else own
            # Every fourth answer is longer than what is left of the slot's context.
            answers[number, turn] = ask(prompt, options.context // 12 if turn % 4 != 3 else options.context, number)
            if turn % 3 == 2:
                name = {"filename": f"slot{number}.bin"}
                call(f"/slots/{number}?action=save", name)
                call(f"/slots/{number}?action=erase", {})
                call(f"/slots/{number}?action=restore", name)
    except Exception as error:  # noqa: BLE001: whatever it is, the run has failed
        errors.append(f"client {number}: {error!r}")


def resident_kb(process) -> int:
    with open(f"/proc/{process.pid}/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("VmRSS")), 0)


def serve(options, library: str):
    saved = FOLDER / "slots"
    saved.mkdir(exist_ok=True)
    environment = dict(os.environ, GGML_BACKEND_PATH=library, GYRE_GGML=options.way, GYRE_GGML_VERBOSE="1")
    if options.sanitizer and library:
        environment.update(LD_PRELOAD=options.sanitizer, ASAN_OPTIONS="detect_leaks=0")
    log = open(FOLDER / f"life_{'gyre' if library else 'stock'}.log", "w")
    command = [FOLDER / "build/bin/llama-server", "-m", FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf", "--port", str(PORT), "-fa", "on",
               "-ctk", options.type, "-ctv", options.type, "-np", str(CLIENTS), "-c", str(options.context * CLIENTS), "-t", str(options.threads), "--no-webui",
               "--context-shift", "--slot-save-path", str(saved)]
    process = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                if call("/health")["status"] == "ok":
                    break
            except OSError:
                time.sleep(0.2)
                if process.poll() is not None:
                    raise SystemExit(f"llama-server ended, see {log.name}") from None
        text = (FOLDER / "text.txt").read_text(errors="ignore")
        answers, errors, sizes = {}, [], []
        threads = [threading.Thread(target=client, args=(i, text, options, answers, errors)) for i in range(CLIENTS)]
        begin = time.time()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and process.poll() is None:
            sizes.append(resident_kb(process))
            time.sleep(1)
        if process.poll() is not None:
            errors.append(f"llama-server ended with {process.returncode}")
        half = len(sizes) // 2
        growth = max(sizes[half:], default=0) - max(sizes[:half], default=0)
        print(f"{'gyre ' if library else 'stock'}: {len(answers)} answers, {sum(map(len, answers.values()))} tokens in {time.time() - begin:.0f} s, "
              f"resident {sizes[-1] // 1024} MiB, {growth} KiB more in the second half, errors: {errors or 'none'}", flush=True)
        return answers, errors
    finally:
        process.terminate()
        process.wait()


def agreement(a: dict, b: dict) -> str:
    """Of the answers of a, how many are b's, and how much likelier a found its own token where they part."""
    same, agreed, gaps = 0, 0, []
    for key in a:
        at = next((i for i, (x, y) in enumerate(zip(a[key], b[key])) if x["id"] != y["id"]), None)
        if at is None:
            same += 1
            agreed += len(a[key])
            continue
        agreed += at
        token = a[key][at]
        gaps.append(token["likely"].get(token["id"], 0) - token["likely"].get(b[key][at]["id"], -99))
    gaps.sort()
    text = f"{same} of {len(a)} answers alike, {agreed} of {sum(map(len, a.values()))} tokens before they part"
    return text + (f"; logarithms apart there: median {gaps[len(gaps) // 2]:.3f}, largest {gaps[-1]:.3f}" if gaps else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="requests of each client")
    parser.add_argument("--context", type=int, default=512, help="tokens of a slot")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--type", default="q4_0")
    parser.add_argument("--way", choices=("accel", "wrap"), default="accel")
    parser.add_argument("--library", default=str(ROOT / "build/release/integrations/ggml/libggml-gyre.so"))
    parser.add_argument("--twice", action="store_true", help="the stock server a second time")
    parser.add_argument("--sanitizer", help="path of libasan.so, for a library that was built with it")
    options = parser.parse_args()
    runs = [serve(options, library) for library in ("", options.library)]
    print("stock and gyre:       ", agreement(runs[0][0], runs[1][0]), flush=True)
    if options.twice:
        runs.append(serve(options, ""))
        print("stock and stock again:", agreement(runs[0][0], runs[2][0]))
    if any(errors for _, errors in runs):
        raise SystemExit("there were errors")


if __name__ == "__main__":
    main()
