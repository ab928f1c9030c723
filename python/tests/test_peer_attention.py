"""gyre.attention against what others wrote: PyTorch and MLX."""

import numpy as np
import pytest

import gyre

torch = pytest.importorskip("torch")

# tokens, keys, heads, kv_heads, head_dim, window
SHAPES = [
    (1, 1, 1, 1, 64, 0),
    (1, 777, 8, 2, 128, 0),
    (33, 33, 4, 4, 64, 0),
    (17, 300, 6, 2, 96, 0),
    (1, 500, 4, 1, 256, 100),
    (50, 200, 8, 2, 128, 31),
]


def tensors(tokens, keys, heads, kv_heads, head_dim):
    random = np.random.default_rng(5)
    return [
        random.standard_normal(shape, dtype=np.float32)
        for shape in ((tokens, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, head_dim))
    ]


def visible(tokens, keys, window) -> np.ndarray:
    query, key = np.arange(keys - tokens, keys)[:, None], np.arange(keys)[None]
    return (key <= query) & (key > query - (window or keys))


def ours(q, k, v, window, dtype="f32") -> np.ndarray:
    """Attention over buffers of the dtype, filled in place through shared memory."""
    halves = []
    for role, x in (("k", k), ("v", v)):
        keys, kv_heads, head_dim = x.shape
        half = gyre.KvBuffer.allocate("cpu", format=dtype, role=role, kv_heads=kv_heads, capacity=keys, head_dim=head_dim)
        torch.from_dlpack(half.codes).copy_(torch.from_numpy(x).transpose(0, 1))
        halves.append(half)
    out = np.full(q.shape, np.nan, dtype=np.float32)
    encoder = gyre.Encoder("cpu")
    gyre.attention(
        encoder,
        q=q,
        k_cache=halves[0],
        v_cache=halves[1],
        out=out,
        length=len(k),
        scale=q.shape[2] ** -0.5,
        window=window,
    )
    encoder.submit().wait()
    return out


def theirs(q, k, v, window) -> np.ndarray:
    return (
        torch.nn.functional.scaled_dot_product_attention(
            *(torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)),
            attn_mask=torch.from_numpy(visible(len(q), len(k), window)),
            enable_gqa=True,
        )[0]
        .transpose(0, 1)
        .numpy()
    )


def weights_have_8_bits(dtype) -> bool:
    """Whether weights of prompts have 8 bits: where the processor multiplies bf16 matrices."""
    layers = [gyre.KvLayer(k=dtype, v=dtype)]
    cache = gyre.KvCache("cpu", kv_heads=1, head_dim=64, capacity=64, layers=layers)
    return "weights of 8 bits" in cache.describe()[0].kernel


@pytest.mark.parametrize("dtype, bound", [("f32", 2e-6), ("f16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("tokens, keys, heads, kv_heads, head_dim, window", SHAPES)
def test_torch(tokens, keys, heads, kv_heads, head_dim, window, dtype, bound):
    q, k, v = tensors(tokens, keys, heads, kv_heads, head_dim)
    given = ours(q, k, v, window, dtype)
    if tokens > 1 and dtype == "f16" and weights_have_8_bits(dtype):
        # A weight is off by 2^-8 of itself at most, so that a value is by 2^-8 of the mean of what is summed, signs
        # aside; roundings are independent, and all values together are off by much less.
        stored = [x.astype(np.float16).astype(np.float32) for x in (k, v)]
        exact = theirs(q, *stored, window)
        assert ((given - exact) ** 2).sum() < 6e-6 * (exact**2).sum()
        bound = bound + 2**-8 * theirs(q, k, np.abs(v), window)
    np.testing.assert_array_less(np.abs(given - theirs(q, k, v, window)), bound)


@pytest.mark.parametrize("tokens, keys, heads, kv_heads, head_dim, window", SHAPES)
def test_mlx(mlx, tokens, keys, heads, kv_heads, head_dim, window):
    q, k, v = tensors(tokens, keys, heads, kv_heads, head_dim)
    expected = mlx.fast.scaled_dot_product_attention(
        *(mlx.array(x.transpose(1, 0, 2)[None]) for x in (q, k, v)),
        scale=head_dim**-0.5,
        mask=mlx.array(visible(tokens, keys, window)),
    )
    np.testing.assert_allclose(ours(q, k, v, window), np.array(expected)[0].transpose(1, 0, 2), atol=2e-6, rtol=0)


@pytest.fixture
def mlx():
    core = pytest.importorskip(
        "mlx.core", reason="MLX is not installed, or has no CPU library here", exc_type=ImportError
    )
    core.set_default_device(core.cpu)
    return core
