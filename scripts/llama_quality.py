#!/usr/bin/env python3
"""How far llama.cpp's answers with flash attention are from those without, by its own kernel and by libggml-gyre.so: perplexity and KL
divergence of SmolLM2-135M over 100 kB of text (docs/llama_cpp.md). After `make llama`.

All contexts are in one process and read the same chunks of 512 tokens. What they say about the second half of a chunk counts. Below
each cache type stands how much larger the measures are with the library than with ggml's kernel, with intervals that hold in 95 % of
cases: a paired bootstrap over chunks. Every --report chunks the script prints what it has.

A chunk's figures are kept beside the model, so a run that was stopped goes on where it was. They count only for the same text, library
and model. The script fails if a divergence is larger with the library by more than chance gives (the whole interval is above zero), or
if the perplexities are further apart than 0.2 % by more than chance gives.

usage: scripts/llama_quality.py [--types f16,q8_0,q4_0] [--chunks 20] [--weights f32]
"""

import argparse
import ctypes as c
import hashlib
import os
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "bench")]
import llama_life  # noqa: E402
import llama_model  # noqa: E402

CHUNK = 512
BLOCKS = [slice(at, min(at + 16, CHUNK // 2 - 1)) for at in range(0, CHUNK // 2 - 1, 16)]  # rows that fit the processor's caches
RESAMPLES = 2000
PERPLEXITY = 0.002  # the library may change it by this part
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
    """What contexts said, token by token: arrays for each chunk."""

    def __init__(self, folder: Path):
        self.folder, self.chunks = folder, []
        folder.mkdir(exist_ok=True)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:03}.npz"

    def load(self, number: int) -> bool:
        if not self.path(number).exists():
            return False
        with np.load(self.path(number)) as arrays:
            self.chunks.append(dict(arrays))
        return True

    def add(self, number: int, arrays: dict):
        part = self.path(number).with_suffix(".part.npz")
        np.savez(part, **arrays)
        part.rename(self.path(number))
        self.chunks.append(arrays)

    def of(self, name: str) -> np.ndarray:
        """[chunk][token]"""
        return np.stack([chunk[name] for chunk in self.chunks])


def measure(theirs: np.ndarray, base: np.ndarray, next_tokens: list[int], name: str) -> dict:
    """Loss, divergence from `base` and whether the likeliest token is the same."""
    divergence = [(np.exp(base[rows]) * (base[rows] - theirs[rows])).sum(axis=1, dtype=np.float64) for rows in BLOCKS]
    return {
        f"{name} loss": -theirs[np.arange(len(next_tokens)), next_tokens].astype(np.float64),
        f"{name} divergence": np.concatenate(divergence),
        f"{name} same": theirs.argmax(axis=1) == base.argmax(axis=1),
    }


def high(divergence: np.ndarray) -> float:
    return float(np.quantile(divergence, 0.999))


def intervals(differences: dict, chunks: int) -> dict:
    """95 % of each difference(chunks drawn with replacement)."""
    random = np.random.default_rng(1)
    draws = [random.integers(0, chunks, chunks) for _ in range(RESAMPLES)]
    return {name: np.quantile([difference(draw) for draw in draws], (0.025, 0.975)) for name, difference in differences.items()}


def report(found: Found, kinds: list[str]) -> list[str]:
    """Prints the measures and returns those that are worse with the library."""
    base, chunks = found.of("base loss"), len(found.chunks)
    print(f"{chunks} chunks, {base.size} tokens, perplexity without flash attention {np.exp(base.mean()):.4f}")
    print(f"{'cache':>6} {'':4} {'perplexity /':>12} {'mean KL':>9} {'99.9 % KL':>9} {'same':>7}")
    worse = []
    for kind in kinds:
        loss, divergence, same = ({name: found.of(f"{kind} {name} {what}") for name in ("ggml", "gyre")} for what in ("loss", "divergence", "same"))
        for name in ("ggml", "gyre"):
            ratio = np.exp(loss[name].mean() - base.mean())
            print(f"{kind:>6} {name} {ratio:12.5f} {divergence[name].mean():9.2e} {high(divergence[name]):9.2e} {100 * same[name].mean():5.1f} %")
        if chunks < 2:
            continue
        pairs = {
            "perplexity": lambda of: np.expm1(loss["gyre"][of].mean() - loss["ggml"][of].mean()),
            "mean KL": lambda of: divergence["gyre"][of].mean() - divergence["ggml"][of].mean(),
            "99.9 % KL": lambda of: high(divergence["gyre"][of]) - high(divergence["ggml"][of]),
        }
        for name, (low, top) in intervals(pairs, chunks).items():
            bound = PERPLEXITY if name == "perplexity" else 0
            print(f"{'':11} {name} with the library - with ggml: {pairs[name](slice(None)):+.2e}, 95 % within {low:+.2e} and {top:+.2e}")
            if low > bound or (name == "perplexity" and top < -bound):
                worse.append(f"{kind}: {name}")
    sys.stdout.flush()
    return worse


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


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
    stock = {kind: Reader(llama, model, kind, options.threads) for kind in kinds}
    llama_model.load_library(llama, options.library, options.way)
    model = llama_model.load_model(llama, path)
    gyre = {kind: Reader(llama, model, kind, options.threads) for kind in kinds}

    of = digest(text, options.library.read_bytes(), options.way.encode(), options.types.encode())
    found = Found(path.with_suffix(f".{of}.quality"))
    chunks = chunks[: options.chunks or len(chunks)]
    right, other = np.empty((2, CHUNK // 2 - 1, reference.size), np.float32)
    for number, chunk in enumerate(chunks):
        if not found.load(number):
            next_tokens = chunk[CHUNK // 2 + 1 :]
            reference.log_probabilities(chunk, right)
            arrays = measure(right, right, next_tokens, "base")
            for kind in kinds:
                for name, readers in (("ggml", stock), ("gyre", gyre)):
                    arrays |= measure(readers[kind].log_probabilities(chunk, other), right, next_tokens, f"{kind} {name}")
            found.add(number, arrays)
        if (number + 1) % options.report == 0 and number + 1 < len(chunks):
            report(found, kinds)
    worse = report(found, kinds)
    for reader in gyre.values():
        llama.llama_free(reader.handle)  # says how many nodes the library computed
    if worse:
        raise SystemExit(f"worse with the library by more than chance: {', '.join(worse)}")


if __name__ == "__main__":
    main()
