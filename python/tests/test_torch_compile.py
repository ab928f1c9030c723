"""torch.ops.gyre, and models with a GyreCache under torch.compile(fullgraph=True): the tokens and bits of eager calls."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import load, prompt, stored_model
from vllm_contract import Batch, make_cache

import gyre
from gyre.integrations import torch_ops  # noqa: F401: defines the ops
from gyre.integrations.transformers import GyreCache
from gyre.integrations.vllm.config import Formats
from gyre.integrations.vllm.pages import LayerPages, queue_of

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
FORMATS = Formats("tq8", "tq4")
NAMES = ("tq8", "tq4")


def greedy(model, config, ids, count, with_mask=False):
    cache, tokens = GyreCache(config), []
    with torch.no_grad():
        for _ in range(count):
            seen = cache.get_seq_length() + ids.shape[1]
            mask = {"attention_mask": torch.ones(1, seen, dtype=torch.long)} if with_mask else {}
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **mask).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
    return tokens


@pytest.mark.parametrize("with_mask", [False, True])
def test_a_compiled_model_gives_the_tokens_of_an_eager_one(with_mask):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = load(stored_model("tiny-d128"), "gyre")
    ids = prompt(90)
    expected = greedy(model, model.config, ids, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert greedy(compiled, model.config, ids, 24, with_mask) == expected
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 4, "a step must not compile a graph of its own"
    assert greedy(compiled, model.config, ids, 24, with_mask) == expected  # another cache
    assert counters["stats"]["unique_graphs"] <= 4


def test_a_copy_of_a_cache_has_tokens_of_its_own():
    model = load(stored_model("tiny-d128"), "gyre")
    cache = GyreCache(model.config)
    with torch.no_grad():
        model(prompt(20), past_key_values=cache, use_cache=True)
    other = copy.deepcopy(cache)
    assert all(a.state[0] != b.state[0] for a, b in zip(cache.layers, other.layers))


def test_a_cache_that_is_gone_is_refused():
    q = torch.zeros(1, HEADS, 1, DIM)
    k = torch.zeros(1, KV_HEADS, 1, DIM)
    with pytest.raises(gyre.InvalidArgument, match="is gone"):
        torch.ops.gyre.attention(q, k, k, torch.tensor([-1, 0]), None, 1.0)


def step_of(batch):
    queue = queue_of(CPU)
    return queue.step(**batch.step_arguments(is_prefill=None))


def pages_and_batch():
    batch = Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, [(1, 26), (24, 70), (13, 13), (1, 1)], seed=3)
    cache = make_cache(FORMATS, batch.blocks, PAGE, KV_HEADS, DIM, CPU)
    layer = LayerPages(queue_of(CPU), cache, FORMATS, KV_HEADS, DIM, DIM, PAGE)
    batch.write_past(layer)
    return cache.flatten(1), layer, batch


def run_ops(pages, batch):
    out = torch.zeros_like(batch.q)
    torch.ops.gyre.kv_write(batch.k, batch.v, pages, batch.slots, *NAMES, PAGE)
    lists = (batch.table, batch.kv_lengths, batch.cu_seqlens_q)
    bounds = {"max_query_length": batch.max_query_length, "max_kv_length": batch.max_kv_length}
    torch.ops.gyre.paged_attention(batch.q, pages, *lists, out, *NAMES, KV_HEADS, PAGE, DIM**-0.5, **bounds)
    return out


def test_ops_over_pages_give_the_bits_of_the_calls():
    pages, layer, batch = pages_and_batch()
    expected, stored = torch.zeros_like(batch.q), pages.clone()
    out = run_ops(pages, batch)
    written = pages.clone()
    pages.copy_(stored)
    step = step_of(batch)
    layer.write(batch.k, batch.v, step.slots)
    layer.attend(batch.q, expected, step, DIM**-0.5)
    assert torch.equal(out, expected) and torch.equal(written, pages)
    pages.copy_(stored)
    compiled = torch.compile(run_ops, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(pages, batch), expected) and torch.equal(written, pages)


def test_rope_append_is_rope_and_a_write():
    pages, _, batch = pages_and_batch()
    stored, q = pages.clone(), batch.q.clone()
    positions = torch.arange(len(batch.slots), dtype=torch.int32)
    torch.ops.gyre.rope_append(q, batch.k, batch.v, positions, pages, batch.slots, *NAMES, PAGE)
    written = pages.clone()
    pages.copy_(stored)
    rotated_q, rotated_k = torch.empty_like(q), torch.empty_like(batch.k)
    with gyre.Encoder("cpu") as encoder:
        gyre.rope(encoder, batch.q, positions, rotated_q)
        gyre.rope(encoder, batch.k.contiguous(), positions, rotated_k)
    torch.ops.gyre.kv_write(rotated_k, batch.v, pages, batch.slots, *NAMES, PAGE)
    assert torch.equal(q, rotated_q) and torch.equal(written, pages)


def test_schemas_say_what_is_written():
    pages, _, batch = pages_and_batch()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.gyre.kv_write, (batch.k, batch.v, pages, batch.slots, *NAMES, PAGE), test_utils=tests)
    lists, out = (batch.table, batch.kv_lengths, batch.cu_seqlens_q), torch.zeros_like(batch.q)
    bounds = {"max_query_length": batch.max_query_length, "max_kv_length": batch.max_kv_length}
    arguments = (batch.q, pages, *lists, out, *NAMES, KV_HEADS, PAGE, DIM**-0.5)
    torch.library.opcheck(torch.ops.gyre.paged_attention, arguments, bounds, test_utils=tests)
    positions, q = torch.arange(len(batch.slots), dtype=torch.int32), batch.q.clone()
    arguments = (q, batch.k, batch.v, positions, pages, batch.slots, *NAMES, PAGE)
    torch.library.opcheck(torch.ops.gyre.rope_append, arguments, test_utils=tests)


def test_pages_of_another_shape_are_refused():
    pages, _, batch = pages_and_batch()
    with pytest.raises(ValueError, match="uint8"):
        torch.ops.gyre.kv_write(batch.k, batch.v, pages[:, :-16], batch.slots, *NAMES, PAGE)
    with pytest.raises(gyre.InvalidArgument, match="pages must be"):
        torch.ops.gyre.kv_write(batch.k, batch.v, pages[0], batch.slots, *NAMES, PAGE)
