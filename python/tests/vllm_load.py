"""`vllm serve` under load, with vLLM's own attention and then with Gyre's: vllm_load.py MODEL [--requests N] [--clients N], in an
environment with vLLM.

Clients ask over 127.0.0.1 for greedy answers to prompts that share prefixes, through a cache that holds a part of them. One in five
hangs up in the middle of an answer, and one in twenty asks for more than the server takes. Answers are compared with those that the
same server gave before to one request at a time. Fails if a request fails that should not, if an answer differs from the quiet one
anywhere but at a tie (--tie), if the server holds requests or pages afterwards, if its quiet answers differ from those before, or if
the engine's memory grows in the second half by more than --growth MiB beyond what it grows by with vLLM's own attention.
--only gyre or own: one of the two (then --growth is for itself). --bench N: then N requests of `vllm bench serve`.

vLLM's matrix products keep compiled code for each number of tokens that a step has had: up to 1024 kernels in oneDNN's cache, hundreds
of MiB, which would hide a leak of attention. ONEDNN_PRIMITIVE_CACHE_CAPACITY is 0 unless set: 32 for each layer remain."""

import argparse
import collections
import contextlib
import http.client
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import threading
import time

from vllm_reference import TEXT
from vllm_server import serving

TOKENS = 48  # of an answer
PAGE = 32  # tokens; vLLM's own attention takes multiples of it
HANGS_UP, TOO_LONG = 0.20, 0.05


class Refused(Exception):
    pass


def connection(port):
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300))


def ask(port, prompt, hang_up_after=None, **options):
    """The tokens of an answer; or what came of it until the client hung up, after some lines of a stream."""
    body = dict(model="model", prompt=prompt, max_tokens=TOKENS, temperature=0, ignore_eos=True, return_token_ids=True, **options)
    body["stream"] = hang_up_after is not None
    with connection(port) as c:
        c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = c.getresponse()
        if answer.status != 200:
            raise Refused(f"{answer.status} {answer.read()[:200]}")
        if hang_up_after is None:
            return json.load(answer)["choices"][0]
        lines = (answer.readline() for _ in range(2 * hang_up_after))
        return [line for line in lines if line.startswith(b"data: {")]


def metrics(port):
    """Sums of the server's counters and gauges by name."""
    with connection(port) as c:
        c.request("GET", "/metrics")
        text = c.getresponse().read().decode()
    sums = collections.Counter()
    for name, value in re.findall(r"^vllm:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.M):
        sums[name] += float(value)
    return sums


def resident(server):
    """MiB of the server's process and of its descendants, which the engine is among; what libraries map is not counted."""
    found, waiting = collections.Counter(), [server]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            kib = int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1])
            found["server" if pid == server else "engine"] += kib / 1024
            for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return found


def make_prompts(model, count):
    """Each begins with one of four prefixes; as tokens."""
    from gyre.eval.text import read_tokens

    ids, start, unit = read_tokens("vllm_load", str(model), TEXT[:200000])
    prefix, chance = 320, random.Random(1)
    prompts = []
    for i in range(count):
        at, first = chance.randrange(8 * prefix, len(ids) - 200), i % 4 * prefix
        prompts.append([start, *ids[first : first + chance.choice((prefix // 4, prefix))], *ids[at : at + chance.randrange(4, 160)]])
    return prompts, unit


def quiet_answers(port, prompts):
    """Tokens and, for each, by how much the best is more probable than the second."""
    answers = []
    for prompt in prompts:
        choice = ask(port, prompt, logprobs=2, return_tokens_as_token_ids=True)
        best = [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]]
        answers.append((choice["token_ids"], [top[-1] - top[-2] for top in best]))
    return answers


class Load:
    def __init__(self, port, prompts, quiet, requests):
        self.port, self.prompts, self.quiet, self.left = port, prompts, quiet, iter(range(requests))
        self.counts, self.parted, self.failures = collections.Counter(), [], []

    def client(self, number):
        chance = random.Random(number)
        while next(self.left, None) is not None:
            i, kind = chance.randrange(len(self.prompts)), chance.random()
            try:
                if kind < HANGS_UP:
                    ask(self.port, self.prompts[i], hang_up_after=chance.randrange(0, TOKENS // 2))
                    self.counts["hung up"] += 1
                elif kind < HANGS_UP + TOO_LONG:
                    self.refused(i)
                else:
                    self.compare(ask(self.port, self.prompts[i])["token_ids"], i)
            except Exception as error:  # noqa: BLE001: any of them is a finding
                self.failures.append(f"prompt {i}: {type(error).__name__}: {error}")

    def refused(self, i):
        try:
            ask(self.port, self.prompts[i] * 40)
        except Refused as error:
            if not str(error).startswith("400 "):
                raise
            self.counts["refused"] += 1
        else:
            self.failures.append(f"prompt {i}, 40 times: was not refused")

    def compare(self, tokens, i):
        self.counts["answered"] += 1
        wanted, margins = self.quiet[i]
        if tokens == wanted:
            self.counts["equal"] += 1
        else:
            self.parted.append(next(m for got, token, m in zip(tokens, wanted, margins) if got != token))


def run_load(server, port, load, clients):
    """Starts the clients; MiB of the server and of the engine, every second."""
    threads = [threading.Thread(target=load.client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads):
        memory.append(resident(server.pid))
        time.sleep(1)
    return memory


def settle(port):
    """What the server holds when nobody waits for it any more."""
    for _ in range(30):
        found = metrics(port)
        if not any(found[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")):
            break
        time.sleep(1)
    return found


def bench(model, port, count, clients):
    """Figures of vLLM's own load generator."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", "model", "--tokenizer", str(model), "--dataset-name", "prefix_repetition"]
    command += ["--prefix-repetition-prefix-len", "256", "--prefix-repetition-suffix-len", "64", "--prefix-repetition-num-prefixes", "4"]
    command += ["--prefix-repetition-output-len", str(TOKENS), "--num-prompts", str(count), "--max-concurrency", str(clients)]
    command += ["--ignore-eos", "--temperature", "0", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True)
    words = ("Successful requests", "Failed requests", "Output token throughput", "Median TTFT", "Median TPOT")
    lines = [re.sub(r"\s+", " ", line) for line in done.stdout.splitlines() if line.startswith(words)]
    failed = done.returncode != 0 or not any(re.fullmatch(r"Failed requests: 0", line) for line in lines)
    return "; ".join(lines) or done.stderr[-500:], failed


def growth(memory):
    """MiB by which the engine grew in the second half. Medians: one sample may hit a step's temporary tensors."""
    engine = [m["engine"] for m in memory]
    window = max(len(engine) // 10, 1)
    middle = len(engine) // 2
    return statistics.median(engine[-window:]) - statistics.median(engine[middle : middle + window])


def findings(load, settled, before, after, tie):
    """What is wrong."""
    wrong = load.failures[:5]
    wrong += [f"an answer differs where the two best are {m:.3f} apart" for m in load.parted if m > tie]
    held = {name: settled[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc") if settled[name]}
    wrong += [f"the server still holds {held}"] if held else []
    other = sum(a[0] != b[0] for a, b in zip(before, after, strict=True))
    wrong += [f"{other} quiet answers differ from those before"] if other else []
    return wrong


def loaded(gyres, given, prompts):
    """A server under load: how its engine's memory grew, and what is wrong. Without `gyres` it has vLLM's own attention."""
    options = ["--dtype", given.dtype, "--kv-cache-memory-bytes", str(given.memory << 20), "--block-size", str(PAGE)]
    options += ["--num-gpu-blocks-override", str(given.tokens // PAGE), *given.vllm]
    with serving(given.model, gyres, *options) as (server, port):
        before = quiet_answers(port, prompts)
        load, began = Load(port, prompts, before, given.requests), time.monotonic()
        memory = run_load(server, port, load, given.clients)
        seconds, found = time.monotonic() - began, settle(port)
        figures, bench_failed = bench(given.model, port, given.bench, given.clients) if given.bench else ("", False)
        after = quiet_answers(port, prompts)
        settled = settle(port)
    counts = load.counts
    print(f"\n{f'Gyre, {json.dumps(gyres)}' if gyres else 'attention of vLLM'}: {given.clients} clients, {seconds:.0f} s, a cache of {given.tokens} tokens")
    print(f"{counts['answered']} answered, {counts['equal']} of them as before; {counts['hung up']} hung up, {counts['refused']} refused, {len(load.failures)} failed")
    if load.parted:
        print(f"answers that differ do so where the two best are at most {max(load.parted):.3f} apart")
    hits, queries = found["prefix_cache_hits_total"], found["prefix_cache_queries_total"]
    print(f"{found['num_preemptions_total']:.0f} preemptions; {hits:.0f} of {queries:.0f} tokens of prompts from the cache")
    quarters = [memory[len(memory) * i // 4] for i in range(4)] + memory[-1:]
    for process in ("server", "engine"):
        print(f"memory of the {process}, MiB, each quarter of the time:", *(f"{m[process]:.0f}" for m in quarters))
    print(f"the engine grew by {growth(memory):.1f} MiB in the second half", flush=True)
    if figures:
        print("vllm bench serve:", figures)
    wrong = findings(load, settled, before, after, given.tie) + ["vllm bench serve failed"] * bench_failed
    print(*(f"WRONG: {text}" for text in wrong) if wrong else ("nothing wrong",), sep="\n", flush=True)
    return growth(memory), wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--requests", type=int, default=800, help="to each server")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=2688, help="that the cache holds, a multiple of 32")
    parser.add_argument("--memory", type=int, default=512, help="MiB that the cache may take at most")
    parser.add_argument("--gyre", type=json.loads, default={"k": "tq8", "v": "tq4"}, help="the plugin's options")
    parser.add_argument("--only", choices=("own", "gyre"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tie", type=float, default=0.1)
    parser.add_argument("--growth", type=float, default=16)
    parser.add_argument("--bench", type=int, default=0)
    parser.add_argument("--vllm", type=str.split, default=[], help="more options of vllm serve, in one string")
    given = parser.parse_args()
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    prompts, unit = make_prompts(given.model, given.prompts)
    lengths = sorted(map(len, prompts))
    print(f"{given.prompts} prompts of {lengths[0]} to {lengths[-1]} {unit}s, {TOKENS} more each", flush=True)
    grown, wrong = {}, []
    for name, gyres in (("own", None), ("gyre", given.gyre)):
        if given.only in (None, name):
            grown[name], found = loaded(gyres, given, prompts)
            wrong += found
    beyond = grown["gyre"] - max(grown["own"], 0.0) if given.only is None else grown[given.only]
    print(f"\ngrowth in the second half, MiB: {', '.join(f'{name} {value:.1f}' for name, value in grown.items())}")
    if beyond > given.growth:
        wrong.append(f"the engine's memory grew by {beyond:.0f} MiB" + " more than with vLLM's own attention" * (given.only is None))
        print("WRONG:", wrong[-1])
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
