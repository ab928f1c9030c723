"""`vllm serve` with Gyre's attention, asked by several clients at once; for vllm_engine.py and vllm_load.py."""

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

from vllm_reference import TOKENS, prompts


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_up(server, port, seconds=900):
    for _ in range(seconds):
        if server.poll() is not None:
            raise AssertionError(f"RuntimeError: vllm serve ended with {server.returncode}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(1)
    raise AssertionError("TimeoutError: vllm serve did not come up")


def asker(port):
    """A function that asks for the answer to one prompt, and who it is."""
    options = dict(model="model", max_tokens=TOKENS, temperature=0)
    extra = {"ignore_eos": True, "return_token_ids": True}
    try:
        import openai
    except ImportError:

        def ask(prompt):
            body = json.dumps({"prompt": prompt, **options, **extra}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)["choices"][0]["token_ids"]

        return ask, "plain HTTP"
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")

    def ask(prompt):
        made = client.completions.create(prompt=prompt, extra_body=extra, **options)
        return made.choices[0].model_dump()["token_ids"]

    return ask, f"openai {openai.__version__}"


@contextlib.contextmanager
def serving(folder, gyres, *options):
    """The process of a server and its port. Without `gyres`, options of the plugin, it has vLLM's own attention."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--served-model-name", "model", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager", *options]
    if gyres:
        command += ["--attention-backend", "CUSTOM", "--additional-config", json.dumps({"gyre": gyres})]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, env=environment)
    try:
        wait_until_up(server, port)
        yield server, port
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def serve_and_ask(folder, gyres, memory):
    """Answers to the prompts of vllm_reference.py, all asked at once."""
    options = ("--skip-tokenizer-init", "--dtype", "float32", "--kv-cache-memory-bytes", str(memory))
    with serving(folder, gyres, *options) as (_, port):
        ask, who = asker(port)
        asked = prompts(folder)
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(ask, asked)), f"{len(asked)} at once, client: {who}"
