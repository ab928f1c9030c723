"""Random q, k and v of a small model, for tests of caches and pools."""

from test_ops import normal

HEADS, KV_HEADS, DIM = 4, 2, 64


def inputs(rng, tokens):
    return normal(rng, tokens, HEADS, DIM), normal(rng, tokens, KV_HEADS, DIM), normal(rng, tokens, KV_HEADS, DIM)
