"""Sequence-sharded decode: four processes over gloo against one process that cuts the same keys in the same way."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

import torch.distributed as dist
from sharded_worker import CASES, RANKS, work

import gyre
from gyre.sharded import ShardedCache


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank has found."""
    folder = tmp_path_factory.mktemp("sharded")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(RANKS)]


def filled(encoder, case, k, v):
    """One cache of these tokens."""
    buffers = []
    for role, form, x in (("k", case.k, k), ("v", case.v, v)):
        capacity = max(x.shape[0], 1)
        buffer = gyre.KvBuffer.allocate(
            "cpu", format=form, role=role, kv_heads=x.shape[1], capacity=capacity, head_dim=x.shape[2]
        )
        if buffer.scales is None:
            gyre.kv_copy(encoder, x, buffer.codes.permute([1, 0, 2]))
        else:
            gyre.kv_quantize(encoder, **{role: x, f"{role}_cache": buffer})
        buffers.append(buffer)
    return buffers


def one_process(case, begin, end):
    """Output and lse of the queries [begin, end), from caches with each rank's keys, merged."""
    encoder = gyre.Encoder("cpu")
    q, k, v = case.inputs()
    queries, shape = q[begin:end], (end - begin, case.heads, case.v_head_dim)
    states = torch.zeros((RANKS, *shape[:2], case.v_head_dim + 2))
    for rank in range(RANKS):
        own = [position for position in range(end) if (position // case.block) % RANKS == rank]
        partial = torch.zeros((case.splits, *states.shape[1:]))
        gyre.attention_partial(
            encoder,
            queries,
            *filled(encoder, case, k[own], v[own]),
            partial,
            length=len(own),
            scale=case.head_dim**-0.5,
            soft_cap=case.soft_cap,
            causal=end - 1 in own,
        )
        if case.splits == 1:
            encoder.submit().wait()
            states[rank] = partial[0]
            continue
        out, lse = torch.zeros(shape), torch.zeros(shape[:2])
        gyre.attention_merge(encoder, partial, out, lse=lse)
        encoder.submit().wait()
        states[rank, ..., :-2], states[rank, ..., -2], states[rank, ..., -1] = out, lse, float(len(own) > 0)
    out, lse = torch.zeros(shape, dtype=q.dtype), torch.zeros(shape[:2])
    gyre.attention_merge(encoder, states, out, lse=lse, sink_logits=case.sink_logits())
    encoder.submit().wait()
    return out.float().numpy(), lse.numpy()


def whole(case, begin, end):
    """What attention() gives over one cache with all keys in their order."""
    encoder = gyre.Encoder("cpu")
    q, k, v = case.inputs()
    out = torch.zeros((end - begin, case.heads, case.v_head_dim))
    gyre.attention(
        encoder,
        q[begin:end],
        *filled(encoder, case, k[:end], v[:end]),
        out,
        length=end,
        scale=case.head_dim**-0.5,
        soft_cap=case.soft_cap,
        sink_logits=case.sink_logits(),
    )
    encoder.submit().wait()
    return out.numpy()


def steps_of(case):
    at = case.prompt
    for tokens in case.steps:
        yield at, at + tokens
        at += tokens


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_bits_of_one_process(ranks, name):
    case = CASES[name]
    parts = [one_process(case, begin, end) for begin, end in steps_of(case)]
    for key, expected in zip(("out", "lse"), (np.concatenate(part) for part in zip(*parts))):
        for rank in ranks:
            assert rank[f"{name}/{key}"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_no_key_is_missing_or_seen_too_early(ranks, name):
    case = CASES[name]
    expected = np.concatenate([whole(case, begin, end) for begin, end in steps_of(case)])
    error = np.square(ranks[0][f"{name}/out"] - expected).sum() / np.square(expected).sum()
    assert error < {"float32": 4e-6, "float16": 4e-6, "bfloat16": 1e-4}[case.dtype]


@pytest.mark.parametrize("name", CASES)
def test_ranks_share_the_keys_equally(ranks, name):
    case = CASES[name]
    ends = [end for _, end in steps_of(case)]
    keys = ranks[0][f"{name}/keys"]
    assert keys.sum(axis=1).tolist() == ends
    assert (keys.max(axis=1) - keys.min(axis=1)).max() <= case.block
    assert (keys.min() == 0) == (ends[0] <= case.block * (RANKS - 1))


@pytest.mark.parametrize("name", CASES)
def test_bytes_sent_are_those_predicted(ranks, name):
    """A rank's state reaches every other rank once, whatever the context; gloo adds a header a message."""
    case = CASES[name]
    for rank in ranks:
        for tokens, written in zip(case.steps, rank[f"{name}/written"], strict=True):
            predicted = (RANKS - 1) * tokens * case.heads * (case.v_head_dim + 2) * 4
            assert predicted <= written <= predicted + 1024


def test_all_ranks_refuse(ranks):
    """Also those that have nothing to do: the others would wait for them."""
    for rank in ranks:
        differs, blocks, dtype = rank["refusals"]
        assert differs == "gyre.sharded: block must be the same on all ranks, rank 0 has 16, 3 32"
        assert "the queries must lie in one block of 16 tokens, got 15 to 16" in blocks
        assert "k must be float32, float16 or bfloat16 with contiguous head_dim, got torch.int32" in dtype


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


SHAPE = dict(kv_heads=2, head_dim=64, capacity=40)


def test_one_rank_is_an_ordinary_cache(alone):
    q, k, v = (torch.randn(40, heads, 64) for heads in (4, 2, 2))
    cache = ShardedCache(**SHAPE, k="f32", v="f32", block=16)
    cache.append(k[:37], v[:37])
    cache.append(k[:2], v[:2])  # dropped again
    cache.rollback(2)
    cache.append(k[37:], v[37:])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(cache.attend(q[-20:]), expected[0].transpose(0, 1)[-20:], rtol=1e-5, atol=1e-5)
    assert cache.nbytes == 2 * 2 * 48 * 64 * 4  # whole blocks


def test_a_nan_shows(alone):
    cache = ShardedCache(**SHAPE, k="f32", v="f32")
    k, v = torch.zeros(5, 2, 64), torch.ones(5, 2, 64)
    k[2, 1] = math.nan
    cache.append(k, v)
    out = cache.attend(torch.ones(1, 4, 64))
    assert out[0, :2].eq(1).all() and out[0, 2:].isnan().all()


def test_refusals_change_nothing(alone):
    with pytest.raises(gyre.InvalidArgument, match="gyre.sharded: capacity must be positive, got 0"):
        ShardedCache(kv_heads=2, head_dim=64, capacity=0)
    with pytest.raises(gyre.InvalidArgument, match="the device must be a CPU or a CUDA device, got meta"):
        ShardedCache(**SHAPE, device="meta")
    with pytest.raises(gyre.InvalidArgument, match="q4"):
        ShardedCache(**SHAPE, k="q4")
    cache = ShardedCache(**SHAPE)
    tokens = torch.zeros(30, 2, 64)
    cache.append(tokens, tokens)
    for call, words in [
        (lambda: cache.append(tokens, tokens), "there is room for 40 tokens, 30 are there, got 30"),
        (lambda: cache.append(tokens[0], tokens), r"k must be \[tokens, 2, 64\], got \[2, 64\]"),
        (lambda: cache.append(tokens[:2], tokens[:1]), r"v must be \[tokens, 2, 64\], got \[1, 2, 64\]"),
        (lambda: cache.append(tokens[:2].int(), tokens[:2]), "got torch.int32"),
        (lambda: cache.append(tokens[:2], torch.zeros(2, 64, 2).mT), "v must be .* with contiguous head_dim"),
        (lambda: cache.attend(torch.zeros(31, 4, 64)), r"of 1 to 30 tokens, got \[31, 4, 64\]"),
        (lambda: cache.attend(torch.zeros(0, 4, 64)), r"of 1 to 30 tokens, got \[0, 4, 64\]"),
        (lambda: cache.attend(torch.zeros(1, 3, 64)), "heads must be a multiple of kv_heads 2, got 3"),
        (lambda: cache.rollback(31), "rollback of 31 tokens, but there are 30"),
    ]:
        with pytest.raises(gyre.InvalidArgument, match=words):
            call()
        assert cache.length == 30
