#!/usr/bin/env python3
"""llama-server under load with and without libggml-gyre.so (docs/llama_cpp.md). After `make llama`.

Eight clients ask at once. Prompts are shared or their own, some answers outgrow a slot's context (context shift), and slots are
saved, erased and restored in between. Every answer is greedy.

By default both servers get the same requests, and the answers are compared. ggml's kernel rounds queries and sums that Gyre's does
not, so answers differ where two tokens are nearly as likely. For the first differing token of each answer the script prints how far
apart the server without the library found the two tokens. With --seconds only the server with the library runs, for that long, and
the script prints how its resident memory changed.

usage: scripts/llama_life.py [--rounds 8] [--type q4_0] [--way wrap] [--twice]
       scripts/llama_life.py --seconds 600 [--library ... --sanitizer libasan.so]
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
CLIENTS = 8


def call(port: int, path: str, body=None):
    """The server's answer; clients of a loaded machine wait long."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=1800) as answer:
        return json.load(answer)


def ask(options, prompt: str, tokens: int, slot: int) -> tuple[list[dict], int, bool]:
    """The answer's tokens, their number, and whether the context was shifted. Each token has the likeliest tokens with their log
    probabilities; with --seconds there are none, because collecting them makes the server grow."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "id_slot": slot, "return_tokens": True, "cache_prompt": True,
            "ignore_eos": True, "seed": 1, "n_probs": 0 if options.seconds else 64}
    answer = call(options.port, "/completion", body)
    room = options.context - answer["tokens_evaluated"]
    tokens = [{"id": token["id"], "likely": {top["id"]: top["logprob"] for top in token["top_logprobs"]}, "shifted": i >= room}
            for i, token in enumerate(answer.get("completion_probabilities", []))]
    return tokens, answer["tokens_predicted"], answer["tokens_predicted"] > room


def client(number: int, text: str, options, run: dict):
    """Asks options.rounds times, or again and again until options.seconds have passed."""
    turn = first = number if options.seconds else 0  # requests of all kinds at once, from the start
    try:
        while time.time() < run["end"] if options.seconds else turn < options.rounds:
            own = text[1000 * number + 300 * (turn % 96) :][: options.context // 2 + 40 * (turn % 3)]
            prompt = text[: options.context // 2] + own if turn % 2 else own
            # Every fourth answer is longer than what is left of the slot's context.
            answer, count, shifted = ask(options, prompt, options.context // 12 if turn % 4 != 3 else options.context, number)
            run["answers"] += 1
            run["tokens"] += count
            run["shifted"] += shifted
            if not options.seconds:
                run["texts"][number, turn] = answer
            if turn % 3 == 2:
                name = {"filename": f"slot{number}.bin"}
                for action in ("save", "erase", "restore"):
                    call(options.port, f"/slots/{number}?action={action}", name)
                run["restored"] += 1
            turn += 1
            run["turns"][number] = turn - first
    except Exception as error:  # noqa: BLE001: whatever it is, the run has failed
        run["errors"].append(f"client {number}, request {turn}: {error!r}")


def resident_kb(process) -> int:
    with open(f"/proc/{process.pid}/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("RssAnon")), 0)


def growth(sizes: list) -> str:
    """Resident memory, files apart, from when every client has had one request of each kind; five samples, the last at the end."""
    if len(sizes) < 5:
        return "too short to see memory grow"
    samples = [sizes[i * (len(sizes) - 1) // 4] for i in range(5)]
    return "resident " + ", ".join(f"{size / 1024:.1f} MiB after {seconds:.0f} s" for seconds, size in samples)


def text_of_documents() -> str:
    """What scripts/llama_quality.py measures with, too."""
    path = FOLDER / "text.txt"
    if not path.exists():
        documents = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
        path.write_bytes(b"".join(document.read_bytes() for document in documents)[:100000])
    return path.read_text(errors="ignore")


def serve(options, library: str):
    saved = FOLDER / f"slots_{options.port}"
    saved.mkdir(exist_ok=True)
    environment = dict(os.environ, GGML_BACKEND_PATH=library, GYRE_GGML=options.way, GYRE_GGML_VERBOSE="1")
    if options.sanitizer and library:
        environment.update(LD_PRELOAD=options.sanitizer, ASAN_OPTIONS="detect_leaks=0")
    log = open(FOLDER / f"life_{'gyre' if library else 'stock'}_{options.port}.log", "w")
    command = [FOLDER / "build/bin/llama-server", "-m", options.model, "--port", options.port, "-fa", "on",
               "-ctk", options.type, "-ctv", options.type, "-np", CLIENTS, "-c", options.context * CLIENTS, "-t", options.threads, "--no-webui",
               "--context-shift", "--slot-save-path", saved, "--cache-ram", 0]  # its prompt cache would grow
    process = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                if call(options.port, "/health")["status"] == "ok":
                    break
            except OSError:
                time.sleep(0.2)
                if process.poll() is not None:
                    raise SystemExit(f"llama-server ended, see {log.name}") from None
        text = text_of_documents()
        begin = time.time()
        run = {"texts": {}, "answers": 0, "tokens": 0, "shifted": 0, "restored": 0, "errors": [], "turns": [0] * CLIENTS,
               "end": begin + options.seconds}
        threads = [threading.Thread(target=client, args=(i, text, options, run)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        sizes = []
        while any(thread.is_alive() for thread in threads) and process.poll() is None:
            if min(run["turns"]) >= 4:
                sizes.append((time.time() - begin, resident_kb(process)))
            time.sleep(1)
        if process.poll() is not None:
            run["errors"].append(f"llama-server ended with {process.returncode}")
        print(f"{'gyre ' if library else 'stock'}: {run['answers']} answers, {run['shifted']} with context shifts, {run['restored']} slots restored, "
              f"{run['tokens']} tokens in {time.time() - begin:.0f} s, {growth(sizes)}, errors: {run['errors'] or 'none'}", flush=True)
        return run
    finally:
        process.terminate()
        process.wait()
        log.close()
        with open(log.name, errors="replace") as lines:
            found = [line.strip() for line in lines if "Sanitizer" in line or "runtime error" in line]
        if found:
            raise SystemExit(f"{log.name}: {found[0]}")


def differences(a: dict, b: dict) -> list:
    """Where the answers of b first differ from those of a, and how far apart a found the two tokens."""
    found = []
    for key in sorted(a):
        at = next((i for i, (x, y) in enumerate(zip(a[key], b[key])) if x["id"] != y["id"]), None)
        if at is not None:
            token = a[key][at]
            least = min(token["likely"].values())  # the other token is further down than this
            gap = token["likely"][token["id"]] - token["likely"].get(b[key][at]["id"], least)
            found.append({"client": key[0], "request": key[1], "token": at, "shifted": token["shifted"], "gap": gap})
    return found


def quantiles(gaps: list) -> str:
    gaps = sorted(gaps)
    at = lambda part: gaps[min(int(part * len(gaps)), len(gaps) - 1)]
    return f"median {at(0.5):.3f}, 90 % {at(0.9):.3f}, largest {gaps[-1]:.3f}" if gaps else "none"


def compare(name: str, a: dict, b: dict):
    found = differences(a, b)
    agreed = sum(map(len, a.values())) - sum(len(a[one["client"], one["request"]]) - one["token"] for one in found)
    print(f"{name}: {len(a) - len(found)} of {len(a)} answers are the same, {agreed} of {sum(map(len, a.values()))} tokens come before a difference")
    for one in found:
        where = "after a context shift" if one["shifted"] else "before any context shift"
        print(f"  client {one['client']}, request {one['request']}, token {one['token']}, {where}: log probabilities {one['gap']:.3f} apart")
    for shifted, where in ((False, "before any context shift"), (True, "after a context shift")):
        gaps = [one["gap"] for one in found if one["shifted"] == shifted]
        print(f"  {where}, {len(gaps)} differences: {quantiles(gaps)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="requests of each client")
    parser.add_argument("--context", type=int, default=512, help="tokens of a slot")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--type", default="q4_0", help="of K and V")
    parser.add_argument("--model", default=str(FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--way", choices=("accel", "wrap"), default="accel")
    parser.add_argument("--library", default=str(ROOT / "build/release/integrations/ggml/libggml-gyre.so"))
    parser.add_argument("--twice", action="store_true", help="compare the server without the library with itself, too")
    parser.add_argument("--seconds", type=float, default=0, help="run only the server with the library, for this long")
    parser.add_argument("--without", action="store_true", help="with --seconds: the server without the library, to compare with")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--sanitizer", help="path of libasan.so, for a library that was built with it")
    options = parser.parse_args()
    libraries = ["" if options.without else options.library] if options.seconds else ["", options.library, *([""] if options.twice else [])]
    runs = [serve(options, library) for library in libraries]
    if len(runs) > 1:
        compare("without and with the library", runs[0]["texts"], runs[1]["texts"])
    if len(runs) > 2:
        compare("without, twice", runs[0]["texts"], runs[2]["texts"])
    if any(run["errors"] for run in runs):
        raise SystemExit("there were errors")


if __name__ == "__main__":
    main()
