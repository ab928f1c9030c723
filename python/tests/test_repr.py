"""What objects say of themselves."""

import numpy as np
from step_inputs import DIM, KV_HEADS, inputs

import gyre


def test_caches_encoders_and_graphs(encoder, rng):
    cache = gyre.KvCache("cpu", kv_heads=KV_HEADS, head_dim=DIM, capacity=64, layers=gyre.kv_layers(2))
    about = f"layers=2, kv_heads={KV_HEADS}, head_dim={DIM}, nbytes={cache.nbytes}, device=cpu)"
    assert repr(cache) == f"gyre.KvCache(0 of 64 tokens, {about}"
    q, k, v = inputs(rng, 5)
    out = np.zeros_like(q)
    cache.begin_step(encoder, 5)
    for layer in range(2):
        cache.append(encoder, layer, k, v)
        cache.attend(encoder, layer, q, out)
    assert repr(cache) == f"gyre.KvCache(5 of 64 tokens, {about}"
    size, barriers = len(encoder), encoder.barriers
    assert size > 2 and repr(encoder) == f"gyre.Encoder({size} commands, {barriers} barriers, device=cpu)"
    fence = encoder.submit()
    fence.wait()
    assert repr(fence) == "gyre.Fence(done)" and repr(encoder) == "gyre.Encoder(0 commands, 0 barriers, device=cpu)"
    cache.append(encoder, 0, k, v)
    graph = encoder.instantiate()
    assert repr(graph) == f"gyre.Graph({len(graph)} commands)"
    (first, _) = cache.describe()
    heads = f"kv_heads={KV_HEADS}, head_dim={DIM}, v_head_dim={DIM}"
    layer = f'gyre.KvLayer(k="tq8", v="tq4", window=0, tail=128, sink_tokens=1, {heads})'
    assert repr(first).startswith(f"gyre.KvLayerInfo({layer}, slots=63, ")
    assert f'kernel="{first.kernel}"' in repr(first)


def test_pages_pools_sequences_and_batches(encoder, rng):
    pages = gyre.KvPages("cpu", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=16, pages=3)
    of = f"kv_heads={KV_HEADS}, head_dim={DIM}, device=cpu)"
    assert repr(pages) == f"gyre.KvPages(3 pages of 16 tokens, k=tq8, v=tq4, {of}"
    layers = [gyre.KvLayer(), gyre.KvLayer("f16", "f16", window=20)]
    pool = gyre.KvPool("cpu", kv_heads=KV_HEADS, head_dim=DIM, pages=9, page_tokens=16, layers=layers)
    batch = gyre.KvBatch(pool, max_sequences=2, max_tokens=32, max_query_length=20, max_kv_length=100)
    assert repr(batch) == (
        "gyre.KvBatch(max_sequences=2, max_tokens=32, max_query_length=20, max_kv_length=100, device=cpu)"
    )
    sequence = pool.sequence()
    _, k, v = inputs(rng, 20)
    batch.begin_step(encoder, [(sequence, 20)])
    for layer in range(2):
        batch.append(encoder, layer, k, v)
    encoder.submit().wait()
    assert repr(sequence) == "gyre.KvSequence(20 tokens)"
    info = pool.describe()
    assert repr(pool) == (
        f"gyre.KvPool(sequences=1, all keys: 2 of 9 pages, window 20: 2 of {info.groups[1].pages} pages, "
        f"nbytes={info.nbytes}, device=cpu)"
    )
    fork = sequence.fork()
    full = pool.describe().groups[0]
    assert repr(full) == (
        f"gyre.KvGroupInfo(all keys: 2 of 9 pages used, 2 shared, 0 cached, 1 layers, page_bytes={full.page_bytes})"
    )
    assert len(fork) == 20
