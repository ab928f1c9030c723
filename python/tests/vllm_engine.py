"""vLLM with Gyre's attention against transformers with the same cache format: `make vllm`. Every scenario is a process
of its own; a table says what ran. vllm_engine.py [SCENARIO...] runs some; --model FOLDER runs those that compare tokens of
tiny-d128 with another model."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from vllm_reference import MLA, TOKENS, model_folder, prompts
from vllm_scenario import (
    CALIBRATED,
    ONE_MODEL,
    SCENARIOS,
    SWA,
    TINY,
    Run,
    Skipped,
    cache_memory,
    calibration_of,
    compare,
    scenario,
    want,
)


@scenario(k="f32", v="f32")
def alone_f32(folder, reference, k, v):
    run = Run(folder, k, v)
    return compare([run.answers([prompt])[0] for prompt in run.prompts], reference)


@scenario()
def alone(folder, reference, k, v):
    run = Run(folder, k, v)
    return compare([run.answers([prompt])[0] for prompt in run.prompts], reference)


@scenario(k="f32", v="f32")
def batched_f32(folder, reference, k, v):
    return compare(Run(folder, k, v).answers(), reference)


@scenario()
def batched(folder, reference, k, v):
    return compare(Run(folder, k, v).answers(), reference)


@scenario()
def compiled(folder, reference, k, v):
    return compare(Run(folder, k, v, enforce_eager=False).answers(), reference)


@scenario()
def prefix_hits(folder, reference, k, v):
    run = Run(folder, k, v, block_size=16)
    first, second = run.answers(), run.answers()
    want(run.cached > 0.3 * sum(map(len, run.prompts)), f"only {run.cached} tokens were in the cache")
    want(first == second, "answers with and without a prefix hit differ")
    return compare(second, reference) + f"; {run.cached} tokens from the cache, the same tokens as without"


@scenario()
def chunked_prefill(folder, reference, k, v):
    run = Run(folder, k, v, block_size=16, max_num_batched_tokens=64, long_prefill_token_threshold=24)
    return compare(run.answers(), reference) + "; chunks of 24 tokens"


@scenario()
def preempted(folder, reference, k, v):
    pages = sum(len(prompt) + TOKENS for prompt in prompts(folder)) // 32  # for half of all tokens
    length = min(16 * (pages - 1), 2048)
    run = Run(folder, k, v, block_size=16, num_gpu_blocks_override=pages, max_model_len=length, enable_prefix_caching=False)
    answers = run.answers()
    count = run.metric("vllm:num_preemptions")
    want(count > 0, "nothing was preempted")
    return compare(answers, reference) + f"; {count:.0f} preemptions"


# numba compiles for instructions that a virtual machine may hide; every aarch64 server has these.
_NUMBA = {"NUMBA_CPU_NAME": os.environ.get("NUMBA_CPU_NAME", "neoverse-n1")} if os.uname().machine == "aarch64" else {}


_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@scenario(environment=_NUMBA)
def speculation(folder, reference, k, v):
    return speculate(Run(folder, k, v, block_size=16, speculative_config=_NGRAM), reference)


def speculate(run, reference):
    answers = run.answers()
    accepted, drafted = (run.metric(f"vllm:spec_decode_num_{w}_tokens") for w in ("accepted", "draft"))
    want(0 < accepted < drafted, f"{accepted} of {drafted} draft tokens were accepted")
    return compare(answers, reference) + f"; {accepted:.0f} of {drafted:.0f} draft tokens accepted"


@scenario(k="tq8,f16,tq6,tq8", v="tq4,f16,tq6,tq4")
def layers_differ(folder, reference, k, v):
    run = Run(folder, "tq8", "tq4", {"1": {"k": "f16", "v": "f16"}, "2": {"k": "tq6", "v": "tq6"}}, block_size=16)
    return compare(run.answers(), reference)


@scenario(SWA, k="f32", v="f32")
def windows_f32(folder, reference, k, v):
    run = Run(folder, k, v, block_size=16, kv_cache_memory_bytes=200 << 20)
    first, second = run.answers(), run.answers()
    want(first == second and run.cached > 0, "answers with and without a prefix hit differ")
    return compare(first, reference)


@scenario(SWA)
def windows(folder, reference, k, v):
    return compare(Run(folder, k, v, block_size=16, kv_cache_memory_bytes=100 << 20).answers(), reference)


_TWO = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}


def need_even_heads(folder):
    heads = json.loads((folder / "config.json").read_text())["num_attention_heads"]
    if heads % 2:
        raise Skipped(f"{heads} heads, which vLLM does not divide between 2 processes")


@scenario(environment=_TWO)
def tensor_parallel(folder, reference, k, v):
    need_even_heads(folder)
    return compare(Run(folder, k, v, tensor_parallel_size=2).answers(), reference)


@scenario(environment=_TWO)
def pipeline_parallel(folder, reference, k, v):
    # Without compilation vLLM's own buffers for the second stage are missing.
    return compare(Run(folder, k, v, pipeline_parallel_size=2, enforce_eager=False).answers(), reference)


@scenario(k="tq8", v="tq8", calibrated=True)
def calibrated(folder, reference, k, v):
    run = Run(folder, k, v, block_size=16, max_num_batched_tokens=512, long_prefill_token_threshold=200)
    first, second = run.answers(), run.answers()
    want(first == second and run.cached > 0, "answers with and without a prefix hit differ")
    return compare(second, reference) + "; chunks and prefix hits"


@scenario(k="tq8", v="tq8", calibrated=True, environment=_TWO)
def calibrated_parallel(folder, reference, k, v):
    need_even_heads(folder)
    return compare(Run(folder, k, v, tensor_parallel_size=2).answers(), reference)


def absorb_prompts():
    """As in batch-invariant mode, in which vLLM does not start without Triton: prompts, too, are computed over what is stored."""
    from gyre.integrations.vllm import mla

    mla.envs = argparse.Namespace(VLLM_BATCH_INVARIANT=True)


@scenario(MLA, k="own", v="own")
def mla(folder, reference, k, v):
    """16-bit latents against transformers' own cache."""
    return compare(Run(folder, "f16", "f16").answers(), reference)


@scenario(MLA, k="own", v="own", environment=_NUMBA)
def mla_speculation(folder, reference, k, v):
    return speculate(Run(folder, "f16", "f16", speculative_config=_NGRAM), reference)


def in_chunks(folder, k, v):
    """Answers in chunks, then from the prefix cache. vLLM turns both off for MLA on CPUs without AMX: this turns them on again."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config.__func__

    def with_chunks(platform, config):
        scheduler, before = config.scheduler_config, config.scheduler_config.max_num_batched_tokens
        update(platform, config)
        scheduler.enable_chunked_prefill = config.cache_config.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = before

    CpuPlatform.check_and_update_config = classmethod(with_chunks)
    run = Run(folder, k, v, max_num_batched_tokens=128, long_prefill_token_threshold=48)
    answers = run.answers(), run.answers()
    want(run.cached > 1000, f"only {run.cached} tokens were in the cache")
    return *answers, f"; chunks of 48 tokens, {run.cached} tokens from the cache"


@scenario(MLA, k="own", v="own")
def mla_chunks(folder, reference, k, v):
    first, second, text = in_chunks(folder, "f16", "f16")
    return f"{compare(first, reference)}, {compare(second, reference)}{text}"


# transformers orders rotary coordinates differently, which a compressed rotary part notices.
@scenario(MLA, k="tq4", v="f16")
def mla_invariant(folder, reference, k, v):
    absorb_prompts()  # GyreCache does it, too
    first, second, text = in_chunks(folder, k, v)
    want(first == second, "answers with and without a prefix hit differ")
    return compare(second, reference) + text


# Error feedback goes over all 512 coordinates: where the last bit of one differs, so do the codes behind it.
_FEEDBACK_TIE = 0.15


@scenario(MLA, k="tq8", v="tq8", calibrated=True)
def mla_calibrated(folder, reference, k, v):
    absorb_prompts()
    first, second, text = in_chunks(folder, k, v)
    want(first == second, "answers with and without a prefix hit differ")
    return compare(second, reference, _FEEDBACK_TIE) + text


@scenario(MLA, k="tq8", v="tq8", calibrated=True, environment=_TWO)
def mla_calibrated_parallel(folder, reference, k, v):
    absorb_prompts()
    return compare(Run(folder, k, v, tensor_parallel_size=2).answers(), reference, _FEEDBACK_TIE)


@scenario(MLA, k="own", v="own")
def mla_compiled(folder, reference, k, v):
    return compare(Run(folder, "f16", "f16", enforce_eager=False).answers(), reference)


@scenario(MLA, k="own", v="own", environment=_TWO)
def mla_parallel(folder, reference, k, v):
    return compare(Run(folder, "f16", "f16", tensor_parallel_size=2).answers(), reference)


@scenario(MLA, k="own", v="own")
def mla_layer(folder, reference, k, v):
    from vllm_mla_layer import calibrated, refusals, sizes, steps

    return "; ".join((sizes(), steps(), calibrated(), refusals()))


@scenario()
def server(folder, reference, k, v):
    from vllm_server import serve_and_ask

    answers, client = serve_and_ask(folder, {"k": k, "v": v}, cache_memory(folder))
    return compare(answers, reference) + f"; {client}"


@scenario(k="f32", v="f32")
def not_asked_for(folder, reference, k, v):
    """vLLM's own attention, which gives the tokens that f32 pages give."""
    run = Run(folder, k, v, attention_backend=None)
    backend = run.llm.llm_engine.vllm_config.attention_config.backend
    layers = run.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    names = {type(layer.impl).__name__ for layer in layers.values()}
    want(names == {"CPUAttentionBackendImpl"}, f"layers have {names}")
    return compare(run.answers(), reference) + f"; vLLM's own attention with backend {backend}"


@scenario()
def refusals(folder, reference, k, v):
    cases = [
        (dict(additional_config={"gyre": {"k": "int4"}}), "int4"),
        (dict(additional_config={"gyre": {"layers": {"x": {}}}}), "sliding_window"),
        (dict(kv_cache_dtype="fp8"), "--kv-cache-dtype fp8"),
        (dict(block_size=2048), "--block-size"),
        (dict(additional_config={"gyre": {"calibration": "none.gyrecal"}}), "none.gyrecal"),
    ]
    for options, words in cases:
        try:
            Run(folder, k, v, **options)
        except Exception as error:  # noqa: BLE001: vLLM wraps what a backend raises
            want(words in str(error), f"{options} was refused with: {error}")
        else:
            raise AssertionError(f"{options} was taken")
    return f"{len(cases)} wrong options refused"


@scenario()
def layer_features(folder, reference, k, v):
    from vllm_layer import features

    return features()


@scenario()
def layer_refusals(folder, reference, k, v):
    from vllm_layer import refusals

    return refusals()


def run_one(name, folder, reference):
    function, _, k, v, _ = SCENARIOS[name]
    try:
        text = "ok       " + function(folder, json.loads(reference.read_text()), k, v)
    except Skipped as reason:
        text = f"skipped  {reason}"
    print("\nRESULT", text, flush=True)  # a process of the engine's may have ended in the middle of a line


def run_process(arguments, environment, log):
    usual = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, **usual, **environment}
    with open(log, "w") as out:
        try:
            return subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=1800).returncode
        except subprocess.TimeoutExpired:
            print("TimeoutError: 30 minutes", file=out)
            return 124


def make_reference(reference, folder, k, v):
    """None, or who failed."""
    tests, is_calibrated, calibration = pathlib.Path(__file__).parent, k.startswith(CALIBRATED), calibration_of(folder)
    if is_calibrated and not calibration.exists():
        text = tests / "data" / "eval.txt"
        arguments = ["-m", "gyre.calibrate", folder, text, "--tokens", 4096, "--capacity", 2048, "--quiet", "--out", calibration]
        if run_process(arguments, {}, calibration.with_suffix(".log")) != 0:
            return f"gyre.calibrate: see {calibration.with_suffix('.log')}"
    if not reference.exists():
        log = reference.with_suffix(".log")
        arguments = [tests / "vllm_reference.py", reference, folder, k.removeprefix(CALIBRATED), v]
        if run_process(arguments + [calibration] * is_calibrated, {}, log) != 0:
            return f"transformers: see {log}"
    return None


def one_row(name, work, model):
    _, _, k, v, environment = SCENARIOS[name]
    folder, log = model_folder(model, work), work / f"{name}.log"
    if folder is None:
        return "skipped", f"{model} is not here: set GYRE_MODELS to the folder that has it"
    reference = work / f"{folder.name}-{k}-{v}.json"
    failed = make_reference(reference, folder, k, v)
    if failed:
        return "FAILED", failed
    code = run_process([__file__, "--one", name, folder, reference], environment, log)
    lines = log.read_text(errors="replace").splitlines()
    results = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
    if code == 0 and results:
        return results[-1].split(maxsplit=1)
    errors = [line for line in lines if "Error" in line]
    return "FAILED", f"{errors[-1].strip() if errors else f'exit {code}'} (see {log})"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=", ".join(SCENARIOS))
    parser.add_argument("--model", help="a folder: in place of tiny-d128, where tokens are compared")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help="where logs and answers are kept")
    arguments = parser.parse_args()
    if arguments.one:
        name, folder, reference = arguments.one
        return run_one(name, pathlib.Path(folder), pathlib.Path(reference))
    work = (arguments.work or pathlib.Path(tempfile.mkdtemp(prefix="gyre-vllm-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.scenarios or SCENARIOS:
        _, model, k, v, _ = SCENARIOS[name]
        if arguments.model and (model != TINY or name in ONE_MODEL):
            continue
        began, model = time.time(), arguments.model or model
        state, text = one_row(name, work, model)
        failed += state == "FAILED"
        row = f"{state:8}{name:20}{pathlib.Path(model).name:16}{k + '/' + v:34}"
        print(f"{row}{time.time() - began:5.0f} s  {text}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
