#!/usr/bin/env python3
"""Tokens per second of a model in llama.cpp with and without libggml-gyre.so, in one process, turn by turn (docs/llama_cpp.md).

Uses the bindings of llama-cpp-python over the libraries that `make llama` builds. One context is made before the library is
loaded, one after. The second reads the prompt; its cache is copied to the first; then both decode the same tokens.
"""

import argparse
import ctypes as c
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
FLASH = {"auto": -1, "off": 0, "on": 1}
BATCH = 512


class Context:
    """kind: the type of K and V, or K/V."""

    def __init__(self, llama, model, kind: str, cells: int, threads: int, flash: str = "on"):
        self.llama, self.model = llama, model
        options = llama.llama_context_default_params()
        options.n_ctx = options.n_batch = cells
        options.n_ubatch = BATCH
        options.n_seq_max, options.kv_unified = min(256, -(-cells // BATCH)), True  # for fill()
        options.n_threads = options.n_threads_batch = threads
        options.type_k, options.type_v = [TYPES[name] for name in (kind.split("/") * 2)[:2]]
        options.flash_attn_type = FLASH[flash]
        self.handle = llama.llama_init_from_model(model, options)
        if not self.handle:
            raise SystemExit("no context")
        self.memory = llama.llama_get_memory(self.handle)

    def decode(self, tokens) -> float:
        array = (self.llama.llama_token * len(tokens))(*tokens)
        batch = self.llama.llama_batch_get_one(array, len(tokens))
        begin = time.perf_counter()
        if self.llama.llama_decode(self.handle, batch) != 0:
            raise SystemExit("llama_decode failed")
        return time.perf_counter() - begin

    def fill(self, tokens) -> float:
        """Puts tokens into the cache as pieces that do not see each other, then joins them: the cells are the same, without the
        attention of a long prompt."""
        begin = time.perf_counter()
        batch = self.llama.llama_batch_init(BATCH, 0, 1)
        for first in range(0, len(tokens), BATCH):
            piece = tokens[first : first + BATCH]
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, 0
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, first // BATCH
            if self.llama.llama_decode(self.handle, batch) != 0:
                raise SystemExit("llama_decode failed")
            if first > 0:
                self.llama.llama_memory_seq_cp(self.memory, first // BATCH, 0, -1, -1)
                self.llama.llama_memory_seq_rm(self.memory, first // BATCH, -1, -1)
        self.llama.llama_batch_free(batch)
        return time.perf_counter() - begin

    def forget(self, position: int):
        self.llama.llama_memory_seq_rm(self.memory, 0, position, -1)

    def probabilities(self) -> np.ndarray:
        size = self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(self.model))
        logits = np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.handle, -1), (size,)).astype(np.float64)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def copy_to(self, other: "Context"):
        size = self.llama.llama_state_seq_get_size(self.handle, 0)
        data = (c.c_uint8 * size)()
        self.llama.llama_state_seq_get_data(self.handle, data, size, 0)
        if self.llama.llama_state_seq_set_data(other.handle, data, size, 0) == 0:
            raise SystemExit("the cache cannot be copied")


def measure(llama, contexts, depth: int, options):
    stock, gyre = contexts
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(gyre.model))
    tokens = np.random.default_rng(1).integers(100, vocabulary, depth + 1).tolist()
    if options.fill:
        prompt = gyre.fill(tokens[:depth])
    else:
        prompt = sum(gyre.decode(tokens[at : min(at + BATCH, depth)]) for at in range(0, depth, BATCH))
    gyre.copy_to(stock)
    times = {stock: [], gyre: []}
    end = time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(times[gyre]) < 3:
        for context in contexts:
            times[context].append(context.decode(tokens[depth:]))
            distribution = context.probabilities()
            if context is stock:
                theirs = distribution
            context.forget(depth)
    divergence = np.sum(theirs * np.log((theirs + 1e-30) / (distribution + 1e-30)))
    piece = options.piece
    pieces = [context.decode(tokens[:piece]) for context in contexts]  # of a prompt, behind all of it
    before, after = (statistics.median(times[context]) for context in contexts)
    print(
        f"{depth:7} {1 / before:9.1f} {1 / after:9.1f} {before / after:6.2f} {piece / pieces[0]:9.1f} {piece / pieces[1]:9.1f} "
        f"{pieces[0] / pieces[1]:6.2f} {depth / prompt:9.1f} {divergence:8.1e}",
        flush=True,
    )


def open_llama(bindings: Path, folder: Path):
    """llama-cpp-python's bindings over the libraries of a folder."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    sys.path.insert(0, str(bindings))
    from llama_cpp import llama_cpp as llama

    os.chdir(folder)  # where ggml looks for its CPU backend
    llama.silent = llama.llama_log_callback(lambda *_: None)  # must live as long as llama.cpp may log
    llama.llama_log_set(llama.silent, None)
    llama.llama_backend_init()
    return llama


def load_library(llama, library: Path, way: str) -> int:
    """The library's registry."""
    os.environ["GYRE_GGML"] = way
    load = llama._lib.ggml_backend_load
    load.restype, load.argtypes = c.c_void_p, [c.c_char_p]
    registry = load(str(library).encode())
    if not registry:
        raise SystemExit(f"{library} cannot be loaded")
    return registry


def load_model(llama, path: Path):
    """A model knows the devices that were there when it was loaded."""
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    if not model:
        raise SystemExit(f"{path} cannot be loaded")
    return model


def add_paths(parser):
    folder = ROOT / "build/llama"
    absolute = lambda path: Path(path).resolve()  # open_llama() changes the directory
    parser.add_argument("--bindings", type=absolute, default=folder / "llama_cpp_python-0.3.36")
    parser.add_argument("--ggml", type=absolute, default=folder / "build/bin", help="folder of llama.cpp's libraries")
    parser.add_argument("--library", type=absolute, default=ROOT / "build/release/integrations/ggml/libggml-gyre.so")
    parser.add_argument("--model", type=absolute, default=folder / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--way", choices=("accel", "wrap"), default="accel")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_paths(parser)
    parser.add_argument("--types", default="f16,q8_0,q4_0")
    parser.add_argument("--depths", default="1024,8192,32768")
    parser.add_argument("--piece", type=int, default=256, help="tokens of a prompt that are added at the end")
    parser.add_argument("--fill", action="store_true", help="fill the cache without the attention of a long prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20, help="for each row")
    options = parser.parse_args()

    llama = open_llama(options.bindings, options.ggml)
    model = load_model(llama, options.model)
    depths = [int(depth) for depth in options.depths.split(",")]
    kinds = options.types.split(",")
    make = lambda kind: Context(llama, model, kind, max(depths) + 512, options.threads)
    stock = {kind: make(kind) for kind in kinds}
    load_library(llama, options.library, options.way)
    model = load_model(llama, options.model)
    for kind in kinds:
        print(f"{kind}, {options.way}, {options.threads} threads, tokens per second")
        print(f"{'depth':>7} {'ggml':>9} {'gyre':>9} {'times':>6} {'more':>9} {'gyre':>9} {'times':>6} {'prompt':>9} {'KL':>8}")
        gyre = make(kind)
        for depth in depths:
            for context in (stock[kind], gyre):
                context.forget(0)
            measure(llama, (stock[kind], gyre), depth, options)
        llama.llama_free(gyre.handle)


if __name__ == "__main__":
    main()
