"""`vllm serve` with Gyre's attention, asked by several clients at once; for vllm_engine.py."""

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

from vllm_reference import PROMPTS, TOKENS


def free_port():
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until_up(server, port, seconds=300):
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


def serve_and_ask(folder, formats):
    """Answers to PROMPTS, all asked at once."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    command += ["--served-model-name", "model", "--port", str(port), "--host", "127.0.0.1", "--skip-tokenizer-init"]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--max-num-seqs", "16", "--enforce-eager", "--attention-backend", "CUSTOM"]
    command += ["--additional-config", json.dumps({"gyre": formats})]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, env=environment)
    try:
        wait_until_up(server, port)
        ask, who = asker(port)
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as threads:
            return list(threads.map(ask, PROMPTS)), f"{len(PROMPTS)} at once, client: {who}"
    finally:
        server.terminate()
        server.wait(60)
