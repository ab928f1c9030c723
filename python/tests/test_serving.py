"""Pages, and the pool, sequences and batches over them."""

import numpy as np
import pytest
from step_inputs import DIM, HEADS, KV_HEADS, inputs
from test_ops import normal, softmax_attention

import gyre

PAGE = 16


def make_pool(pages=32, layers=None, **options):
    layers = [gyre.KvLayer("f32", "f32")] if layers is None else layers
    return gyre.KvPool("cpu", kv_heads=KV_HEADS, head_dim=DIM, pages=pages, layers=layers, page_tokens=PAGE, **options)


def step(batch, encoder, steps, q, k, v, layers=1):
    out = np.zeros_like(q)
    batch.begin_step(encoder, steps)
    for layer in range(layers):
        batch.append(encoder, layer, k, v)
        batch.attend(encoder, layer, q, out)
    encoder.submit().wait()
    return out


def test_a_ragged_batch_is_each_sequence_alone(encoder, rng):
    pool = make_pool()
    batch = gyre.KvBatch(pool, max_sequences=4, max_tokens=64)
    lengths = [20, 1, 33]
    sequences = [pool.sequence() for _ in lengths]
    parts = [inputs(rng, length) for length in lengths]
    joined = [np.concatenate([part[i] for part in parts]) for i in range(3)]
    out = step(batch, encoder, [(s, n, True) for s, n in zip(sequences, lengths)], *joined)
    assert batch.tokens == 54 and [len(s) for s in sequences] == lengths
    begin = 0
    for (q, k, v), length in zip(parts, lengths):
        expected, _ = softmax_attention(q, k, v, DIM**-0.5)
        assert np.abs(out[begin : begin + length] - expected).max() < 1e-5
        begin += length


def test_forks_share_pages_and_prefixes_are_found(encoder, rng):
    pool = make_pool()
    batch = gyre.KvBatch(pool, max_sequences=4, max_tokens=64)
    prompt = pool.sequence()
    step(batch, encoder, [(prompt, 40, True)], *inputs(rng, 40))
    forks = [prompt.fork() for _ in range(3)]
    group = pool.describe().groups[0]
    assert (group.used, group.shared, group.free) == (3, 3, 29)
    tokens = list(range(40))
    pool.publish(prompt, tokens)
    assert pool.match(tokens + [7]).length == 32 and pool.match([1, *tokens]).length == 0
    del forks
    prompt.rollback(8)
    assert prompt.length == 32 and pool.describe().groups[0].shared == 0
    prompt.clear()
    pool.forget()
    assert pool.describe().groups[0].free == 32


def test_layers_that_differ_and_share(encoder, rng):
    pool = make_pool(
        layers=[
            gyre.KvLayer("f32", "f32", kv_heads=1, head_dim=32, v_head_dim=16),
            gyre.KvLayer("f32", "f32"),
            gyre.KvLayer(kv_shared_layer_index=0),
        ]
    )
    assert [layer.v_head_dim for layer in pool.layers] == [16, DIM, 16]
    (group,) = pool.describe().groups
    assert group.layers == [0, 1] and group.page_bytes == 4 * PAGE * ((32 + 16) + KV_HEADS * 2 * DIM)
    batch, sequence, rows = gyre.KvBatch(pool), pool.sequence(), []
    batch.begin_step(encoder, [(sequence, 9)])
    for layer in pool.layers[:2]:
        rows.append([normal(rng, 9, layer.kv_heads, dim) for dim in (layer.head_dim, layer.v_head_dim)])
        batch.append(encoder, len(rows) - 1, *rows[-1])
    with pytest.raises(gyre.Error, match="kv_batch.append: layer 2 has no K and V of its own"):
        batch.append(encoder, 2, *rows[0])
    q = normal(rng, 9, 3, 32)
    out = batch.attend(encoder, 2, q)
    encoder.submit().wait()
    assert np.abs(out.numpy() - softmax_attention(q, *rows[0], 32**-0.5)[0]).max() < 1e-5


def test_attend_makes_its_output(encoder, rng):
    pool = make_pool()
    batch = gyre.KvBatch(pool)
    sequence, (q, k, v) = pool.sequence(), inputs(rng, 9)
    with encoder:
        batch.begin_step(encoder, [(sequence, 9)])
        batch.append(encoder, 0, k, v)
        made = batch.attend(encoder, 0, q)
        given = np.zeros_like(q)
        assert batch.attend(encoder, 0, q, given) is given
    assert np.array_equal(made.numpy(), given) and given.any()


def test_a_recorded_step_serves_other_batches(encoder, rng):
    pool = make_pool()
    batch = gyre.KvBatch(pool, max_sequences=2, max_tokens=2)
    q, k, v = inputs(rng, 2)
    out = np.zeros((2, HEADS, DIM), np.float32)
    batch.record()
    batch.append(encoder, 0, k, v)
    batch.attend(encoder, 0, q, out)
    graph = encoder.instantiate()
    batch.end_step()
    a, b = pool.sequence(), pool.sequence()
    for steps in ([(a, 1)], [(a, 1), (b, 1)], [(b, 1)]):
        batch.begin_step(encoder, steps)
        encoder.submit()
        graph.replay().wait()
        batch.end_step()
    assert (a.length, b.length) == (2, 2) and np.isfinite(out).all() and np.abs(out).max() > 0


def test_a_full_pool_refuses(encoder, rng):
    pool = make_pool(pages=2)
    batch = gyre.KvBatch(pool, max_sequences=2, max_tokens=64)
    a, b = pool.sequence(), pool.sequence()
    with pytest.raises(gyre.OutOfMemory, match='1 pages are missing: the step needs 3 of group "all keys"'):
        batch.begin_step(encoder, [(a, 17), (b, 16)])
    assert (a.length, b.length) == (0, 0) and pool.describe().groups[0].free == 2
    other = make_pool()
    with pytest.raises(gyre.Error, match="pool"):
        batch.begin_step(encoder, [(other.sequence(), 1)])


def test_what_is_no_sequence_is_refused(encoder, rng):
    pool = make_pool()
    batch = gyre.KvBatch(pool, max_sequences=2, max_tokens=64)
    for steps in ([(None, 1)], [(None, 1, True)]):
        with pytest.raises(gyre.InvalidArgument, match="None"):
            batch.begin_step(encoder, steps)
    for steps in ([pool.sequence()], [(pool.sequence(),)], [(pool.sequence(), -1)], [("a", 1)]):
        with pytest.raises(TypeError):
            batch.begin_step(encoder, steps)
    assert pool.describe().sequences == 0


def test_a_step_that_is_dropped_or_not_submitted(encoder, rng, tmp_path):
    pool = make_pool()
    batch = gyre.KvBatch(pool, max_sequences=2, max_tokens=64)
    sequence = pool.sequence()
    _, k, v = inputs(rng, 20)
    batch.begin_step(encoder, [(sequence, 20)])
    batch.append(encoder, 0, k, v)
    with pytest.raises(gyre.InvalidArgument, match="not submitted"):
        pool.save(sequence, tmp_path / "sequence")
    encoder.clear()
    with pytest.raises(gyre.InvalidArgument, match="dropped"):
        sequence.fork()
    sequence.rollback(20)
    assert sequence.fork().length == 0


def test_files_and_pages_as_bytes(encoder, rng, tmp_path):
    pool, other = make_pool(), make_pool()
    batch, later = (gyre.KvBatch(p, max_sequences=2, max_tokens=64) for p in (pool, other))
    prompt = pool.sequence()
    step(batch, encoder, [(prompt, 40, True)], *inputs(rng, 40))
    tokens = list(range(40))
    pool.publish(prompt, tokens)
    pool.save(prompt, tmp_path / "sequence")
    pool.save_prefixes(str(tmp_path / "prefixes"))
    loaded, sent = other.load(tmp_path / "sequence"), other.sequence()
    for page in range(3):
        other.import_page(sent, pool.export_page(prompt, page))
    assert other.load_prefixes(tmp_path / "prefixes") == 2
    matched = other.match(tokens)
    assert (loaded.length, sent.length, matched.length) == (40, 40, 32)
    matched.clear()
    q, k, v = inputs(rng, 1)
    expected = step(batch, encoder, [(prompt, 1)], q, k, v)
    for sequence in (loaded, sent):
        assert (step(later, encoder, [(sequence, 1)], q, k, v) == expected).all()
    with pytest.raises(gyre.IoError, match="page"):
        other.import_page(sent, b"no page")
    with pytest.raises(gyre.IoError):
        other.load(tmp_path / "prefixes")


def test_pages_in_memory_of_the_caller(encoder, rng):
    each = gyre.kv_page_bytes(k="tq8", v="tq4", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE)
    memory = np.zeros((6, each + 32), np.uint8)[:, :each]
    pages = gyre.KvPages("cpu", kv_heads=KV_HEADS, head_dim=DIM, page_tokens=PAGE, memory=memory)
    q, k, v = inputs(rng, 20)
    table = np.array([[4, 1]], np.int32)
    slots = np.array([table[0, i // PAGE] * PAGE + i % PAGE for i in range(20)], np.int64)
    gyre.kv_write(encoder, k, v, pages, slots)
    out = np.zeros_like(q)
    lengths, begin = np.array([20], np.int32), np.array([0, 20], np.int32)
    bounds = {"max_query_length": 20, "min_query_length": 20}
    schedule = gyre.attention_schedule(
        encoder, pages, lengths, begin, tokens=20, heads=q.shape[1], q_dtype="f32", max_kv_length=2 * PAGE, **bounds
    )
    assert schedule is None  # the CPU needs none
    gyre.paged_attention(
        encoder, q, pages, table, lengths, begin, out, schedule=schedule, scale=DIM**-0.5, settled_keys=True, **bounds
    )
    encoder.submit().wait()
    expected, _ = softmax_attention(q, k, v, DIM**-0.5)
    assert np.square(out - expected).sum() < 0.03 * np.square(expected).sum()
    assert memory[4].any() and memory[1].any() and not memory[[0, 2, 3, 5]].any()
    before = memory.copy()
    gyre.kv_page_copy(encoder, pages, np.array([4], np.int32), np.array([0], np.int32))
    encoder.submit().wait()
    assert (memory[0] == before[4]).all() and (memory[1:] == before[1:]).all()
