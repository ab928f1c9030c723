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


@pytest.mark.parametrize("dtype, bound", [("f32", 2e-6), ("f16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("tokens, keys, heads, kv_heads, head_dim, window", SHAPES)
def test_torch(tokens, keys, heads, kv_heads, head_dim, window, dtype, bound):
    q, k, v = tensors(tokens, keys, heads, kv_heads, head_dim)
    expected = (
        torch.nn.functional.scaled_dot_product_attention(
            *(torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k, v)),
            attn_mask=torch.from_numpy(visible(tokens, keys, window)),
            enable_gqa=True,
        )[0]
        .transpose(0, 1)
        .numpy()
    )
    np.testing.assert_allclose(ours(q, k, v, window, dtype), expected, atol=bound, rtol=0)


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
