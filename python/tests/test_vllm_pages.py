"""The layer under the vLLM plugin: pages in torch's memory, tables and slots as vLLM makes them. vLLM is not needed."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytest.importorskip("safetensors", reason="safetensors is not installed")

import gyre  # noqa: E402
from gyre.calibrate.budget import Budget  # noqa: E402
from gyre.calibrate.layer import LayerCalibration  # noqa: E402
from gyre.calibrate.file import Calibration, Part  # noqa: E402
from gyre.integrations.vllm.calibration import check, load, rank_heads, refuse_means, with_budget  # noqa: E402
from gyre.integrations.vllm.config import ConfigError, Formats, Options  # noqa: E402
from gyre.integrations.vllm.pages import LayerPages, Queue, worker_cpus  # noqa: E402
from vllm_contract import PAD, Batch, make_cache, reference  # noqa: E402

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16


@pytest.fixture
def queue():
    return Queue(CPU)


def layer_of(queue, formats, blocks=40, page=PAGE, dim=DIM, layer_calibration=None):
    cache = make_cache(formats, blocks, page, KV_HEADS, dim, CPU)
    return LayerPages(queue, cache, formats, KV_HEADS, dim, dim, page, layer_calibration)


def part_of(seed, heads=KV_HEADS, mean=True, basis=True):
    """A basis far from the identity, its inverse, and feedback."""
    g = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(heads, DIM, DIM, generator=g, dtype=torch.double))
    stretch = torch.rand(heads, DIM, generator=g, dtype=torch.double) * 2 + 0.5
    matrix, inverse = (rotation @ torch.diag_embed(s) @ rotation.mT for s in (stretch, 1 / stretch))
    factor = torch.randn(heads, DIM, DIM, generator=g).triu(1) * 0.02
    return Part(
        matrix.float() if basis else None,
        inverse.float() if basis else None,
        torch.randn(heads, DIM, generator=g) if mean and basis else None,
        factor,
        torch.rand(heads, DIM, generator=g) + 0.5,
    )


def calibration_of(layers=2, heads=KV_HEADS, **parts):
    made = [(part_of(2 * i, heads, **parts), part_of(2 * i + 1, heads, **parts)) for i in range(layers)]
    return Calibration(made, "R", "m", "id", 64, 100, [0.9, 1.0, 1.1])


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
    sink_logits = torch.randn(HEADS) if extras else None
    alibi_slopes = torch.rand(HEADS) / 8 if extras else None
    out = torch.full_like(batch.q, 7.0)
    step = queue.step(**batch.step_arguments())
    layer.write(batch.k, batch.v, step.slots)
    wrapped = {name: queue.wrap(x) for name, x in (("sink_logits", sink_logits), ("alibi_slopes", alibi_slopes)) if x is not None}
    layer.attend(batch.q, out, step, DIM**-0.5, window=window, soft_cap=soft_cap, **wrapped)
    expected = reference(batch, DIM**-0.5, window, soft_cap, sink_logits, alibi_slopes)
    assert (out[: batch.tokens].double() - expected).abs().max() < bound
    assert (out[batch.tokens :] == 7).all()  # rows of no request


@pytest.mark.parametrize("mean, basis", [(True, True), (False, True), (False, False)])
def test_a_calibrated_step_is_the_reference(queue, mean, basis):
    requests = [(1, 26), (1, 40), (24, 48), (13, 13), (1, 1)]
    batch = Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, requests, padded_requests=2, padded_tokens=3, seed=1)
    layer_calibration = LayerCalibration.of(calibration_of(mean=mean, basis=basis), 1, (True, True))
    layer = layer_of(queue, Formats("tq8", "tq8"), layer_calibration=layer_calibration)
    batch.write_past(layer)
    out = torch.full_like(batch.q, 7.0)
    step = queue.step(**batch.step_arguments())
    layer.write(batch.k, batch.v, step.slots)
    layer.attend(batch.q, out, step, DIM**-0.5, window=24)
    expected = reference(batch, DIM**-0.5, 24)
    assert (out[: batch.tokens].double() - expected).abs().max() < 0.1
    # Rows of no request: as they were, or V's mean.
    padding = torch.full_like(out[batch.tokens :], 7.0)
    if basis:
        v_mean = layer_calibration.parts[1].mean if mean else torch.zeros(KV_HEADS, DIM)
        padding = v_mean.repeat_interleave(HEADS // KV_HEADS, 0).expand_as(padding)
    assert torch.equal(out[batch.tokens :], padding)


def test_ranks_have_the_codings_of_their_heads(queue):
    """Two ranks with half of the heads each store what one does with all."""
    whole = LayerCalibration.of(calibration_of(heads=4), 0, (True, True))
    assert [rank_heads(4, 2, rank, 2) for rank in range(2)] == [0, 2]
    assert [rank_heads(2, 1, rank, 4) for rank in range(4)] == [0, 0, 1, 1]  # fewer heads than ranks
    half = whole.heads(rank_heads(4, 2, 1, 2), 2)
    for part, own in zip(whole.parts, half.parts):
        assert torch.equal(own.basis, part.basis[2:]) and torch.equal(own.mean, part.mean[2:])
        assert torch.equal(own.inverse, part.inverse[2:]) and torch.equal(own.factor, part.factor[2:])
        assert torch.equal(own.diagonal, part.diagonal[2:]) and own.basis.is_contiguous()


def test_calibrations_that_do_not_fit_are_refused(tmp_path):
    calibration, path = calibration_of(), str(tmp_path / "m.gyrecal")
    calibration.budgets = [Budget(4.125, "coordinate", ["tq4", "tq5"], ["tq3", "tq4"], 4.1, 0.1)]
    calibration.save(path)
    assert with_budget(Options(calibration=path)) == Options(calibration=path)
    found = with_budget(Options(calibration=path, budget=4.125))
    assert (found.of(0, None), found.of(1, 512)) == (Formats("tq4", "tq3"), Formats("tq5", "tq4"))
    for words, action in (
        ("no formats for 3 bits", lambda: with_budget(Options(calibration=path, budget=3.0))),
        ("none.gyrecal", lambda: load("none.gyrecal")),
        ("mean of K does not go with a soft cap", lambda: refuse_means(LayerCalibration(calibration.layers[0], []), False, True)),
        ("mean does not go with sink_logits", lambda: refuse_means(LayerCalibration(calibration.layers[0], []), True, False)),
    ):
        with pytest.raises(ConfigError, match=words):
            action()
    refuse_means(LayerCalibration(calibration_of(mean=False).layers[0], []), True, True)
    assert LayerCalibration.of(calibration, 0, (False, False)) is None
    for words, layer, compressed in (("layer 1 has compressed keys alone", 1, (True, False)), ("no layer 2", 2, (True, True))):
        with pytest.raises(gyre.InvalidArgument, match=words):
            LayerCalibration.of(calibration, layer, compressed)


class Config:
    """What a calibration reads of a model's config."""

    model_type = "other"

    def get_text_config(self, decoder):
        return self


def test_a_calibration_of_another_model_is_refused(tmp_path):
    path = str(tmp_path / "m.gyrecal")
    calibration_of().save(path)
    with pytest.raises(ConfigError, match="it was made for m, whose config differs from that of this other model"):
        check(path, Config(), 64)


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
                kv_lengths=torch.tensor([end], dtype=torch.int32),
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
                is_prefill=torch.tensor([True]),
                max_query_length=count,
                max_kv_length=end,
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


@pytest.mark.parametrize("calibrated", [False, True])
def test_layers_do_not_grow(queue, no_growth, calibrated):
    """Steps of many shapes: under load no two are alike."""
    layer_calibration = LayerCalibration.of(calibration_of(), 1, (True, True)) if calibrated else None
    layer = layer_of(queue, Formats("tq8", "tq4"), layer_calibration=layer_calibration)
    batches = [Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, [(1, 20 + n), (1 + n, 9 + n)][: 1 + n % 2], seed=n) for n in range(12)]
    turns = itertools.cycle([(batch, torch.zeros_like(batch.q)) for batch in batches])

    def one():
        batch, out = next(turns)
        step = queue.step(**batch.step_arguments())
        layer.write(batch.k, batch.v, queue.slots(batch.slots))
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
