"""The mlx-native formats against an implementation of their own in NumPy: codes and norms, to the bit.

GYRE_MLX_NATIVE_COORDINATES sets how many coordinates each case compares (10,000,000 takes minutes).
"""

import functools
import math
import os

import numpy as np
import pytest

import gyre

COORDINATES = int(os.environ.get("GYRE_MLX_NATIVE_COORDINATES", 200_000))
SIGNS = bytes.fromhex(
    "a73b91f46dc2580eb37f24d68945ea1c63afd852970be13d76c419fe4a852cdb"
    "d34ea8179c5be63172b90df5438a6ec7582f94e1b63d0a7cc561d84fa3971e85"
)
STEPS = {4: 20000, 5: 1000, 6: 1000, 8: 2000}  # of Lloyd's iteration, where the levels were taken


def density(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def tail(x):
    return math.erfc(x / math.sqrt(2)) / 2


def mean_between(low, high):
    return (density(low) - density(high)) / (tail(low) - tail(high))


def quantile(p):
    low, high = -40.0, 40.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - tail(middle) < p else (low, middle)
    return (low + high) / 2


@functools.lru_cache
def levels(bits):
    """The positive half of the levels, before they are rounded."""
    half = 1 << (bits - 1)
    if bits == 8:
        found = [(i + 0.5) * 8 / 256 for i in range(half)]
    else:
        cuts = [quantile((half + i) / (2 * half)) for i in range(half)] + [40.0]
        found = [mean_between(cuts[i], cuts[i + 1]) for i in range(half)]
    for _ in range(STEPS[bits]):
        cuts = [0.0] + [(a + b) / 2 for a, b in zip(found, found[1:])] + [40.0]
        found = [mean_between(cuts[i], cuts[i + 1]) for i in range(half)]
    return found


@functools.lru_cache
def boundaries(bits):
    """All of them, in f32."""
    found = levels(bits)
    if bits == 4:  # of the printed levels, a half goes up
        printed = [round(level * 1e7) for level in found]
        middle = [(a + b + 1) // 2 for a, b in zip(printed, printed[1:])]
    else:
        middle = [round((a + b) / 2 * 1e7) for a, b in zip(found, found[1:])]
    positive = np.array(middle, np.float64) / 1e7
    return np.concatenate([-positive[::-1], [0.0], positive]).astype(np.float32)


def rotate(x):
    """Rows of f32: signs at 256 and 512, the Walsh-Hadamard transform, 1 / sqrt(n)."""
    n = x.shape[1]
    y = x.copy()
    if n in (256, 512):
        bits = np.unpackbits(np.frombuffer(SIGNS, np.uint8), bitorder="little")[:n]
        y = np.where(bits == 1, -y, y)
    step = 1
    while step < n:
        pairs = y.reshape(len(y), n // (2 * step), 2, step)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        y = np.stack([low + high, low - high], axis=2).reshape(len(y), n)
        step *= 2
    return y * (np.float32(1) / np.sqrt(np.float32(n)))


def norms_of(y):
    """Thirty-two threads have a row of 256 or 512, otherwise each has a coordinate."""
    rows, n = y.shape
    each = n // 32 if n in (256, 512) else 1
    blocks = y.reshape(rows, -1, 256 if n == 512 else n)
    squares = (blocks * blocks).reshape(rows, blocks.shape[1], -1, each)
    sums = np.zeros(squares.shape[:3], np.float32)
    for i in range(each):
        sums = sums + squares[..., i]
    while sums.shape[2] > 1:
        half = sums.shape[2] // 2
        sums = sums[..., :half] + sums[..., half:]
    total = sums[..., 0]
    return np.sqrt(total / np.float32(256) if n == 512 else total)


def encode(x, bits, scale_factor):
    y = rotate(x)
    norms = norms_of(y)
    n = x.shape[1]
    each = np.repeat(norms, n // norms.shape[1], axis=1)
    long_enough = each > np.float32(1e-10)
    with np.errstate(divide="ignore", invalid="ignore"):
        if n in (256, 512):
            inverse = np.where(long_enough, np.float32(1) / each, np.float32(0))
            values = y * inverse * np.float32(16 if n == 256 else scale_factor)
        else:
            values = np.where(long_enough, y / each * np.sqrt(np.float32(n)), np.float32(0))
    assert values.dtype == np.float32 and norms.dtype == np.float32
    return np.searchsorted(boundaries(bits), values, side="left").astype(np.uint8), norms


CASES = [(4, n, 1.0) for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024)] + [
    (bits, n, 1.0) for bits in (5, 6, 8) for n in (256, 512)
]
SCALED = [(4, 512, 0.7), (5, 512, 1.3), (6, 512, 16.0), (8, 512, 22.627417)]  # scale_factor_d512


def buffer_of(bits, rows, head_dim, scale_factor):
    return gyre.KvBuffer.allocate(
        "cpu",
        format=f"mlx_native{bits}",
        role="k",
        kv_heads=1,
        capacity=rows,
        head_dim=head_dim,
        scale_factor=scale_factor,
    )


@pytest.mark.parametrize("bits,head_dim,scale_factor", CASES + SCALED)
def test_codes_and_norms_are_equal(bits, head_dim, scale_factor):
    rng = np.random.default_rng(bits * 1000 + head_dim)
    chunk = 4096
    for start in range(0, max(1, COORDINATES // head_dim), chunk):
        rows = min(chunk, max(1, COORDINATES // head_dim) - start)
        x = rng.standard_normal((rows, head_dim), dtype=np.float32)
        x *= np.exp(rng.standard_normal((rows, 1))).astype(np.float32)
        if start == 0:
            x[0] = 0
        cache = buffer_of(bits, rows, head_dim, scale_factor)
        encoder = gyre.Encoder("cpu")
        gyre.kv_quantize(encoder, x[:, None, :], cache)
        encoder.submit().wait()
        codes = np.asarray(cache.codes)[0]
        if bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(rows, head_dim)
        wanted, norms = encode(x, bits, scale_factor)
        np.testing.assert_array_equal(np.asarray(cache.scales)[0], norms)
        np.testing.assert_array_equal(codes, wanted)


@pytest.mark.parametrize("bits,head_dim,scale_factor", [(4, 4, 1.0), (4, 1024, 1.0)] + SCALED)
def test_decoded_rows_are_levels_times_norms(bits, head_dim, scale_factor):
    rows = 8
    x = np.random.default_rng(5).standard_normal((rows, head_dim), dtype=np.float32)
    cache = buffer_of(bits, rows, head_dim, scale_factor)
    assert cache.scale_factor == np.float32(scale_factor)
    out = np.empty((rows, 1, head_dim), np.float32)
    encoder = gyre.Encoder("cpu")
    gyre.kv_quantize(encoder, x[:, None, :], cache)
    gyre.kv_dequantize(encoder, cache, out, domain="rotated")
    encoder.submit().wait()
    codes, norms = encode(x, bits, scale_factor)
    half = np.round(levels(bits), 7)  # as they are printed
    both = np.concatenate([-half[::-1], half])
    unit = scale_factor if head_dim == 512 else np.sqrt(head_dim)
    wanted = both[codes] * np.repeat(norms, head_dim // norms.shape[1], axis=1) / unit
    np.testing.assert_allclose(out[:, 0], wanted, rtol=1e-6)
