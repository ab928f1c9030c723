#!/usr/bin/env python3
"""How far llama.cpp's answers with flash attention are from those without, by its own kernel and by libggml-gyre.so: perplexity and KL
divergence of SmolLM2-135M over 100 kB of text (docs/llama_cpp.md). After `make llama`.

All contexts are in one process and read the same chunks of 512 tokens. What they say about the second half of a chunk counts. Beside
each measure stands how much larger it is with the library than with ggml's kernel, and that difference's standard error over chunks.
Every --report chunks the script prints what it has.

usage: scripts/llama_quality.py [--types f16,q8_0,q4_0] [--chunks 20] [--weights f32]
"""

import argparse
import ctypes as c
import os
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "bench")]
import llama_life  # noqa: E402
import llama_model  # noqa: E402

CHUNK = 512
BLOCKS = [slice(at, min(at + 16, CHUNK // 2 - 1)) for at in range(0, CHUNK // 2 - 1, 16)]  # rows that fit the processor's caches
WEIGHTS = {"f32": 0, "f16": 1, "q4_0": 2}  # llama_ftype


def requantize(llama, path: Path, weights: str) -> Path:
    """The model with other weights: ggml multiplies q4_0 five times as fast as q4_1."""
    to = path.with_name(path.name.replace("Q4_1", weights.upper()))
    if not to.exists():
        options = llama.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize, options.nthread = WEIGHTS[weights], True, 1
        part = to.with_suffix(".part")
        if llama.llama_model_quantize(str(path).encode(), str(part).encode(), c.byref(options)) != 0:
            raise SystemExit(f"{path} cannot be requantized")
        part.rename(to)
    return to


def tokens_of(llama, model, text: bytes) -> list[int]:
    tokens = (llama.llama_token * len(text))()
    return tokens[: llama.llama_tokenize(llama.llama_model_get_vocab(model), text, len(text), tokens, len(text), False, False)]


class Reader(llama_model.Context):
    def __init__(self, llama, model, kind: str, threads: int, flash: str = "on"):
        super().__init__(llama, model, kind, CHUNK, threads, flash)
        self.size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def log_probabilities(self, tokens: list[int], out: np.ndarray) -> np.ndarray:
        """Of the token after each one of the second half but the last, in `out`."""
        batch = self.llama.llama_batch_init(CHUNK, 0, 1)
        batch.n_tokens = CHUNK
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, CHUNK // 2 <= i < CHUNK - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        self.forget(0)
        if self.llama.llama_decode(self.handle, batch) != 0:
            raise SystemExit("llama_decode failed")
        self.llama.llama_batch_free(batch)
        logits = np.ctypeslib.as_array(self.llama.llama_get_logits(self.handle), (CHUNK // 2 - 1, self.size))
        for rows in BLOCKS:
            x = logits[rows] - logits[rows].max(axis=1, keepdims=True)
            out[rows] = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        return out


class Found:
    """What a context said, token by token."""

    def __init__(self):
        self.loss, self.divergence, self.same = [], [], []

    def add(self, theirs: np.ndarray, base: np.ndarray, next_tokens: list[int]):
        self.loss.append(-theirs[np.arange(len(next_tokens)), next_tokens].astype(np.float64))
        self.divergence.append(np.concatenate([(np.exp(base[rows]) * (base[rows] - theirs[rows])).sum(axis=1, dtype=np.float64) for rows in BLOCKS]))
        self.same.append(theirs.argmax(axis=1) == base.argmax(axis=1))


def difference(a: list, b: list) -> str:
    """Mean of a over that of b, chunk by chunk, with its standard error."""
    apart = np.array([np.mean(x) - np.mean(y) for x, y in zip(a, b)])
    return f"{apart.mean():+.1e} +- {apart.std(ddof=1) / len(apart) ** 0.5:.1e}" if len(apart) > 1 else "-"


def report(base: Found, found: dict):
    print(f"{len(base.loss)} chunks, perplexity without flash attention {np.exp(np.mean(base.loss)):.4f}")
    print(f"{'cache':>6} {'':4} {'perplexity /':>12} {'mean KL':>9} {'99.9 % KL':>9} {'same':>7}")
    for kind, (ggml, gyre) in found.items():
        for name, one in (("ggml", ggml), ("gyre", gyre)):
            ratio = np.exp(np.mean(one.loss) - np.mean(base.loss))
            high = np.quantile(np.concatenate(one.divergence), 0.999)
            print(f"{kind:>6} {name} {ratio:12.4f} {np.mean(one.divergence):9.2e} {high:9.2e} {100 * np.mean(one.same):5.1f} %")
        print(f"{'':11} with the library: log perplexity {difference(gyre.loss, ggml.loss)}, mean KL {difference(gyre.divergence, ggml.divergence)}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_model.add_paths(parser)
    parser.add_argument("--types", default="f16,q8_0,q4_0", help="of K and V")
    parser.add_argument("--chunks", type=int, default=0, help="all by default")
    parser.add_argument("--report", type=int, default=5)
    parser.add_argument("--weights", choices=WEIGHTS, default="q4_0", help="of the model; the fewer bits, the more a rounding is amplified")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    text = llama_life.text_of_documents().encode()
    os.environ.setdefault("GYRE_GGML_VERBOSE", "1")
    llama = llama_model.open_llama(options.bindings, options.ggml)
    path = requantize(llama, options.model, options.weights)
    model = llama_model.load_model(llama, path)
    tokens = tokens_of(llama, model, text)
    chunks = [tokens[at : at + CHUNK] for at in range(0, len(tokens) - CHUNK + 1, CHUNK)]
    kinds = options.types.split(",")
    reference = Reader(llama, model, "f16", options.threads, "off")
    stock = [Reader(llama, model, kind, options.threads) for kind in kinds]
    llama_model.load_library(llama, options.library, options.way)
    model = llama_model.load_model(llama, path)
    gyre = [Reader(llama, model, kind, options.threads) for kind in kinds]

    base, found = Found(), {kind: (Found(), Found()) for kind in kinds}
    chunks = chunks[: options.chunks or len(chunks)]
    right, other = np.empty((2, CHUNK // 2 - 1, reference.size), np.float32)
    for number, chunk in enumerate(chunks, 1):
        next_tokens = chunk[CHUNK // 2 + 1 :]
        reference.log_probabilities(chunk, right)
        base.add(right, right, next_tokens)
        for i, kind in enumerate(kinds):
            for reader, one in zip((stock[i], gyre[i]), found[kind]):
                one.add(reader.log_probabilities(chunk, other), right, next_tokens)
        if number % options.report == 0 or number == len(chunks):
            report(base, found)
    for reader in gyre:
        llama.llama_free(reader.handle)  # says how many nodes the library computed


if __name__ == "__main__":
    main()
