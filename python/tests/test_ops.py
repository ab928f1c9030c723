"""Every op through its Python signature, against NumPy in double precision. The kernels have tests of their own."""

import numpy as np
import pytest

import gyre


def softmax_attention(q, k, v, scale, window=0, soft_cap=0.0, sink_logits=None, alibi_slopes=None, mask=None):
    """q: [tokens, heads, d], k and v: [keys, kv_heads, d]; the queries are the newest tokens. Output and lse."""
    tokens, heads, _ = q.shape
    keys, kv_heads, _ = k.shape
    group = heads // kv_heads
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("thd,khd->htk", q.astype(np.float64), k) * scale
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    at = keys - tokens + np.arange(tokens)[:, None]
    j = np.arange(keys)[None, :]
    if alibi_slopes is not None:
        logits = logits + alibi_slopes[:, None, None] * (j - at)
    seen = j <= at
    if window:
        seen &= j > at - window
    if mask is not None:
        seen = np.ones((tokens, keys), bool)
        seen[:, keys - tokens :] = mask != 0
    logits = np.where(seen, logits, -np.inf)
    if sink_logits is not None:
        logits = np.concatenate([logits, np.broadcast_to(sink_logits[:, None, None], (heads, tokens, 1))], axis=2)
    top = logits.max(axis=2, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=2, keepdims=True)
    out = np.einsum("htk,khd->thd", (weights / total)[:, :, :keys], v)
    return out, (np.log(total) + top)[:, :, 0].T


def rotate(x, positions, base=10000.0, adjacent=False, rotary_dim=None):
    x = x.astype(np.float64)
    rotary = rotary_dim or x.shape[-1]
    angles = positions[:, None] * base ** (-2 * np.arange(rotary // 2) / rotary)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out = x.copy()
    first, second = (
        (slice(0, rotary, 2), slice(1, rotary, 2)) if adjacent else (slice(0, rotary // 2), slice(rotary // 2, rotary))
    )
    u, v = x[..., first], x[..., second]
    out[..., first], out[..., second] = u * cos - v * sin, u * sin + v * cos
    return out


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_kv_copy(encoder, rng):
    k, v = normal(rng, 3, 2, 8), normal(rng, 3, 2, 4)
    k_cache, v_cache = np.zeros((2, 5, 8), np.float16), np.zeros((5, 2, 4), np.float16)
    head_major = gyre.from_numpy(k_cache).permute((1, 0, 2))
    gyre.kv_copy(encoder, k, head_major, v, v_cache, position=1)
    assert not k_cache.any()  # nothing runs before submit
    encoder.submit().wait()
    assert (k_cache[:, 1:4] == k.astype(np.float16).transpose(1, 0, 2)).all() and (v_cache[1:4] == v.astype(np.float16)).all()
    gyre.kv_copy(encoder, k, head_major, position=4, cache="ring", source_begin=1, tokens=2)
    encoder.submit().wait()
    assert (k_cache[:, [4, 0]] == k[1:3].astype(np.float16).transpose(1, 0, 2)).all()
    with pytest.raises(gyre.Error, match='kv_copy: cache must be one of linear, ring; got "loop"'):
        gyre.kv_copy(encoder, k, head_major, cache="loop")
    with pytest.raises(gyre.Error, match="kv_copy"):
        gyre.kv_copy(encoder, k, head_major, position=3)
    assert encoder.size == 0


@pytest.mark.parametrize("pairing", ["split_half", "adjacent"])
def test_rope(encoder, rng, pairing):
    x, k = normal(rng, 5, 4, 16), normal(rng, 5, 2, 16)
    positions = np.array([0, 7, 100, 9999, 3], np.int32)
    out, k_out = np.zeros_like(x), np.zeros_like(k)
    gyre.rope(encoder, x, positions, out, k=k, k_out=k_out, pairing=pairing, rotary_dim=8, base=500.0)
    encoder.submit().wait()
    for given, got in ((x, out), (k, k_out)):
        assert np.abs(got - rotate(given, positions, 500.0, pairing == "adjacent", 8)).max() < 1e-5


def test_rope_in_place_with_a_table(encoder, rng):
    x = normal(rng, 4, 2, 8)
    expected = 0.5 * rotate(x, np.arange(4), 10000.0)
    frequencies = gyre.rope_frequencies(10000.0, rotary_dim=8)
    assert np.allclose(frequencies.inverse, 10000.0 ** (-np.arange(4) / 4)) and frequencies.attention_factor == 1.0
    table = gyre.rope_table("cpu", frequencies.inverse)
    assert (table.shape, table.dtype) == ((4, 2), "u32")
    gyre.rope(encoder, x, np.arange(4, dtype=np.int32), x, frequencies=table, magnitude=0.5)
    encoder.submit().wait()
    assert np.abs(x - expected).max() < 1e-5


def test_rope_of_sections(encoder, rng):
    x, out = normal(rng, 3, 2, 8), np.zeros((3, 2, 8), np.float32)
    positions = np.array([[3, 4, 5], [6, 7, 8], [1, 1, 2], [0, 0, 0]], np.int32)
    gyre.rope(encoder, x, positions, out, mode="sectioned", sections=(1, 2, 1, 0))
    encoder.submit().wait()
    axis = [0, 1, 1, 2]
    angles = positions[axis].T * 10000.0 ** (-np.arange(4) / 4)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    u, v = x[..., :4].astype(np.float64), x[..., 4:].astype(np.float64)
    assert np.abs(out - np.concatenate([u * cos - v * sin, u * sin + v * cos], axis=-1)).max() < 1e-5


def test_yarn_frequencies():
    scaled = gyre.rope_frequencies(
        10000.0, rotary_dim=64, rope_type="yarn", factor=4.0, original_max_position_embeddings=4096
    )
    assert scaled.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1)
    assert scaled.inverse[0] == pytest.approx(1.0) and scaled.inverse[-1] < 10000.0 ** (-31 / 32)
    with pytest.raises(gyre.Error, match='rope_type must be one of .*; got "other"'):
        gyre.rope_frequencies(rotary_dim=64, rope_type="other")


@pytest.mark.parametrize("rope", [True, False])
def test_norm_rope(encoder, rng, rope):
    x, k = normal(rng, 3, 4, 16), normal(rng, 3, 2, 16)
    weight, k_weight = normal(rng, 16), normal(rng, 16)
    out, k_out = np.zeros_like(x), np.zeros_like(k)
    second = np.zeros(x.shape, np.float16)
    positions = np.array([5, 6, 7], np.int32)
    gyre.norm_rope(
        encoder,
        x,
        positions if rope else None,
        out,
        weight=weight,
        second=second,
        k=k,
        k_out=k_out,
        k_weight=k_weight,
        rope=rope,
        epsilon=1e-5,
        weight_offset=1.0,
    )
    encoder.submit().wait()
    for given, scale, got in ((x, weight, out), (k, k_weight, k_out)):
        given = given.astype(np.float64)
        expected = given / np.sqrt((given**2).mean(-1, keepdims=True) + 1e-5) * (scale + 1.0)
        if rope:
            expected = rotate(expected, positions)
        assert np.abs(got - expected).max() < 1e-5
    assert (second == out.astype(np.float16)).all()


@pytest.mark.parametrize("signs", ["none", "native"])
def test_hadamard_and_back(encoder, rng, signs):
    x = normal(rng, 3, 2, 64)
    rotated, back = np.zeros_like(x), np.zeros_like(x)
    gyre.hadamard(encoder, x, rotated, signs=signs)
    gyre.hadamard(encoder, rotated, back, direction="inverse", signs=signs)
    assert encoder.size == 2 and encoder.barriers == 1
    encoder.submit().wait()
    assert np.abs(back - x).max() < 1e-5 and np.abs(rotated - x).max() > 0.1
    assert np.allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)
    if signs == "none":
        assert np.allclose(rotated[..., 0], x.sum(-1) / 8, atol=1e-5)


@pytest.mark.parametrize("format, error", [("tq8", 1e-4), ("tq4", 2e-2), ("mlx_native8", 1e-3)])
def test_quantize_and_back(encoder, rng, format, error):
    k, v = normal(rng, 10, 2, 256), normal(rng, 10, 2, 256)
    caches = [gyre.KvBuffer.allocate("cpu", format=format, role=r, kv_heads=2, capacity=16, head_dim=256) for r in "kv"]
    assert (caches[0].format, caches[1].role, caches[0].kv_heads) == (format, "v", 2)
    assert (caches[0].capacity, caches[0].head_dim, caches[0].device.name) == (16, 256, "cpu")
    assert caches[0].nbytes == caches[0].codes.nbytes + caches[0].scales.nbytes
    gyre.kv_quantize(encoder, k, caches[0], v, caches[1], position=3)
    outs = [np.zeros_like(k), np.zeros_like(v)]
    for cache, out in zip(caches, outs):
        gyre.kv_dequantize(encoder, cache, out, first_slot=3)
    rotated = np.zeros_like(k)
    gyre.kv_dequantize(encoder, caches[0], rotated, first_slot=3, domain="rotated")
    encoder.submit().wait()
    for given, got in zip((k, v), outs):
        assert ((given - got) ** 2).sum() / (given**2).sum() < error
    assert np.abs(rotated - outs[0]).max() > 0.1
    assert np.allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(outs[0], axis=-1), rtol=1e-3)


def test_quantize_one_half(encoder, rng):
    k, v = normal(rng, 9, 2, 64), normal(rng, 9, 2, 64)

    def buffer(role):
        return gyre.KvBuffer.allocate("cpu", format="tq4", role=role, kv_heads=2, capacity=16, head_dim=64)

    both, alone = [buffer(r) for r in "kv"], [buffer(r) for r in "kv"]
    gyre.kv_quantize(encoder, k, both[0], v, both[1], position=3)
    gyre.kv_quantize(encoder, v=v, v_cache=alone[1], position=3)
    gyre.kv_quantize(encoder, k, alone[0], position=3)
    encoder.submit().wait()
    for a, b in zip(both, alone):
        assert np.array_equal(a.codes.numpy(), b.codes.numpy())
        assert np.array_equal(a.scales.numpy(), b.scales.numpy())
    assert alone[1].codes.numpy().any()
    with pytest.raises(gyre.Error, match="got neither"):
        gyre.kv_quantize(encoder)
    with pytest.raises(gyre.Error, match="only v_cache"):
        gyre.kv_quantize(encoder, v_cache=alone[1])


def filled_cache(encoder, format, k, v):
    buffers = []
    for role, x in (("k", k), ("v", v)):
        buffer = gyre.KvBuffer.allocate(
            "cpu", format=format, role=role, kv_heads=x.shape[1], capacity=x.shape[0] + 3, head_dim=x.shape[2]
        )
        buffers.append(buffer)
    if buffers[0].scales is None:
        codes = [buffer.codes.permute((1, 0, 2)) for buffer in buffers]
        gyre.kv_copy(encoder, k, codes[0], v, codes[1])
    else:
        gyre.kv_quantize(encoder, k, buffers[0], v, buffers[1])
    return buffers


@pytest.mark.parametrize("format, error", [("f32", 1e-5), ("f16", 2e-3), ("tq8", 3e-2)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_attention(encoder, rng, format, error, tokens):
    q, k, v = normal(rng, tokens, 4, 64), normal(rng, 40, 2, 64), normal(rng, 40, 2, 64)
    out, lse = np.zeros_like(q), np.zeros((tokens, 4), np.float32)
    k_cache, v_cache = filled_cache(encoder, format, k, v)
    gyre.attention(encoder, q, k_cache, v_cache, out, lse=lse, length=40, scale=0.125)
    encoder.submit().wait()
    expected, expected_lse = softmax_attention(q, k, v, 0.125)
    assert np.abs(out - expected).max() < error and np.abs(lse - expected_lse).max() < error


def test_calls_of_attention_share_scratch(encoder, rng):
    scratch, keys = gyre.AttentionScratch(), 1500  # enough for splits
    assert scratch.memory is None
    addresses = []
    for _ in range(2):
        for kv_heads in (20, 1):
            q, k, v = normal(rng, 1, 20, 64), normal(rng, keys, kv_heads, 64), normal(rng, keys, kv_heads, 64)
            out = gyre.attention(encoder, q, *filled_cache(encoder, "f32", k, v), length=keys, scratch=scratch)
            encoder.submit().wait()
            assert np.abs(np.asarray(out) - softmax_attention(q, k, v, 0.125)[0]).max() < 1e-5
            addresses.append(scratch.memory.data_ptr)
    assert len(set(addresses)) == 1  # the first call took the most


@pytest.mark.parametrize(
    "options",
    [
        {"window": 7},
        {"soft_cap": 2.0},
        {"sink_logits": np.array([0.5, 1.0, -1.0, 3.0], np.float32)},
        {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
        {"tree_mask": np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.uint8)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_attention(encoder, rng, options):
    q, k, v = normal(rng, 3, 4, 64), normal(rng, 20, 2, 64), normal(rng, 20, 2, 64)
    out = np.zeros_like(q)
    k_cache, v_cache = filled_cache(encoder, "f32", k, v)
    gyre.attention(encoder, q, k_cache, v_cache, out, length=20, scale=0.3, **options)
    encoder.submit().wait()
    names = {"tree_mask": "mask"}
    expected, _ = softmax_attention(q, k, v, 0.3, **{names.get(name, name): x for name, x in options.items()})
    assert np.abs(out - expected).max() < 1e-5


def test_partial_attention_merges_to_the_whole(encoder, rng):
    q, k, v = normal(rng, 2, 4, 64), normal(rng, 30, 2, 64), normal(rng, 30, 2, 64)
    out, lse = np.zeros_like(q), np.zeros((2, 4), np.float32)
    k_cache, v_cache = filled_cache(encoder, "f32", k, v)
    shape = gyre.attention_partial_shape(3, q.shape, 64)
    assert shape == (3, 2, 4, 66)
    partial = gyre.empty(shape)
    sink_logits = np.array([1, 2, 3, 4], np.float32)
    gyre.attention_partial(encoder, q, k_cache, v_cache, partial, length=30, scale=0.125)
    gyre.attention_merge(encoder, partial, out, lse=lse, sink_logits=sink_logits)
    encoder.submit().wait()
    expected, expected_lse = softmax_attention(q, k, v, 0.125, sink_logits=sink_logits)
    assert np.abs(out - expected).max() < 1e-5 and np.abs(lse - expected_lse).max() < 1e-5


def test_outputs_that_are_not_given_are_made(encoder, rng):
    q, k, v = normal(rng, 2, 4, 64), normal(rng, 30, 2, 64), normal(rng, 30, 2, 64)
    k_cache, v_cache = filled_cache(encoder, "f32", k, v)
    expected, _ = softmax_attention(q, k, v, 0.125)  # 1 / sqrt(64): no scale is given
    positions = np.arange(2, dtype=np.int32)
    matrix = np.broadcast_to(2 * np.eye(64, dtype=np.float32), (2, 64, 64)).copy()
    with encoder:
        out = gyre.attention(encoder, q, k_cache, v_cache, length=30)
        halves = gyre.attention(encoder, q.astype(np.float16), k_cache, v_cache, length=30)
        partial = gyre.empty(gyre.attention_partial_shape(3, q.shape, 64))
        gyre.attention_partial(encoder, q, k_cache, v_cache, partial, length=30)
        merged = gyre.attention_merge(encoder, partial)
        merged_too = gyre.attention_merge(encoder, gyre.attention_partial(encoder, q, k_cache, v_cache, length=30, splits=2))
        rotated = gyre.rope(encoder, q, positions)
        normed = gyre.norm_rope(encoder, q, positions)
        pairs = [op(encoder, q, positions, k=k[:2]) for op in (gyre.rope, gyre.norm_rope)]
        k_given = np.zeros_like(k[:2])
        same = gyre.rope(encoder, q, positions, k=k[:2], k_out=k_given)
        transformed = gyre.hadamard(encoder, gyre.hadamard(encoder, q))
        doubled = gyre.kv_transform(encoder, q, matrix)
        given = np.zeros_like(q)
        assert gyre.rope(encoder, q, positions, given) is given
    for made in (out, merged, merged_too):
        assert isinstance(made, gyre.Tensor) and np.abs(made.numpy() - expected).max() < 1e-5
    assert halves.dtype == "f16" and np.abs(halves.numpy().astype(np.float32) - expected).max() < 1e-2
    assert np.array_equal(rotated.numpy(), given) and normed.shape == q.shape
    assert np.array_equal(pairs[0][0].numpy(), given) and np.array_equal(pairs[1][0].numpy(), normed.numpy())
    assert same[1] is k_given and np.array_equal(pairs[0][1].numpy(), k_given) and pairs[1][1].shape == k_given.shape
    assert np.abs(transformed.numpy() - q).max() < 1e-5 and np.array_equal(doubled.numpy(), 2 * q)
    with pytest.raises(ValueError, match="attention: q must be"):
        gyre.attention(encoder, q[0], k_cache, v_cache, length=30)


def test_dequantized_rows_that_are_not_given_are_made(encoder, rng):
    k = normal(rng, 20, 2, 64)
    cache = gyre.KvBuffer.allocate("cpu", format="tq8", kv_heads=2, capacity=24, head_dim=64)
    given = np.zeros((21, 2, 64), np.float32)
    with encoder:
        gyre.kv_quantize(encoder, k, cache)
        made = gyre.kv_dequantize(encoder, cache, first_slot=3)
        assert gyre.kv_dequantize(encoder, cache, given, first_slot=3) is given
    assert made.dtype == "f32" and np.array_equal(made.numpy(), given) and np.abs(given[:17] - k[3:]).max() < 0.1
    with pytest.raises(ValueError, match="kv_dequantize"):
        gyre.kv_dequantize(encoder, cache, first_slot=25)


def test_a_device_says_what_it_supports():
    assert gyre.supports_attention("cpu", k="tq8", v="tq4", q="f16", out="bf16", paged=True)
    assert gyre.supports_attention("cpu", k="tq8", v="f16", latent=True)
    assert not gyre.supports_attention("cpu", k="mlx_native4", v="f16", latent=True)
    assert gyre.supports_kv_copy("cpu", source="f32", cache="bf16") and not gyre.supports_kv_copy("cpu", cache="i64")
    assert gyre.supports_kv_quantize(gyre.Device("cpu"), source="f16", format="tq2")
    assert gyre.supports_rope("cpu", x="f16", out="f32") and not gyre.supports_rope("cpu", x="u8")
    with pytest.raises(ValueError, match='dtype must be one of f32, .*, i64; got "f64"'):
        gyre.supports_rope("cpu", x="f64")


def test_a_graph_replays_what_was_recorded(encoder, rng):
    x, out = normal(rng, 3, 64), np.zeros((3, 64), np.float32)
    gyre.hadamard(encoder, x, out)
    graph = encoder.instantiate()
    assert graph.size == len(graph) == 1 and encoder.size == 0 and not out.any()
    for _ in range(3):
        x[:] = normal(rng, 3, 64)
        graph.replay().wait()
        assert np.allclose(out[:, 0], x.sum(-1) / 8, atol=1e-5)


def test_refusals_name_the_op_the_operand_and_the_rule(encoder):
    x = np.zeros((2, 64), np.float32)
    for call, words in [
        (lambda: gyre.hadamard(encoder, x, np.zeros((3, 64), np.float32)), "hadamard: "),
        (lambda: gyre.hadamard(encoder, x.astype(np.float64), x), "hadamard: x: dtype float64"),
        (lambda: gyre.hadamard(encoder, x, x, signs="odd"), 'hadamard: signs must be one of .*; got "odd"'),
        (lambda: gyre.rope(encoder, x, x, x), "rope: "),
        (lambda: gyre.rope(encoder, x, x, x, mode="flat"), 'rope: mode must be .* got "flat"'),
        (lambda: gyre.KvBuffer.allocate("cpu", format="q4", kv_heads=1, capacity=1, head_dim=64), "q4"),
        (lambda: gyre.KvBuffer.allocate("cpu", role="q", kv_heads=1, capacity=1, head_dim=64), 'role must .* got "q"'),
    ]:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert isinstance(caught.value, gyre.Error)
    with pytest.raises(TypeError, match="hadamard: out: needs a gyre.Tensor or an object with __dlpack__, got list"):
        gyre.hadamard(encoder, x, [1.0])
    assert encoder.size == 0


def test_formats_describe_themselves():
    formats = {info.name: info for info in gyre.kv_formats()}
    assert {"f32", "f16", "bf16", "tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "mlx_native4"} <= set(formats)
    assert formats["tq4"].bits == 4 and formats["tq4"].compressed and not formats["f16"].compressed
