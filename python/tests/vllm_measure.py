"""The figures of docs/engines.md: vllm_measure.py capacity | throughput | overhead | latent, in an environment with vLLM."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from vllm_reference import TEXT, model_folder

TINY = "tiny-d128"
FORMATS = {
    "stock": None,
    "bf16": ("bf16", "bf16"),
    "tq8+tq8": ("tq8", "tq8"),
    "tq8+tq4": ("tq8", "tq4"),
    "tq4": ("tq4", "tq4"),
}


def engine(name, **options):
    from vllm import LLM

    formats = FORMATS[name]
    gyres = {}
    if formats is not None:
        gyres = dict(attention_backend="CUSTOM", additional_config={"gyre": {"k": formats[0], "v": formats[1]}})
    usual = dict(skip_tokenizer_init=True, max_model_len=4096, enforce_eager=True, disable_log_stats=False)
    return LLM(model=str(model_folder(TINY, tempfile.gettempdir() + "/gyre-models")), **usual, **gyres, **options)


def prompts_of(count, tokens):
    starts = len(TEXT) - tokens
    return [[256, *TEXT[at : at + tokens - 1]] for at in (613 * i % starts for i in range(count))]


def sampling(tokens):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def hold(name, memory, tokens):
    """Tokens that a cache of so many bytes holds, and requests of `tokens` that run at once in it: asked of vLLM, and,
    with a model in float32, run. Stock stores the model's dtype, so it has no 16-bit cache to run in float32."""
    llm = engine(
        name,
        dtype="bfloat16" if name == "stock" else "float32",
        kv_cache_memory_bytes=memory,
        max_num_seqs=128,
        block_size=128,
    )
    core = llm.llm_engine.vllm_config.cache_config
    blocks, block = core.num_gpu_blocks, core.block_size
    fits = (blocks - 1) // -(-tokens // block)  # block 0 is the null block
    ran = 0
    if name != "stock":
        for i, prompt in enumerate(prompts_of(fits + 8, tokens - 60)):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling(60))
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            running = [m.value for m in llm.get_metrics() if m.name == "vllm:num_requests_running"]
            ran = max(ran, int(sum(running)))
    print(
        "RESULT",
        json.dumps({"tokens": (blocks - 1) * block, "requests": fits, "ran": ran, "bytes": memory / (blocks * block)}),
        flush=True,
    )


def serve_rounds(name, sequences, length, tokens):
    """For each line on stdin: the answers of `sequences` requests over a context of `length`, and their time. Prompts are
    in the prefix cache from the first round on, so that a round is decoding."""
    llm = engine(name, dtype="float32", kv_cache_memory_bytes=640 << 20, max_num_seqs=sequences)
    prompts = [{"prompt_token_ids": p} for p in prompts_of(sequences, length - tokens)]
    llm.generate(prompts, sampling(tokens), use_tqdm=False)
    print("READY", flush=True)
    for _ in sys.stdin:
        began = time.process_time()
        llm.generate(prompts, sampling(tokens), use_tqdm=False)
        both = time.process_time()
        llm.generate(prompts, sampling(1), use_tqdm=False)
        print("TIME", 2 * both - began - time.process_time(), flush=True)


def ask(process, word):
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise RuntimeError("the engine ended")


def throughput(sequences=8, length=4096, tokens=33, rounds=7):
    """On one thread, in seconds of the processor: machines that do other things as well can be compared."""
    one = {"OMP_NUM_THREADS": "1", "GYRE_THREADS": "1"}
    environment = {**os.environ, **one, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    names = ["stock", "tq8+tq8", "tq8+tq4"]
    engines = {}
    for name in names:
        arguments = [sys.executable, __file__, "rounds", name, str(sequences), str(length), str(tokens)]
        engines[name] = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        ask(engines[name], "READY")
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:  # by turns: what else the machine does hits all of them
            engines[name].stdin.write("\n")
            engines[name].stdin.flush()
            times[name].append(float(ask(engines[name], "TIME").split()[1]))
    made = sequences * (tokens - 1)
    stock = statistics.median(times["stock"])
    for name in names:
        middle = statistics.median(times[name])
        spread = f"{made / max(times[name]):.0f} to {made / min(times[name]):.0f}"
        print(f"{name:10} {made / middle:7.1f} tokens/s ({spread})  {stock / middle:.2f}x", flush=True)
        engines[name].stdin.close()
        engines[name].wait()


def capacity(memory, tokens=1024):
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    rows = {}
    for name in FORMATS:
        arguments = [sys.executable, __file__, "hold", name, str(memory), str(tokens)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        row = rows[name] = json.loads(lines[-1].removeprefix("RESULT "))
        more = row["requests"] / rows["stock"]["requests"]
        print(
            f"{name:10} {row['bytes']:7.0f} bytes a token, {row['tokens']:7d} tokens, {row['requests']:4d} requests of "
            f"{tokens} ({row['ran'] or '-'} ran at once), {more:.2f}x",
            flush=True,
        )


def overhead():
    """Python's time of a layer: what wrapping and recording cost, without running."""
    import torch

    import gyre
    from gyre.integrations.vllm.config import Formats
    from gyre.integrations.vllm.pages import LayerPages, Queue

    def micros(action, count=20_000):  # of this thread: others do not count
        for _ in range(count // 10):
            action()
        best = []
        for _ in range(5):
            began = time.thread_time()
            for _ in range(count // 5):
                action()
            best.append((time.thread_time() - began) / (count // 5) * 1e6)
        return min(best)

    queue, formats = Queue(torch.device("cpu")), Formats()
    cache = torch.zeros(64, 1, 16, formats.token_bytes(2, 128, 128), dtype=torch.uint8)
    layer = LayerPages(queue, cache, formats, 2, 128, 128, 16)
    k, v, q, out = torch.randn(1, 2, 128), torch.randn(1, 6, 128)[:, :2], torch.randn(1, 8, 128), torch.empty(1, 8, 128)
    table, numbers = torch.ones(1, 32, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    step = queue.step(torch.tensor([17]), table, numbers[1:], numbers, None, 1, 2)

    run, Queue.run = Queue.run, lambda self: self.encoder.clear()
    print(
        f"a tensor by DLPack's C functions {micros(lambda: queue.wrap(k)):.2f} us, by __dlpack__ "
        f"{micros(lambda: gyre.from_dlpack(k.__dlpack__())):.2f} us"
    )
    layers = micros(lambda: (layer.write(k, v, step.slots), layer.attend(q, out, step, 0.1)))
    Queue.run = run
    print(f"a layer: kv_write and attention wrapped and recorded {layers:.1f} us")
    print(f"for comparison, torch: k.add(1) {micros(lambda: k.add(1)):.1f} us")


def latent(rounds=15):
    """A decode call of vLLM's CPU kernel for MLA and of latent pages, alternating, on one thread; the least and the median of its
    CPU time, in ms."""
    os.environ.update(OMP_NUM_THREADS="1", GYRE_THREADS="1")  # before torch and vLLM are loaded
    import torch
    import vllm._custom_ops as ops

    from gyre.integrations.vllm.config import Formats
    from gyre.integrations.vllm.pages import LayerPages, Queue

    queue, scale = Queue(torch.device("cpu")), 192**-0.5
    for heads, requests, keys in ((16, 1, 8192), (16, 4, 4096), (128, 1, 8192)):
        rows = torch.randn(requests * keys, 1, 576, dtype=torch.bfloat16)
        q, lengths = torch.randn(requests, heads, 576, dtype=torch.bfloat16), torch.full((requests,), keys, dtype=torch.int32)
        out, starts = torch.zeros(requests, heads, 512, dtype=torch.bfloat16), torch.arange(requests + 1, dtype=torch.int32)

        def table(page):
            return torch.arange(requests * keys // page, dtype=torch.int32).view(requests, -1)

        def gyres(k, v, page):
            formats, step = Formats(k, v), queue.step(lengths, table(page), lengths, starts, None, 1, keys)
            memory = torch.zeros(len(rows) // page, formats.page_bytes(1, 512, 64, page, True), dtype=torch.uint8)
            layer = LayerPages(queue, memory, formats, 1, 512, 64, page, latent=True)
            layer.write(rows[..., :512], rows[..., 512:], queue.wrap(torch.arange(len(rows))))
            return lambda: layer.attend(q, out, step, scale)

        cache, pages = rows.view(-1, 16, 576), table(16)
        calls = {"vLLM bf16, pages of 16": lambda: ops.mla_decode_kvcache_cpu(out, q, cache, scale, pages, lengths)}
        for k, v, page in (("bf16", "bf16", 16), ("bf16", "bf16", 64), ("tq8", "tq8", 64), ("tq4", "tq8", 64), ("tq4", "tq8", 16)):
            calls[f"Gyre {k} + {v}, pages of {page}"] = gyres(k, v, page)
        times = {name: [] for name in calls}
        for _ in range(rounds + 1):
            for name, call in calls.items():
                began = time.thread_time()
                call()
                times[name].append((time.thread_time() - began) * 1e3)
        for name, all_times in times.items():
            print(f"{heads} heads, {requests} x {keys}, {name}: {min(all_times[1:]):.2f} ({statistics.median(all_times[1:]):.2f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["capacity", "throughput", "overhead", "latent", "hold", "rounds"])
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    if arguments.what == "hold":
        hold(arguments.rest[0], *map(int, arguments.rest[1:]))
    elif arguments.what == "rounds":
        serve_rounds(arguments.rest[0], *map(int, arguments.rest[1:]))
    elif arguments.what == "capacity":
        capacity(*(map(int, arguments.rest) if arguments.rest else (64 << 20,)))
    elif arguments.what == "latent":
        latent(*map(int, arguments.rest))
    elif arguments.what == "throughput":
        throughput(*map(int, arguments.rest))
    else:
        overhead()


if __name__ == "__main__":
    main()
