"""rope_append has the bits of rope or norm_rope and what stores k and v after it."""

import numpy as np
import pytest
from step_inputs import DIM, HEADS, KV_HEADS, inputs
from test_ops import normal

import gyre

PAGE = 16
LAYER = gyre.KvLayer("tq8", "tq4", tail=8, sink_tokens=4)


def weights(rng):
    return {"q_weight": normal(rng, DIM), "k_weight": normal(rng, DIM)}


def rotate(encoder, q, k, positions, q_weight=None, k_weight=None, norm=False, **options):
    """q and k by the ops that rope_append stands for."""
    q_out, k_out = np.zeros_like(q), np.zeros_like(k)
    if norm:
        options |= {"weight": q_weight, "k_weight": k_weight}
    op = gyre.norm_rope if norm else gyre.rope
    op(encoder, q, positions, q_out, k=k, k_out=k_out, **options)
    return q_out, k_out


OPTIONS = {
    "rope": lambda rng: {},
    "adjacent": lambda rng: {"pairing": "adjacent", "rotary_dim": 32, "base": 500.0, "magnitude": 0.5},
    "factors": lambda rng: {"factors": np.linspace(1, 4, DIM // 2, dtype=np.float32)},
    "table": lambda rng: {"frequencies": gyre.rope_table("cpu", [1 / (1 + i) for i in range(DIM // 2)])},
    "norm": lambda rng: {"norm": True, "epsilon": 1e-3, "weight_offset": 1.0, **weights(rng)},
    "norm alone": lambda rng: {"norm": True, "rope": False, **weights(rng)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_into_pages(encoder, rng, name):
    options = OPTIONS[name](rng)
    one, two = (gyre.KvPages("cpu", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, pages=4) for _ in range(2))
    q, k, v = inputs(rng, 20)
    slots = np.array([40 + i if i < 13 else i - 13 for i in range(20)], np.int64)
    positions = None if options.get("rope") is False else np.arange(100, 120, dtype=np.int32)
    q_out = np.zeros_like(q)
    gyre.rope_append(encoder, k, v, one, slots, q, q_out, positions, **options)
    assert encoder.size == 1
    q_rotated, k_rotated = rotate(encoder, q, k, positions, **options)
    gyre.kv_write(encoder, k_rotated, v, two, slots)
    encoder.submit().wait()
    assert (q_out == q_rotated).all() and (q_out != q).any() and (k_rotated != k).any()
    written = one.memory.numpy()
    assert (written == two.memory.numpy()).all() and written.any()


def test_a_q_out_that_is_not_given_is_made(encoder, rng):
    q, k, v = inputs(rng, 4)
    pages = gyre.KvPages("cpu", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, pages=1)
    slots = positions = np.arange(4, dtype=np.int32)
    given = np.zeros_like(q)
    with encoder:
        made = gyre.rope_append(encoder, k, v, pages, slots, q, positions=positions)
        assert gyre.rope_append(encoder, k, v, pages, slots, q, given, positions) is given
        assert gyre.rope_append(encoder, k, v, pages, slots, positions=positions) is None
    assert isinstance(made, gyre.Tensor) and np.array_equal(made.numpy(), given) and given.any()
    cache = gyre.KvCache("cpu", kv_heads=KV_HEADS, head_dim=DIM, capacity=16)
    with encoder:
        cache.begin_step(encoder, 4)
        made = cache.rope_append(encoder, 0, k, v, q=q)
    assert np.array_equal(made.numpy(), given)


def test_calibrated_slots(encoder, rng):
    eye = np.broadcast_to(np.eye(DIM, dtype=np.float32), (KV_HEADS, DIM, DIM)).copy()
    shifted = gyre.KvCalibration(gyre.KvTransform(eye, eye, normal(rng, KV_HEADS, DIM)))
    q, k, v = inputs(rng, 4)
    slots = positions = np.arange(4, dtype=np.int32)
    one, two, plain = (gyre.KvPages("cpu", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, pages=1) for _ in range(3))
    given = {"k_calibration": shifted, "v_calibration": shifted}
    with encoder:
        gyre.rope_append(encoder, k, v, one, slots, positions=positions, **given)
        gyre.rope_append(encoder, k, v, plain, slots, positions=positions)
        gyre.kv_write(encoder, gyre.rope(encoder, k, positions), v, two, slots, **given)
    assert (one.memory.numpy() == two.memory.numpy()).all()
    assert (one.memory.numpy() != plain.memory.numpy()).any()


@pytest.mark.parametrize("norm", [False, True])
def test_into_a_cache(encoder, rng, norm):
    options = {"norm": True, **weights(rng)} if norm else {"pairing": "adjacent"}
    one, two = (gyre.KvCache("cpu", kv_heads=KV_HEADS, head_dim=DIM, capacity=64, layers=[LAYER]) for _ in range(2))
    for tokens in (20, 1, 7):
        q, k, v = inputs(rng, tokens)
        outs = [np.zeros_like(q) for _ in range(2)]
        one.begin_step(encoder, tokens)
        two.begin_step(encoder, tokens)
        q_rotated, k_rotated = rotate(encoder, q, k, two.positions(tokens), **options)
        one.rope_append(encoder, 0, k, v, q=q, q_out=q, **options)
        one.attend(encoder, 0, q, outs[0])
        two.append(encoder, 0, k_rotated, v)
        two.attend(encoder, 0, q_rotated, outs[1])
        encoder.submit().wait()
        assert (q == q_rotated).all() and (outs[0] == outs[1]).all() and outs[0].any()


def test_into_a_batch(encoder, rng):
    pool = gyre.KvPool("cpu", kv_heads=KV_HEADS, head_dim=DIM, pages=32, layers=[LAYER], page_tokens=PAGE)
    batches = [gyre.KvBatch(pool, max_sequences=2, max_tokens=64) for _ in range(2)]
    sequences = [[pool.sequence(), pool.sequence()] for _ in batches]
    for lengths in ((20, 3), (1, 1)):
        q, k, v = inputs(rng, sum(lengths))
        outs = []
        for index, batch in enumerate(batches):
            batch.begin_step(encoder, list(zip(sequences[index], lengths)))
            out, rotated = np.zeros_like(q), np.zeros_like(q)
            if index == 0:
                batch.rope_append(encoder, 0, k, v, q=q, q_out=rotated, base=500.0)
            else:
                rotated, k_rotated = rotate(encoder, q, k, batch.positions(), base=500.0)
                batch.append(encoder, 0, k_rotated, v)
            batch.attend(encoder, 0, rotated, out)
            encoder.submit().wait()
            outs.append(out)
        assert (outs[0] == outs[1]).all() and outs[0].any()


def test_keys_and_values_alone(encoder, rng):
    one, two = (gyre.KvCache("cpu", kv_heads=KV_HEADS, head_dim=DIM, capacity=64, layers=[LAYER]) for _ in range(2))
    q, k, v = inputs(rng, 9)
    outs = [np.zeros_like(q) for _ in range(2)]
    for cache, given, out in ((one, {}, outs[0]), (two, {"q": q, "q_out": np.zeros_like(q)}, outs[1])):
        cache.begin_step(encoder, 9)
        cache.rope_append(encoder, 0, k, v, **given)
        cache.attend(encoder, 0, q, out)
    encoder.submit().wait()
    assert (outs[0] == outs[1]).all() and outs[0].any()


def test_refusals_change_nothing(encoder, rng):
    pages = gyre.KvPages("cpu", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, pages=1)
    cache = gyre.KvCache("cpu", kv_heads=KV_HEADS, head_dim=DIM, capacity=64)
    pool = gyre.KvPool("cpu", kv_heads=KV_HEADS, head_dim=DIM, pages=4)
    q, k, v = inputs(rng, 4)
    slots, positions = np.arange(4, dtype=np.int64), np.arange(4, dtype=np.int32)

    def write(**changes):
        given = {"k": k, "v": v, "pages": pages, "slots": slots, "q": q, "q_out": q, "positions": positions}
        gyre.rope_append(encoder, **(given | changes))

    for call, words in [
        (lambda: write(positions=None), "rope_append: "),
        (lambda: write(q=None), "rope_append: q_out or q_weight is defined without q"),
        (lambda: write(rope=False), "rope_append: neither rope nor norm is asked for"),
        (lambda: write(k_weight=normal(rng, DIM)), "rope_append: .* without a norm"),
        (lambda: write(q_out=np.zeros((4, HEADS, DIM), np.float16)), "rope_append: q_out must have the dtype of q"),
        (lambda: write(slots=positions[:3]), "rope_append: "),
        (lambda: write(pairing="other"), "rope: pairing must be one of"),
        (lambda: cache.rope_append(encoder, 1, k, v), "kv_cache.rope_append: .*layer 1"),
        (lambda: cache.rope_append(encoder, 0, k, v, q_out=q), "kv_cache.rope_append: q_out"),
        (lambda: gyre.KvBatch(pool).rope_append(encoder, 0, k, v), "kv_batch.rope_append: "),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    assert encoder.size == 0 and not pages.memory.numpy().any()
    with pytest.raises(TypeError):
        gyre.rope_append(encoder, k, None, pages, slots)
