#!/usr/bin/env python3
"""How far libggml-gyre.so moves llama.cpp's log probabilities, beside how far ggml's own kernel does when it reads a prompt token by
token (a ubatch of one: the same sums in another order) (docs/llama_cpp.md). After `make llama`.

Flash attention everywhere, weights in f32. What is said about the second half of the prompt counts, of each token's likeliest two.

usage: scripts/llama_yardstick.py [--types f16,q8_0,q4_0] [--tokens 96]
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "bench")]
import llama_life  # noqa: E402
import llama_model  # noqa: E402
import llama_quality  # noqa: E402


def log_probabilities(llama, model, kind: str, ubatch: int, tokens: list[int]) -> np.ndarray:
    count = len(tokens)
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = max(256, count)
    options.n_ubatch = ubatch
    options.n_threads = options.n_threads_batch = 1
    options.type_k = options.type_v = llama_model.TYPES[kind]
    options.flash_attn_type = llama_model.FLASH["on"]
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, i >= count // 2
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    if llama.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    x = np.ctypeslib.as_array(llama.llama_get_logits(context), (count - count // 2, size)).astype(np.float64)
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def moves(a: np.ndarray, b: np.ndarray) -> str:
    best = np.argsort(a, axis=1)[:, -2:]
    far = np.abs(np.take_along_axis(a - b, best, 1)).max(axis=1)
    divergence = (np.exp(a) * (a - b)).sum(axis=1).mean()
    return f"{np.sqrt((far**2).mean()):9.2e} {far.max():9.2e} {divergence:9.2e} {100 * (a.argmax(axis=1) == b.argmax(axis=1)).mean():5.0f} %"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_model.add_paths(parser)
    parser.add_argument("--types", default="f16,q8_0,q4_0", help="of K and V")
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()

    text = llama_life.text_of_documents().encode()
    llama = llama_model.open_llama(options.bindings, options.ggml)
    path = llama_quality.requantize(llama, options.model, "f32")
    model = llama_model.load_model(llama, path)
    tokens = llama_quality.tokens_of(llama, model, text)[2000 : 2000 + options.tokens]
    kinds = options.types.split(",")
    stock = {kind: log_probabilities(llama, model, kind, 512, tokens) for kind in kinds}
    single = {kind: log_probabilities(llama, model, kind, 1, tokens) for kind in kinds}
    llama_model.load_library(llama, options.library, options.way)
    model = llama_model.load_model(llama, path)
    print(f"{'cache':>6} {'':13} {'move, rms':>9} {'largest':>9} {'mean KL':>9} {'same':>7}")
    for kind in kinds:
        print(f"{kind:>6} the library   {moves(stock[kind], log_probabilities(llama, model, kind, 512, tokens))}")
        print(f"{kind:>6} a ubatch of 1 {moves(stock[kind], single[kind])}", flush=True)


if __name__ == "__main__":
    main()
