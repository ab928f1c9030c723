"""The layer under the vLLM plugin: pages in torch's memory, tables and slots as vLLM makes them. vLLM is not needed."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from gyre.integrations.vllm.config import Formats  # noqa: E402
from gyre.integrations.vllm.pages import LayerPages, Queue, worker_cpus  # noqa: E402
from vllm_contract import PAD, Batch, make_cache, reference  # noqa: E402

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16


@pytest.fixture
def queue():
    return Queue(CPU)


def layer_of(queue, formats, blocks=40, page=PAGE, dim=DIM):
    cache = make_cache(formats, blocks, page, KV_HEADS, dim, CPU)
    return LayerPages(queue, cache, formats, KV_HEADS, dim, dim, page)


@pytest.mark.parametrize(
    "formats, bound",
    [
        (Formats("f32", "f32"), 2e-5),
        (Formats("bf16", "f16"), 2e-2),
        (Formats("tq8", "tq8"), 0.04),
        (Formats("tq8", "tq4"), 0.4),
    ],
)
@pytest.mark.parametrize("window, soft_cap, extras", [(0, 0.0, False), (24, 0.0, False), (0, 20.0, True)])
def test_a_step_is_the_reference(queue, formats, bound, window, soft_cap, extras):
    requests = [(1, 26), (1, 40), (24, 48), (13, 13), (1, 1)]
    batch = Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, requests, padded_requests=2, padded_tokens=3, seed=1)
    layer = layer_of(queue, formats)
    batch.write_past(layer)
    batch.spoil(layer, window)  # pages that nobody may read hold NaN
    sinks = torch.randn(HEADS) if extras else None
    slopes = torch.rand(HEADS) / 8 if extras else None
    out = torch.full_like(batch.q, 7.0)
    step = queue.step(**batch.step_arguments())
    layer.write(batch.k, batch.v, step.slots)
    wrapped = {name: queue.wrap(x) for name, x in (("sinks", sinks), ("slopes", slopes)) if x is not None}
    layer.attend(batch.q, out, step, DIM**-0.5, window=window, soft_cap=soft_cap, **wrapped)
    expected = reference(batch, DIM**-0.5, window, soft_cap, sinks, slopes)
    assert (out[: batch.tokens].double() - expected).abs().max() < bound
    assert (out[batch.tokens :] == 7).all()  # rows of no request


def test_padding_is_not_stored(queue):
    layer = layer_of(queue, Formats("tq8", "tq4"))
    cache = torch.from_dlpack(layer.pages.memory)
    k, v = torch.randn(4, KV_HEADS, DIM), torch.randn(4, 3 * KV_HEADS, DIM)[:, KV_HEADS : 2 * KV_HEADS]
    layer.write(k, v, queue.wrap(torch.tensor([PAD, PAD, PAD, PAD])))
    assert not cache.any()
    layer.write(k, v, queue.wrap(torch.tensor([PAGE + 2, PAD, PAD])))
    assert cache[1].any() and not cache[0].any() and not cache[2:].any()  # block 0 is the null block


def test_drafts_that_were_rejected_are_overwritten(queue, rng):
    """Slots are written again at the next step; what lies beside them in a tile of 8 keeps its bits."""
    formats = Formats("tq8", "tq4")
    k, v = torch.randn(16, KV_HEADS, DIM), torch.randn(16, KV_HEADS, DIM)
    caches = []
    for drafts in (0, 4):
        layer = layer_of(queue, formats)
        layer.write(k[:5], v[:5], queue.wrap(torch.arange(PAGE, PAGE + 5)))
        if drafts:
            layer.write(k[8 : 8 + drafts], v[8 : 8 + drafts], queue.wrap(torch.arange(PAGE + 5, PAGE + 5 + drafts)))
        layer.write(k[5:9], v[5:9], queue.wrap(torch.arange(PAGE + 5, PAGE + 9)))
        caches.append(torch.from_dlpack(layer.pages.memory)[1].clone())
    assert torch.equal(*caches)


def test_prompts_in_chunks_have_the_same_bits(queue):
    batch = Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, [(48, 48)], seed=3)
    outs = []
    for cuts in ([48], [24, 24], [17, 30, 1]):
        layer, out, begin = layer_of(queue, Formats("tq8", "tq4")), torch.zeros_like(batch.q), 0
        for count in cuts:
            end = begin + count
            step = queue.step(
                slots=batch.slots[begin:end],
                table=batch.table,
                lengths=torch.tensor([end], dtype=torch.int32),
                query_begin=torch.tensor([0, count], dtype=torch.int32),
                prompts=torch.tensor([True]),
                most_queries=count,
                most_length=end,
            )
            layer.write(batch.k[begin:end], batch.v[begin:end], step.slots)
            layer.attend(batch.q[begin:end], out[begin:end], step, DIM**-0.5)
            begin = end
        outs.append(out)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_pages_may_be_padded_and_caches_must_fit(queue):
    formats = Formats("tq8", "tq4")
    page_bytes = formats.page_bytes(KV_HEADS, DIM, DIM, PAGE)
    padded = torch.zeros(4, page_bytes + 64, dtype=torch.uint8)
    view = padded[:, :page_bytes].unflatten(1, (1, PAGE, page_bytes // PAGE))
    layer = LayerPages(queue, view, formats, KV_HEADS, DIM, DIM, PAGE)
    layer.write(torch.randn(1, KV_HEADS, DIM), torch.randn(1, KV_HEADS, DIM), queue.wrap(torch.tensor([2 * PAGE])))
    assert padded[2].any() and not padded[3].any() and not padded[:, page_bytes:].any()
    for wrong in (padded, view.view(torch.int8), view.transpose(2, 3)):
        with pytest.raises(ValueError, match=f"uint8 .pages, {page_bytes} bytes"):
            LayerPages(queue, wrong, formats, KV_HEADS, DIM, DIM, PAGE)
    with pytest.raises(NotImplementedError, match="meta"):
        Queue(torch.device("meta"))


def test_layers_do_not_grow(queue, no_growth):
    batch = Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, [(1, 20), (1, 9)], seed=2)
    layer, out = layer_of(queue, Formats("tq8", "tq4")), torch.zeros_like(batch.q)

    def one():
        step = queue.step(**batch.step_arguments())
        layer.write(batch.k, batch.v, step.slots)
        layer.attend(batch.q, out, step, 0.1)

    no_growth(one, cycles=10_000)


@pytest.mark.parametrize(
    "environment, cpus",
    [
        ({}, None),
        ({"GOMP_CPU_AFFINITY": "4 5 6"}, {4, 5, 6}),
        ({"GOMP_CPU_AFFINITY": "0-2,9"}, {0, 1, 2, 9}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[3,1]"}, {1, 3}),
        ({"KMP_AFFINITY": "none"}, None),
        ({"GOMP_CPU_AFFINITY": "0-"}, {0}),
        ({"GOMP_CPU_AFFINITY": "-"}, None),
    ],
)
def test_cores_of_the_worker(environment, cpus):
    assert worker_cpus(environment) == cpus


def test_slots_are_wrapped_once_for_all_layers(queue):
    a, b = torch.tensor([PAGE]), torch.tensor([2 * PAGE])
    first = queue.slots(a)
    assert queue.slots(a) is first and first.data_ptr == a.data_ptr()
    assert queue.slots(b).data_ptr == b.data_ptr() and queue.slots(a).data_ptr == a.data_ptr()


def test_the_scratch_memory_is_for_gpus(queue):
    assert queue.scratch.memory is None
