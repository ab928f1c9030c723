#!/usr/bin/env python3
"""One engine of vLLM on one GPU, driven by drive.py: engine.py JOB, a JSON object. Waits for a line on stdin after the
imports, so that the next engines can load while one runs. Appends its result to $RESULTS.

The model has Llama-3.1-8B's shape and random weights. JOB:

    name             of the row
    backend, dtype   vLLM's attention backend and --kv-cache-dtype
    gyre             formats of Gyre's cache: {"k": "tq8", "v": "tq4"}
    layers           32
    sizes            numbers of tokens for which decoding is captured; the largest is also the most requests
    check            tokens and logprobs of 8 prompts, and how long the first call took
    real             [[requests, context], ...]: prompts are computed, then decoded from
    decode           [[requests, context], ...]: decoding alone, see Computed
    profile          the longest kernels of a prompt's and of a decode step
    same             answers with chunks, prefix hits and other batches must be equal to those without
    preempt          answers with preemption
    pieces           no engine: which products and which of Gyre's ops depend on the batch, bit for bit
    compile, eager   torch.compile, or neither that nor graphs; else graphs of decoding alone
    args             other arguments of vllm.LLM
    env              of the process; drive.py sets it
"""

import contextlib
import json
import os
import statistics
import sys
import time
import traceback

import answers

JOB = json.loads(sys.argv[1])
RESULT = {"name": JOB["name"], "job": JOB}
BEGAN = time.time()
STEP_TOKENS = JOB.get("args", {}).get("max_num_batched_tokens", 8192)
SHAPE = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=131072,
    hidden_act="silu",
    bos_token_id=128000,
    eos_token_id=128001,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    attention_bias=False,
    mlp_bias=False,
    initializer_range=0.02,
)


def say(*words):
    print(f"[{time.time() - BEGAN:7.2f}]", JOB["name"], *words, flush=True)


def found(name):
    """Adds a row to a list of the result, and prints it."""

    def add(row):
        RESULT.setdefault(name, []).append(row)
        say(name.upper(), json.dumps(row))

    return add


def model_folder(layers):
    path = os.path.join(os.environ.get("WORK", "/tmp"), f"model-{layers}")
    os.makedirs(path, exist_ok=True)
    temporary = f"{path}/config.json.{os.getpid()}"
    with open(temporary, "w") as out:
        json.dump({**SHAPE, "num_hidden_layers": layers}, out)
    os.replace(temporary, f"{path}/config.json")
    return path


def use_random_weights():
    """Dummy weights as large as a model's (vLLM's own are within 0.001), the same in every process."""
    import torch
    import vllm.model_executor.model_loader.dummy_loader as loader

    count = [0]

    def fill(param, *_, **__):
        value = getattr(param, "dummy_weight_value", None)
        if value is not None:
            param.data.fill_(value)
        elif not torch.is_floating_point(param) or param.numel() <= 1:
            return
        elif param.dim() == 1:
            param.data.fill_(1.0)
        else:
            count[0] += 1
            generator = torch.Generator(device=param.device)
            generator.manual_seed(1000 + count[0])
            is_embedding = param.shape[0] > 100000 and count[0] == 1
            param.data.normal_(0.0, 1.0 if is_embedding else param.shape[-1] ** -0.5, generator=generator)

    loader.initialize_single_dummy_weight = fill


def check(llm):
    began = time.perf_counter()
    prompts = answers.prompts_of([5, 17, 100, 257, 512, 1000, 1500, 2000], 7)
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], answers.sampling(16, logprobs=5), use_tqdm=False)
    RESULT["first_s"] = round(time.perf_counter() - began, 3)
    RESULT["check"] = [
        {
            "tokens": list(out.outputs[0].token_ids),
            "first": {int(t): round(float(x.logprob), 4) for t, x in out.outputs[0].logprobs[0].items()},
        }
        for out in outs
    ]
    say("first call", RESULT["first_s"], "s;", [row["tokens"][:5] for row in RESULT["check"]])


class Computed:
    """A KV connector for the scheduler alone: it says that all of a prompt but its last token is in the cache. The pages
    hold what fill_pages() copied there."""

    supports_divergent_local_hybrid_hits = False

    def __bool__(self):
        return True

    def get_num_new_matched_tokens(self, request, local):
        return request.num_tokens - 1 - local, False

    def has_pending_block_frees(self):
        return False

    def has_pending_push_work(self):
        return False

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *a, **k: None


@contextlib.contextmanager
def scheduled_tokens(scheduler):
    """The tokens of each step, drafts included."""
    counts, schedule = [], scheduler.schedule

    def counted(*a, **k):
        made = schedule(*a, **k)
        counts.append(made.total_num_scheduled_tokens)
        return made

    scheduler.schedule = counted
    try:
        yield counts
    finally:
        scheduler.schedule = schedule


def measure(llm, requests, context, computed, steps=80):
    import torch
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    chunks = 0 if computed else -(-requests * context // STEP_TOKENS)
    new_tokens = 8 * (chunks + steps + 30)
    prompts = [[11] * context] * requests if computed else answers.prompts_of([context] * requests, 3)
    row = {"kind": f"{'d' if computed else 'r'}{requests}x{context}", "requests": requests, "context": context}
    names = [f"{row['kind']}-{i}" for i in range(requests)]
    if computed:
        scheduler.connector = Computed()
    for name, prompt in zip(names, prompts):
        engine.add_request(name, {"prompt_token_ids": prompt}, answers.sampling(new_tokens, output_kind=RequestOutputKind.DELTA))
    torch.cuda.synchronize()
    began = last = time.perf_counter()
    are_running, times = False, []
    with scheduled_tokens(scheduler) as counts:
        while engine.has_unfinished_requests() and len(times) < steps:
            made = [len(out.outputs[0].token_ids) for out in engine.step()]
            now = time.perf_counter()
            if are_running:
                times.append((now - last, sum(made)))
            elif sum(n > 0 for n in made) >= requests or (computed and now - began > 15):
                are_running = True
                row["until_all_run_s"] = round(now - began, 4)
                row["running"] = len(made)
                scheduler.connector = None
            last = now
    row["step_tokens"] = statistics.median(counts[-steps // 2 :]) if counts else 0
    scheduler.connector = None
    kept = times[5:]
    if kept:
        seconds = [t for t, _ in kept]
        row["step_ms"] = round(1e3 * statistics.median(seconds), 3)
        row["tokens_s"] = round(sum(n for _, n in kept) / sum(seconds), 1)
        row["min_ms"], row["max_ms"] = round(1e3 * min(seconds), 3), round(1e3 * max(seconds), 3)
    if not computed:
        row["prompt_tokens_s"] = round(requests * context / row.get("until_all_run_s", float("nan")), 1)
    if JOB.get("profile"):
        row["kernels"] = profile(engine, 4)
    engine.abort_request(names)
    for _ in range(4):
        engine.step()
    RESULT.setdefault("rows", []).append(row)
    say("ROW", json.dumps({name: value for name, value in row.items() if name != "kernels"}))


def profile(engine, steps):
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    rows = sorted(traced.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    return [[e.key[:90], round(e.self_device_time_total / steps / 1e3, 4), e.count / steps] for e in rows]


def profile_prompts(llm):
    """Kernels of whole steps of prompts, milliseconds a step."""
    engine, names = llm.llm_engine, [f"p{i}" for i in range(4 * STEP_TOKENS // 4096)]
    for name, prompt in zip(names, answers.prompts_of([4096] * len(names), 5)):
        engine.add_request(name, {"prompt_token_ids": prompt}, answers.sampling(4))
    engine.step()
    RESULT["prompt_kernels"] = profile(engine, 2)
    engine.abort_request(names)
    for _ in range(4):
        engine.step()


def fill_pages(llm, valid_tokens):
    """Fills all pages with copies of those that the last real run wrote."""
    config = llm.llm_engine.vllm_config
    for layer in config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        cache = cache[0] if isinstance(cache, (list, tuple)) else cache
        if cache is None or cache.numel() == 0:
            continue
        count = min(max(1, valid_tokens // config.cache_config.block_size - 8), cache.shape[0] // 2)
        for first in range(count + 1, cache.shape[0], count):
            copied = min(count, cache.shape[0] - first)
            cache[first : first + copied].copy_(cache[1 : 1 + copied])


def arguments():
    sizes = JOB.get("sizes", [1, 2, 4, 8, 16, 32, 64])
    args = dict(
        model=model_folder(JOB.get("layers", 32)),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=JOB.get("max_len", 4608),
        max_num_seqs=JOB.get("requests", max(sizes)),
        max_num_batched_tokens=STEP_TOKENS,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        disable_log_stats=True,
        kv_cache_dtype=JOB.get("dtype", "auto"),
        seed=0,
    )
    if JOB.get("backend"):
        args["attention_backend"] = JOB["backend"]
    if JOB.get("gyre"):
        args["additional_config"] = {"gyre": JOB["gyre"]}
    if JOB.get("eager"):
        args["enforce_eager"] = True
    elif JOB.get("compile"):
        args["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    else:
        args["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {**args, **JOB.get("args", {})}


def describe(llm):
    config = llm.llm_engine.vllm_config
    layer = next(iter(config.compilation_config.static_forward_context.values()))
    cache = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
    RESULT.update(
        block_size=config.cache_config.block_size,
        tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        v2=config.use_v2_model_runner,
        graphs=str(config.compilation_config.cudagraph_mode),
        mode=str(config.compilation_config.mode),
        impl=type(layer.impl).__name__,
        fa=getattr(layer.impl, "vllm_flash_attn_version", None),
        cache=[str(cache.dtype), list(cache.shape)],
    )
    say("engine", {name: RESULT[name] for name in ("start_s", "block_size", "tokens", "v2", "graphs", "impl", "fa", "cache")})


def parts(llm):
    """What the job asks for, in order."""
    if JOB.get("check"):
        yield "check", lambda: check(llm)
    if JOB.get("same"):
        yield "same", lambda: answers.same(llm, found("same"))
    if JOB.get("preempt"):
        yield "preempt", lambda: answers.preempt(llm, found("same"))
    for requests, context in JOB.get("real", []):
        yield f"real {requests} x {context}", lambda r=requests, c=context: measure(llm, r, c, computed=False, steps=30)
    if JOB.get("profile") and JOB.get("real"):
        yield "profile", lambda: profile_prompts(llm)
    if JOB.get("real") and JOB.get("decode"):
        requests, context = JOB["real"][-1]
        yield "fill", lambda: fill_pages(llm, requests * context)
    for requests, context in JOB.get("decode", []):
        yield f"decode {requests} x {context}", lambda r=requests, c=context: measure(llm, r, c, computed=True, steps=40)


def main():
    import torch
    import vllm
    from vllm import LLM

    import pieces

    use_random_weights()
    RESULT["vllm"], RESULT["torch"] = vllm.__version__, torch.__version__
    print("READY", flush=True)
    sys.stdin.readline()
    global BEGAN
    BEGAN = time.time()
    if JOB.get("pieces"):
        pieces.run(torch.device("cuda:0"), found("pieces"))
        return
    llm = LLM(**arguments())
    RESULT["start_s"] = round(time.time() - BEGAN, 2)
    describe(llm)
    for name, run in parts(llm):
        try:
            run()
        except Exception:  # the other parts may still run
            traceback.print_exc()
            RESULT.setdefault("errors", []).append([name, traceback.format_exc()[-1500:]])
            say("ERROR in", name)
    free, total = torch.cuda.mem_get_info()
    RESULT["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    RESULT["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 3)
    RESULT["used_gb"] = round((total - free) / 1e9, 3)
    say("memory: torch's peak", RESULT["peak_gb"], "GB, reserved", RESULT["reserved_gb"], "GB, in use", RESULT["used_gb"], "GB")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        RESULT["error"] = traceback.format_exc()[-3000:]
    finally:
        with open(os.environ["RESULTS"], "a") as results:
            results.write(json.dumps(RESULT) + "\n")
        say("END")
        sys.stdout.flush()
        os._exit(0)
