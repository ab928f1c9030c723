#!/usr/bin/env python3
"""llama-server under load with and without libggml-gyre.so (docs/llama_cpp.md). After `make llama`.

Eight clients ask at once. Prompts are shared or their own, some answers outgrow a slot's context (context shift), and slots are
saved, erased and restored in between. Every answer is greedy.

By default three servers get the same requests: ggml's kernel, the library, and, as a yardstick, ggml's kernel again with a ubatch
of one token. The last one computes the same in another order, so its sums are rounded differently, and nothing else differs. That
needs weights in f32 (llama_quality.py makes them): ggml multiplies quantized ones by integers, in any order the same.

Greedy answers part where two tokens are nearly as likely, because of rounding alone. So the script compares log probabilities: of the
two likeliest tokens at each position of an answer up to the first token that differs. It fails if the library moves them more than
1.5 times as far (root mean square) as the yardstick does, or if an answer parts where the server without the library found the two
tokens further apart than twice the yardstick's largest move: that is no tie. With --seconds only the server with the library runs, for
that long, and the script prints how its resident memory changed.

usage: scripts/llama_life.py [--rounds 4] [--type q4_0] [--way wrap] [--model ...F32.gguf]
       scripts/llama_life.py --seconds 600 [--library ... --sanitizer libasan.so]
"""

import argparse
import json
import math
import os
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build/llama"
CLIENTS = 8
MOST = 1.5  # times the yardstick's root mean square


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
    return tokens, answer["tokens_predicted"], answer["truncated"]


def client(number: int, text: str, options, run: dict):
    """Asks options.rounds times, or again and again until options.seconds have passed."""
    turn = number  # requests of all kinds at once, from the start
    try:
        while time.time() < run["end"] if options.seconds else turn < number + options.rounds:
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
            run["turns"][number] = turn - number
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


def serve(options, name: str, library: str, ubatch: int = 512):
    saved = FOLDER / f"slots_{options.port}"
    saved.mkdir(exist_ok=True)
    environment = dict(os.environ, GGML_BACKEND_PATH=library, GYRE_GGML=options.way, GYRE_GGML_VERBOSE="1")
    if options.sanitizer and library:
        environment.update(LD_PRELOAD=options.sanitizer, ASAN_OPTIONS="detect_leaks=0")
    log = open(FOLDER / f"life_{name}_{options.port}.log", "w")
    command = [FOLDER / "build/bin/llama-server", "-m", options.model, "--port", options.port, "-fa", "on",
               "-ctk", options.type, "-ctv", options.type, "-np", CLIENTS, "-c", options.context * CLIENTS, "-t", options.threads, "-ub", ubatch, "--no-webui",
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
        cells = call(options.port, "/props")["default_generation_settings"]["n_ctx"]
        if cells != options.context:
            raise SystemExit(f"the server rounds a slot's context up: --context {cells}")
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
        print(f"{name}: {run['answers']} answers, {run['shifted']} with context shifts, {run['restored']} slots restored, "
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


def log_probability(token: dict, which: int) -> float:
    """At most that of the least likely token the server named."""
    return token["likely"].get(which, min(token["likely"].values()))


class Comparison:
    """Answers of one server beside those of the server without the library, up to the first token that differs."""

    def __init__(self, name: str, theirs: dict, others: dict):
        self.name, self.answers, self.tokens = name, len(theirs), sum(map(len, theirs.values()))
        self.moves, self.partings = [], []
        for key in sorted(theirs):
            for i, (a, b) in enumerate(zip(theirs[key], others[key])):
                best = sorted(a["likely"], key=a["likely"].get)[-2:]
                self.moves.append(max(abs(a["likely"][which] - log_probability(b, which)) for which in best))
                if a["id"] != b["id"]:
                    margin = a["likely"][a["id"]] - log_probability(a, b["id"])
                    self.partings.append({"client": key[0], "request": key[1], "token": i, "shifted": a["shifted"], "margin": margin})
                    break

    def rms(self) -> float:
        return math.sqrt(sum(move * move for move in self.moves) / len(self.moves))

    def show(self):
        print(f"{self.name}: {self.answers - len(self.partings)} of {self.answers} answers are the same, {len(self.moves)} of {self.tokens} tokens compared; "
              f"log probabilities move by {self.rms():.2e} (root mean square), at most {max(self.moves):.2e}")
        for one in self.partings:
            where = "after a context shift" if one["shifted"] else "before any context shift"
            print(f"  client {one['client']}, request {one['request']}, token {one['token']}, {where}: log probabilities {one['margin']:.4f} apart")
        print(f"  margins of {len(self.partings)} first differences: {quantiles([one['margin'] for one in self.partings])}", flush=True)


def quantiles(gaps: list) -> str:
    gaps = sorted(gaps)
    at = lambda part: gaps[min(int(part * len(gaps)), len(gaps) - 1)]
    return f"median {at(0.5):.4f}, 90 % {at(0.9):.4f}, largest {gaps[-1]:.4f}" if gaps else "none"


def judge(library: Comparison, yardstick: Comparison) -> list[str]:
    """What the library does that rounding does not explain."""
    if yardstick.rms() == 0:
        raise SystemExit("no yardstick: with these weights the size of a ubatch changes no rounding; take weights in f32")
    found = []
    if library.rms() > MOST * yardstick.rms():
        found.append(f"log probabilities move by {library.rms():.2e}, the yardstick's by {yardstick.rms():.2e}")
    tie = 2 * max(yardstick.moves)
    found += [f"client {one['client']}, request {one['request']}: no tie" for one in library.partings if one["margin"] > tie]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="requests of each client")
    parser.add_argument("--context", type=int, default=512, help="tokens of a slot")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--type", default="q4_0", help="of K and V")
    parser.add_argument("--model", default=str(FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--way", choices=("accel", "wrap"), default="accel")
    parser.add_argument("--library", default=str(ROOT / "build/release/integrations/ggml/libggml-gyre.so"))
    parser.add_argument("--seconds", type=float, default=0, help="run only the server with the library, for this long")
    parser.add_argument("--without", action="store_true", help="with --seconds: the server without the library, to compare with")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--sanitizer", help="path of libasan.so, for a library that was built with it")
    options = parser.parse_args()
    if options.seconds:
        runs = [serve(options, "stock", "") if options.without else serve(options, "gyre", options.library)]
    else:
        runs = [serve(options, "stock", ""), serve(options, "gyre", options.library), serve(options, "yardstick", "", ubatch=1)]
    if any(run["errors"] for run in runs):
        raise SystemExit("there were errors")
    if len(runs) > 1:
        library, yardstick = (Comparison(name, runs[0]["texts"], run["texts"])
                              for name, run in (("with the library", runs[1]), ("with a ubatch of 1", runs[2])))
        library.show()
        yardstick.show()
        if found := judge(library, yardstick):
            raise SystemExit("more than rounding: " + "; ".join(found))


if __name__ == "__main__":
    main()
