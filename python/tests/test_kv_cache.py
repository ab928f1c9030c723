"""The cache object: steps, graphs, forks, files."""

import numpy as np
import pytest
from step_inputs import DIM, HEADS, KV_HEADS, inputs
from test_ops import normal, softmax_attention

import gyre


def make(layers=None, capacity=64, **options):
    layers = [gyre.KvLayer("f32", "f32")] if layers is None else layers
    return gyre.KvCache("cpu", kv_heads=KV_HEADS, head_dim=DIM, capacity=capacity, layers=layers, **options)


def step(cache, encoder, q, k, v, layer=0, **options):
    out = np.zeros_like(q)
    cache.begin_step(encoder, len(k))
    for index in range(len(cache.layers)):
        cache.append(encoder, index, k, v)
    cache.attend(encoder, layer, q, out, scale=0.125, **options)
    encoder.submit().wait()
    return out


def test_prefill_then_decode(encoder, rng):
    cache = make()
    q, k, v = inputs(rng, 20)
    step(cache, encoder, q[:15], k[:15], v[:15])
    for at in range(15, 20):
        out = step(cache, encoder, q[at : at + 1], k[at : at + 1], v[at : at + 1])
        expected, _ = softmax_attention(q[at : at + 1], k[: at + 1], v[: at + 1], 0.125)
        assert np.abs(out - expected).max() < 1e-5
    assert cache.length == len(cache) == 20


def test_it_says_what_it_is():
    layers = [gyre.KvLayer(), gyre.KvLayer("f16", "f16", window=8), gyre.KvLayer("tq4", "tq2", tail=16, sink_tokens=4)]
    cache = make(layers, step_tokens=32)
    assert (cache.kv_heads, cache.head_dim, cache.capacity, cache.step_tokens) == (KV_HEADS, DIM, 64, 32)
    assert [(layer.k, layer.window, layer.head_dim) for layer in cache.layers] == [
        (layer.k, layer.window, DIM) for layer in layers
    ]
    assert cache.device == gyre.Device("cpu") and cache.length == 0
    infos = cache.describe()
    assert [info.slots for info in infos] == [64, 8 + 31, 64 - 4] and all(info.kernel for info in infos)
    assert sum(info.nbytes for info in infos) <= cache.nbytes
    assert (layers[2].k, layers[2].v, layers[2].tail, layers[2].sink_tokens, layers[1].window) == ("tq4", "tq2", 16, 4, 8)
    assert layers[0] == gyre.KvLayer("tq8", "tq4") != layers[1] and layers[0] != "tq8" and "tq8" in repr(layers[0])
    assert len({gyre.KvLayer(), gyre.KvLayer()}) == 1


# Heads of 32 in windows and of 64 in full layers, and layers that read another's K and V.
MIXED = [
    gyre.KvLayer("f32", "f32", window=8, kv_heads=1, head_dim=32, v_head_dim=16),
    gyre.KvLayer("f32", "f32"),
    gyre.KvLayer(kv_shared_layer_index=0),
    gyre.KvLayer(kv_shared_layer_index=1),
]


def test_layers_that_differ(encoder, rng, tmp_path):
    cache = make(MIXED)
    assert [(layer.kv_heads, layer.head_dim, layer.v_head_dim) for layer in cache.layers] == [
        (1, 32, 16),
        (KV_HEADS, DIM, DIM),
    ] * 2
    assert [layer.kv_shared_layer_index for layer in cache.layers] == [None, None, 0, 1]
    assert [info.nbytes == 0 for info in cache.describe()] == [False, False, True, True]
    rows = {}
    cache.begin_step(encoder, 12)
    for index, layer in enumerate(cache.layers):
        if layer.kv_shared_layer_index is None:
            rows[index] = [normal(rng, 12, layer.kv_heads, dim) for dim in (layer.head_dim, layer.v_head_dim)]
            cache.append(encoder, index, *rows[index])
        else:
            with pytest.raises(gyre.Error, match=f"layer {index} has no K and V of its own"):
                cache.append(encoder, index, *rows[index - 2])
        q = normal(rng, 1, 2 * layer.kv_heads, layer.head_dim)
        out = cache.attend(encoder, index, q, scale=0.125)  # made in the layer's shape
        encoder.submit().wait()
        k, v = rows[layer.kv_shared_layer_index if layer.kv_shared_layer_index is not None else index]
        seen = 12 if layer.window == 0 else layer.window
        expected, _ = softmax_attention(q, k[-seen:], v[-seen:], 0.125)
        assert np.abs(out.numpy() - expected).max() < 1e-5
    cache.save(tmp_path / "cache")
    info = gyre.inspect_snapshot(tmp_path / "cache")
    assert info.version == 4 and info.layers == cache.layers and info.head_dim == 0
    other = gyre.KvCache(capacity=64, layers=cache.layers)
    other.load(tmp_path / "cache")
    assert other.length == 12


def test_refused_layers():
    with pytest.raises(gyre.Error, match="layer 1 shares the cache of layer 0, whose head_dim is 64, got 32"):
        make([gyre.KvLayer(), gyre.KvLayer(kv_shared_layer_index=0, head_dim=32)])
    with pytest.raises(gyre.Error, match="layer 0 can share the cache of an earlier layer"):
        make([gyre.KvLayer(kv_shared_layer_index=0)])
    with pytest.raises(gyre.Error, match="layer 0: kv_heads must be given"):
        gyre.KvCache(capacity=64)


def test_layers_of_a_model():
    layers = gyre.kv_layers(6, gyre.KvLayer("tq4", "tq4"), edge_layers=1, window=32, full_every=3)
    assert len(layers) == 6 and layers[5].k == "tq8" and {layer.window for layer in layers} == {0, 32}
    layers = gyre.kv_layers(6, gyre.KvLayer(head_dim=512), window=32, full_every=3, kv_shared_layers=3)
    assert [layer.kv_shared_layer_index for layer in layers] == [None, None, None, 1, 1, 2]
    assert [layer.head_dim for layer in layers] == [0, 0, 512] * 2


def test_a_recorded_step_replays_for_a_whole_generation(encoder, rng):
    layers = [gyre.KvLayer("tq8", "tq4", tail=4), gyre.KvLayer("f16", "f16", window=8)]
    eager, replayed = make(layers, step_tokens=4), make(layers, step_tokens=4)
    q, k, v = inputs(rng, 1)
    out = np.zeros_like(q)
    positions = replayed.positions(1)
    assert (positions.dtype, positions.shape) == ("i32", (1,))
    replayed.begin_step(encoder, 1)
    encoder.submit().wait()
    for index in range(2):
        replayed.append(encoder, index, k, v)
    replayed.attend(encoder, 1, q, out, scale=0.125)
    graph = encoder.instantiate()
    for at in range(20):
        if at:
            replayed.begin_step(encoder, 1)
            encoder.submit().wait()
        q[:], k[:], v[:] = inputs(rng, 1)
        graph.replay().wait()
        assert positions.numpy()[0] == at
        assert (out == step(eager, encoder, q, k, v, layer=1)).all()


def test_extend_is_not_for_graphs(encoder):
    cache = make()
    cache.begin_step(encoder, 1)
    with pytest.raises(gyre.Error, match="encoder.instantiate"):
        encoder.instantiate()


def test_truncate_clear_and_fork(encoder, rng):
    cache = make()
    q, k, v = inputs(rng, 10)
    step(cache, encoder, q, k, v)
    other = cache.fork(encoder)
    encoder.submit().wait()
    cache.rollback(encoder, 4)
    assert (cache.length, other.length) == (6, 10)
    fresh = inputs(rng, 1)
    out = step(cache, encoder, *fresh)
    expected, _ = softmax_attention(fresh[0], np.r_[k[:6], fresh[1]], np.r_[v[:6], fresh[2]], 0.125)
    assert np.abs(out - expected).max() < 1e-5
    del cache
    out = step(other, encoder, *fresh)
    expected, _ = softmax_attention(fresh[0], np.r_[k, fresh[1]], np.r_[v, fresh[2]], 0.125)
    assert np.abs(out - expected).max() < 1e-5
    other.clear(encoder)
    assert other.length == 0


def test_options_of_attend(encoder, rng):
    q, k, v = inputs(rng, 3)
    alibi_slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    sink_logits = np.array([0.5, 1.0, -1.0, 3.0], np.float32)
    lse = np.zeros((3, HEADS), np.float32)
    options = {"window": 2, "soft_cap": 3.0, "sink_logits": sink_logits, "alibi_slopes": alibi_slopes}
    out = step(make(), encoder, q, k, v, lse=lse, **options)
    expected, expected_lse = softmax_attention(q, k, v, 0.125, **options)
    assert np.abs(out - expected).max() < 1e-5 and np.abs(lse - expected_lse).max() < 1e-5
    tree_mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.uint8)
    out = step(make(), encoder, q, k, v, tree_mask=tree_mask)
    assert np.abs(out - softmax_attention(q, k, v, 0.125, mask=tree_mask)[0]).max() < 1e-5
    out = step(make(), encoder, q, k, v, causal=False)
    assert np.abs(out - softmax_attention(q, k, v, 0.125, mask=np.ones((3, 3)))[0]).max() < 1e-5


def test_refusals_change_nothing(encoder, rng):
    cache = make(step_tokens=16)
    q, k, v = inputs(rng, 4)
    for call, words in [
        (lambda: cache.begin_step(encoder, 65), "kv_cache.begin_step"),
        (lambda: cache.begin_step(encoder, 17), "16"),
        (lambda: cache.append(encoder, 0, k[:0], v[:0]), "kv_cache.append"),
        (lambda: cache.rollback(encoder, 1), "kv_cache.rollback"),
        (lambda: cache.attend(encoder, 3, q, q), "layer"),
        (lambda: make([gyre.KvLayer("tq9")]), "tq9"),
        (lambda: make([]), "layer"),
        (lambda: make(capacity=0), "capacity"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    assert cache.length == 0 and encoder.size == 0


def test_a_step_is_checked(encoder, rng, tmp_path):
    cache = make([gyre.KvLayer()] * 3)
    q, k, v = inputs(rng, 4)
    cache.append(encoder, 0, k, v)
    with pytest.raises(ValueError, match="encoder.submit: kv_cache.append of layer 0 has no step"):
        encoder.submit()
    encoder.clear()
    cache.begin_step(encoder, 4)
    cache.append(encoder, 1, k, v)
    with pytest.raises(ValueError, match="4 tokens, got 5 queries"):
        cache.attend(encoder, 1, normal(rng, 5, HEADS, DIM), normal(rng, 5, HEADS, DIM))
    with pytest.raises(ValueError, match="kv_cache.save.*not submitted"):
        cache.save(tmp_path / "cache")
    encoder.submit().wait()
    with pytest.raises(ValueError, match="kv_cache.begin_step.*lacks append.* of layers 0, 2"):
        cache.begin_step(encoder, 1)
    with pytest.raises(ValueError, match="kv_cache.end_step.*lacks append.* of layers 0, 2"):
        cache.end_step()
    cache.end_step(captured=True)
    cache.begin_step(encoder, 1)


def test_attend_makes_its_output(encoder, rng):
    q, k, v = inputs(rng, 6)
    cache = make()
    with encoder:
        cache.begin_step(encoder, 6)
        cache.append(encoder, 0, k, v)
        out = cache.attend(encoder, 0, q)
        cache.end_step()
    assert isinstance(out, gyre.Tensor)
    assert np.abs(out.numpy() - softmax_attention(q, k, v, DIM**-0.5)[0]).max() < 1e-5


def test_the_scale_has_a_default(encoder, rng):
    q, k, v = inputs(rng, 6)
    outs = []
    for options in ({}, {"scale": 0.125}, {"scale": 1.0}):
        cache, out = make(), np.zeros_like(q)
        cache.begin_step(encoder, 6)
        cache.append(encoder, 0, k, v)
        cache.attend(encoder, 0, q, out, **options)
        encoder.submit().wait()
        outs.append(out)
    assert (outs[0] == outs[1]).all() and (outs[0] != outs[2]).any()


def test_save_and_load(encoder, rng, tmp_path):
    layers = [gyre.KvLayer("tq8", "tq4", tail=4), gyre.KvLayer("f16", "f16", window=8)]
    cache, other = make(layers), make(layers)
    step(cache, encoder, *inputs(rng, 12))
    path = tmp_path / "cache.gyre"
    cache.save(path)
    info = gyre.inspect_snapshot(str(path))
    assert (info.length, info.kv_heads, info.head_dim, info.layers) == (12, KV_HEADS, DIM, cache.layers)
    assert info.file_bytes == path.stat().st_size and info.capacity == 64 and info.calibration == 0
    gyre.verify_snapshot(path)
    spoiled = tmp_path / "spoiled"
    spoiled.write_bytes((whole := path.read_bytes())[:-1] + bytes([whole[-1] ^ 1]))
    assert gyre.inspect_snapshot(spoiled).length == 12  # the header alone is read
    with pytest.raises(gyre.IoError, match="spoiled"):
        gyre.verify_snapshot(spoiled)
    assert {(s.layer, s.segment, s.role, s.part) for s in info.sections} >= {(0, "body", "k", "codes"), (0, "tail", "v", "codes")}
    other.load(path)
    fresh = inputs(rng, 1)
    for layer in range(2):
        a, b = (step(c, encoder, *fresh, layer=layer) for c in (cache, other))
        assert (a == b).all() and a.any()
        for c in (cache, other):
            c.rollback(encoder, 1)
    with pytest.raises(gyre.InvalidArgument, match="not submitted"):
        other.load(path)
    encoder.submit().wait()
    with pytest.raises(gyre.Error):
        make().load(path)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(gyre.IoError):
        other.load(path)
    assert other.length == 12
    with pytest.raises(OSError) as caught:
        other.load(tmp_path / "absent")
    assert isinstance(caught.value, gyre.Error) and caught.value.code == "io"


def test_a_cache_that_is_given_no_layers_has_a_tail_and_a_sink_token():
    default = gyre.KvLayer("tq8", "tq4", tail=128, sink_tokens=1)
    shaped = gyre.KvLayer("tq8", "tq4", tail=128, sink_tokens=1, kv_heads=1, head_dim=64, v_head_dim=64)
    assert gyre.KvCache("cpu", kv_heads=1, head_dim=64, capacity=40).layers == [shaped]
    assert gyre.KvPool("cpu", kv_heads=1, head_dim=64, pages=4).layers == [shaped]
    assert gyre.kv_layers(3) == [default] * 3
    assert gyre.KvLayer("tq8", "tq4").tail == 0  # a layer has what it is given
