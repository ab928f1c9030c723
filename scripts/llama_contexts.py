#!/usr/bin/env python3
"""Contexts of llama.cpp with libggml-gyre.so against contexts without: does the library compute where it should, and are the
probabilities of the next token the same up to rounding? (docs/llama_cpp.md) After `make llama`.

Cache types and pairs of them, flash attention on, off and auto, 1 to 3 threads, two contexts that compute at once, a context that was
made and never used, one whose cache was restored, one that outlives ggml_backend_unload, and a second load.
usage: scripts/llama_contexts.py [--way wrap]
"""

import argparse
import ctypes as c
import os
import re
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import llama_model  # noqa: E402

CELLS = 512
# Flash attention, types of K and V, threads, and the largest KL divergence that rounding may cause.
CASES = [
    ("on", "f16", 1, 0.03),
    ("on", "f16", 3, 0.03),
    ("on", "bf16", 2, 0.03),
    ("on", "q8_0", 2, 0.03),
    ("on", "q8_0/q4_0", 2, 0.3),
    ("on", "q4_0/f16", 1, 0.3),
    ("on", "q5_1/q5_0", 3, 0.2),
    ("on", "iq4_nl", 2, 0.3),
    ("auto", "f16", 2, 0.03),
    ("auto", "q4_0", 2, 0.3),
    ("off", "f16", 2, 0.03),
]


class Stderr:
    """What the process writes to stderr."""

    def __enter__(self):
        self.file, self.before = tempfile.TemporaryFile(), os.dup(2)
        os.dup2(self.file.fileno(), 2)
        return self

    def __exit__(self, *_):
        os.dup2(self.before, 2)
        os.close(self.before)
        self.file.seek(0)
        self.text = self.file.read().decode(errors="replace")


def decode(context, tokens) -> np.ndarray:
    """Two pieces of a prompt, then single tokens; the probabilities after the last."""
    for piece in (tokens[:200], tokens[200:300], *([token] for token in tokens[300:304])):
        context.decode(piece)
    return context.probabilities()


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(p * np.log((p + 1e-30) / (q + 1e-30))))


class Check:
    def __init__(self, options):
        self.llama = llama_model.open_llama(options.bindings, options.ggml)
        self.options, self.failed = options, 0
        self.model = llama_model.load_model(self.llama, options.model)
        self.tokens = np.random.default_rng(1).integers(100, 40000, 304).tolist()

    def context(self, flash: str, kind: str, threads: int):
        return llama_model.Context(self.llama, self.model, kind, CELLS, threads, flash)

    def free(self, context) -> tuple[int, int]:
        """Attention nodes that the library computed, and that it left to ggml."""
        with Stderr() as stderr:
            self.llama.llama_free(context.handle)
        found = re.search(r"computed (\d+) attention nodes, left (\d+)", stderr.text)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def expect(self, name: str, is_right: bool, detail: str = ""):
        print(f"{'ok' if is_right else 'FAILED':6} {name} {detail}", flush=True)
        self.failed += not is_right

    def load(self) -> int:
        return llama_model.load_library(self.llama, self.options.library, self.options.way)

    def cases(self, without: list):
        for (flash, kind, threads, bound), theirs in zip(CASES, without):
            context = self.context(flash, kind, threads)
            apart = divergence(theirs, decode(context, self.tokens))
            computed, left = self.free(context)
            takes = flash != "off" and kind != "iq4_nl"
            self.expect(f"-fa {flash}, {kind}, {threads} threads", apart <= bound and (computed > 0) == takes, f"KL {apart:.1e}, {computed} computed, {left} left")

    def two_at_once(self, theirs: np.ndarray):
        contexts = [self.context("on", "q8_0", 2) for _ in range(2)]
        results = [None, None]

        def work(i):
            results[i] = decode(contexts[i], self.tokens)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = [self.free(context)[0] for context in contexts]
        self.expect("two contexts at once", np.array_equal(*results) and divergence(theirs, results[0]) <= 0.03 and min(counts) > 0, f"{counts} computed")

    def unused(self):
        """A context that was made and never computes must not keep another from using the library."""
        context = self.context("auto", "f16", 2)
        unused = self.context("auto", "f16", 2)
        decode(context, self.tokens)
        computed, left = self.free(context)
        self.free(unused)
        self.expect("beside a context that is never used", computed > 0, f"{computed} computed, {left} left")

    def restored(self):
        """llama.cpp computes the tokens that follow a restored cache with the graph of the first of them."""
        prompt = self.context("on", "q8_0", 2)
        prompt.decode(self.tokens[:200])
        for flash in ("on", "auto"):
            context = self.context(flash, "q8_0", 2)
            prompt.copy_to(context)
            for token in self.tokens[200:210]:
                context.decode([token])
            computed, left = self.free(context)
            all_of_them = 10 * self.llama.llama_model_n_layer(self.model)
            self.expect(f"after a restored cache, -fa {flash}", computed == all_of_them, f"{computed} computed, {left} left")
        self.free(prompt)

    def unload(self, registry: int):
        context = self.context("on", "q8_0", 2)
        first = decode(context, self.tokens)
        unload = self.llama._lib.ggml_backend_unload
        unload.restype, unload.argtypes = None, [c.c_void_p]
        unload(registry)
        context.forget(0)
        same = np.array_equal(first, decode(context, self.tokens))
        self.expect("a context that outlives ggml_backend_unload", same and self.free(context)[0] > 0)
        self.expect("a second load", self.load() == registry and self.load() == registry)
        self.model = llama_model.load_model(self.llama, self.options.model)
        context = self.context("on", "q8_0", 2)
        decode(context, self.tokens)
        self.expect("a context after it", self.free(context)[0] > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_model.add_paths(parser)
    options = parser.parse_args()
    os.environ["GYRE_GGML_VERBOSE"] = "1"
    check = Check(options)
    without = []
    for flash, kind, threads, _ in CASES:
        context = check.context(flash, kind, threads)
        without.append(decode(context, check.tokens))
        check.free(context)
    registry = check.load()
    check.model = llama_model.load_model(check.llama, options.model)
    check.cases(without)
    check.two_at_once(without[3])
    check.unused()
    check.restored()
    check.unload(registry)
    sys.exit(f"{check.failed} checks failed" if check.failed else 0)


if __name__ == "__main__":
    main()
