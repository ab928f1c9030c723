"""The latent layer (MLA) under the vLLM plugin: pages in torch's memory, tables and slots as vLLM makes them. vLLM is not needed."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytest.importorskip("safetensors", reason="safetensors is not installed")

import gyre  # noqa: E402
from gyre.calibrate.feedback import reordered, rotation  # noqa: E402
from gyre.calibrate.file import identity  # noqa: E402
from gyre.integrations.vllm import latent  # noqa: E402
from gyre.integrations.vllm.calibration import check, latent_calibration  # noqa: E402
from gyre.integrations.vllm.config import ConfigError, Formats  # noqa: E402
from gyre.integrations.vllm.pages import Queue  # noqa: E402
from vllm_contract import PAD  # noqa: E402
from vllm_latent_contract import (  # noqa: E402
    LATENT,
    ROTARY,
    Projections,
    batch_of,
    calibration_of,
    decode,
    error_of,
    layer_of,
    prefill,
    reference,
)

CPU = torch.device("cpu")
HEADS, PAGE = 6, 16
PAIRS = [("f16", "f16"), ("bf16", "bf16"), ("tq8", "tq8"), ("tq6", "bf16"), ("tq4", "tq8"), ("tq3", "f16")]
# Decoding, drafts, a chunk, a first chunk, a first token.
REQUESTS = [(1, 26), (4, 40), (1, 300), (24, 148), (13, 13), (1, 1)]
# Stored values are exact in the reference: what is left are the roundings of sums, queries and the output. CPUs with AMX round the
# weights of 16-bit latents to bf16.
BOUNDS = {torch.float32: 1e-8, torch.float16: 2e-7, torch.bfloat16: 1e-5}


@pytest.fixture
def queue():
    return Queue(CPU)


def stored(queue, formats, batch, **options):
    """A layer with the batch's past."""
    layer = layer_of(queue, formats, batch.blocks, batch.page_tokens, CPU, **options)
    batch.write_past(layer)
    batch.spoil(layer, 0)  # the null block holds NaN
    return layer


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("k, v", PAIRS)
def test_decoding_is_the_reference(queue, k, v, dtype):
    formats = Formats(k, v)
    batch = batch_of(CPU, HEADS, PAGE, REQUESTS, padded_requests=2, padded_tokens=3, seed=1, dtype=dtype)
    out, parts = decode(stored(queue, formats, batch), batch)
    assert parts == 1
    bound = max(BOUNDS[dtype], 1e-6) if k in ("f16", "bf16") else BOUNDS[dtype]
    assert error_of(out[: batch.tokens], reference(batch, batch.q, formats)) < bound
    assert (out[batch.tokens :] == 7).all()  # rows of no request


@pytest.mark.parametrize("dims", [(128, 32), (256, 32), (64, 16), (512, 128)])
@pytest.mark.parametrize("heads, page", [(1, 8), (16, 128), (128, 64)])
def test_sizes(queue, heads, page, dims):
    formats = Formats("tq8", "tq8")
    batch = batch_of(CPU, heads, page, [(1, 70), (2, 130), (9, 9)], seed=2, dims=dims)
    out, _ = decode(stored(queue, formats, batch, dims=dims), batch)
    assert error_of(out, reference(batch, batch.q, formats)) < 1e-6


@pytest.mark.parametrize("k, v", PAIRS)
@pytest.mark.parametrize("most", [1 << 16, HEADS * 10])
def test_chunks_attend_over_what_is_stored(queue, monkeypatch, k, v, most):
    """Two requests decode; those behind them are prompts: a chunk, a prefix hit with one new token, first chunks."""
    monkeypatch.setattr(latent, "MAX_ROWS", most)
    formats, first = Formats(k, v), 2
    requests = [(1, 26), (4, 40), (24, 148), (1, 33), (13, 13), (30, 95)]
    batch = batch_of(CPU, HEADS, PAGE, requests, padded_tokens=3, seed=3)
    projections = Projections(batch)
    out, parts = prefill(stored(queue, formats, batch), batch, projections, first)
    assert parts == (7 if most < 100 else 1)
    expected = projections.expand(reference(batch, projections.absorbed(), formats, stored=False))
    assert error_of(out, expected[5:]) < 1e-6
    # It must matter whether the past is what is stored: with other values the reference is far off.
    other = projections.expand(reference(batch, projections.absorbed(), Formats("tq2", "tq2"), stored=False))
    assert error_of(out, other[5:]) > 1e-3


def test_parts_are_the_whole(queue, monkeypatch):
    """Requests that parts cut see the same keys. As prompts they have the same bits."""
    formats, outs = Formats("tq4", "tq8"), []
    for most in (1 << 16, HEADS * 7):
        monkeypatch.setattr(latent, "MAX_ROWS", most)
        batch = batch_of(CPU, HEADS, PAGE, REQUESTS, seed=4)
        prompts = torch.tensor([queries > 4 for queries, _ in REQUESTS])
        out, parts = decode(stored(queue, formats, batch), batch, prompts)
        assert parts == (7 if most < 100 else 1)
        assert error_of(out, reference(batch, batch.q, formats)) < 1e-6
        outs.append(out)
    assert torch.equal(outs[0][6:], outs[1][6:])


def test_prompts_in_chunks_have_the_same_bits(queue):
    """All absorbed, as in vLLM's batch-invariant mode."""
    whole = batch_of(CPU, HEADS, PAGE, [(48, 48)], seed=5)
    outs = []
    for cuts in ([48], [24, 24], [17, 30, 1]):
        layer, out, begin = layer_of(queue, Formats("tq4", "tq8"), whole.blocks, PAGE, CPU), [], 0
        for count in cuts:
            part = batch_of(CPU, HEADS, PAGE, [(count, begin + count)], seed=5)
            rows = slice(begin, begin + count)
            part.q, part.k, part.v, part.slots = whole.q[rows], whole.k[rows], whole.v[rows], whole.slots[rows]
            part.table = whole.table
            out.append(decode(layer, part, torch.tensor([True]))[0])
            begin += count
        outs.append(torch.cat(out))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize(
    "k, v, transform, dtype",
    [
        *(("tq4", "tq8", True, dtype) for dtype in BOUNDS),
        ("tq8", "tq8", False, torch.float32),
        ("tq3", "tq4", True, torch.float32),
        ("tq4", "bf16", True, torch.float32),
        ("tq4", "bf16", False, torch.bfloat16),
    ],
)
def test_calibrated_decoding_is_the_reference(queue, k, v, transform, dtype):
    formats = Formats(k, v)
    own = latent_calibration(calibration_of(transform=transform), 0, formats, (LATENT, ROTARY), False)
    batch = batch_of(CPU, HEADS, PAGE, REQUESTS, padded_requests=2, padded_tokens=3, seed=1, dtype=dtype)
    out, _ = decode(stored(queue, formats, batch, layer_calibration=own), batch)
    assert error_of(out[: batch.tokens], reference(batch, batch.q, formats, layer_calibration=own)) < BOUNDS[dtype]
    # Without the calibration other codes are stored.
    assert error_of(out[: batch.tokens], reference(batch, batch.q, formats)) > 1e-6
    padding = own.parts[0].mean.to(dtype).expand(3, HEADS, LATENT) if transform else torch.full((3, HEADS, LATENT), 7.0, dtype=dtype)
    assert torch.equal(out[batch.tokens :], padding)


@pytest.mark.parametrize("dims", [(128, 32), (256, 64), (64, 16)])
def test_calibrated_sizes(queue, dims):
    formats = Formats("tq4", "tq8")
    own = latent_calibration(calibration_of(dims, layers=2), 1, formats, dims, False)
    batch = batch_of(CPU, HEADS, PAGE, [(1, 70), (2, 130), (9, 9)], seed=2, dims=dims)
    out, _ = decode(stored(queue, formats, batch, dims=dims, layer_calibration=own), batch)
    assert error_of(out, reference(batch, batch.q, formats, layer_calibration=own)) < 1e-8


@pytest.mark.parametrize("k, v, most", [("tq4", "tq8", 1 << 16), ("tq3", "tq4", HEADS * 10), ("tq4", "bf16", HEADS * 10)])
def test_calibrated_chunks_attend_over_what_is_stored(queue, monkeypatch, k, v, most):
    """Their log-sum-exp, with which vLLM merges the new tokens' attention to each other, has the mean's part of the scores."""
    monkeypatch.setattr(latent, "MAX_ROWS", most)
    formats, first = Formats(k, v), 2
    own = latent_calibration(calibration_of(), 0, formats, (LATENT, ROTARY), False)
    batch = batch_of(CPU, HEADS, PAGE, [(1, 26), (4, 40), (24, 148), (1, 33), (13, 13), (30, 95)], padded_tokens=3, seed=3)
    projections = Projections(batch)
    out, _ = prefill(stored(queue, formats, batch, layer_calibration=own), batch, projections, first)
    expected = projections.expand(reference(batch, projections.absorbed(), formats, stored=False, layer_calibration=own))
    assert error_of(out, expected[5:]) < 1e-6


def weights_of(part):
    """What errors of the coordinates cost, from the factor that the encoder uses."""
    dim = part.factor.shape[-1]
    upper = (part.factor[0].double() + torch.eye(dim)) * part.diagonal[0].double()
    back = rotation(dim).T
    weights = back @ upper @ upper.T @ back.T
    return weights if part.basis is None else part.basis[0].double() @ weights @ part.basis[0].double()


@pytest.mark.parametrize("transform", [True, False])
def test_neighbouring_rotary_coordinates(transform):
    """vLLM rotates the pairs (2m, 2m + 1) where transformers has (m, m + n): basis and weights go with the coordinates."""
    calibration, order = calibration_of(transform=transform), torch.tensor([i // 2 + ROTARY // 2 * (i % 2) for i in range(ROTARY)])
    halves, neighbours = (
        latent_calibration(calibration, 0, Formats("tq4", "tq8"), (LATENT, ROTARY), interleaved).parts for interleaved in (False, True)
    )
    assert halves[1] is calibration.layers[0][1] and neighbours[0] is halves[0]
    wanted = weights_of(halves[1])[order[:, None], order]
    torch.testing.assert_close(weights_of(neighbours[1]), wanted, atol=1e-5 * wanted.abs().max().item(), rtol=0)
    assert not torch.equal(neighbours[1].factor, halves[1].factor)
    if transform:
        assert torch.equal(neighbours[1].basis[0].diagonal(), halves[1].basis[0].diagonal()[order])
        assert torch.equal(neighbours[1].inverse[0].diagonal(), halves[1].inverse[0].diagonal()[order])
        assert torch.equal(neighbours[1].basis[0].diagonal()[::2], neighbours[1].basis[0].diagonal()[1::2])
    latent_part = calibration.layers[0][0]
    if latent_part.mean is not None:
        order = torch.randperm(LATENT, generator=torch.Generator().manual_seed(3))
        assert torch.equal(reordered(latent_part, order).mean, latent_part.mean[:, order])


def test_what_latents_take_no_calibration():
    calibration, dims = calibration_of(), (LATENT, ROTARY)
    assert latent_calibration(calibration, 0, Formats("bf16", "f16"), dims, None) is None
    sixteen = latent_calibration(calibration, 0, Formats("tq4", "bf16"), dims, None)  # however the model rotates
    assert torch.equal(sixteen.parts[1].basis[0], torch.eye(ROTARY)) and sixteen.parts[1].mean is None
    for words, *arguments in (
        ("no layer 1, there are 1", 1, Formats("tq4", "tq8"), dims, False),
        ("for 1 KV heads of 512 and 64, layer 0 has a latent of 256", 0, Formats("tq4", "tq8"), (256, ROTARY), False),
        ("the latent as bf16 and the rotary part as tq8", 0, Formats("bf16", "tq8"), dims, False),
        ("orders rotary coordinates is not known", 0, Formats("tq4", "tq8"), dims, None),
    ):
        with pytest.raises(ConfigError, match=words):
            latent_calibration(calibration, *arguments)


def test_a_config_in_which_vllm_renamed_yarn_is_that_of_the_calibration(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=1024)
    config = lambda **changes: transformers.DeepseekV3Config(num_hidden_layers=1, rope_parameters={**rope, **changes})
    made, path = calibration_of(), str(tmp_path / "m.gyrecal")
    made.identity = identity(config())
    made.save(path)
    for name in ("deepseek_yarn", "deepseek_llama_scaling"):
        loaded = config()
        loaded.rope_parameters["rope_type"] = name  # as the model's layers do when they are made
        check(path, loaded, 4096)
        assert loaded.rope_parameters["rope_type"] == name
    loaded = config(factor=8.0)
    loaded.rope_parameters["rope_type"] = "deepseek_yarn"
    with pytest.raises(ConfigError, match="whose config differs from that of this deepseek_v3 model"):
        check(path, loaded, 4096)


def test_drafts_that_were_rejected_are_overwritten(queue):
    rows = torch.randn(16, 1, LATENT), torch.randn(16, 1, ROTARY)
    caches = []
    for drafts in (0, 4):
        layer = layer_of(queue, Formats("tq4", "tq8"), 4, PAGE, CPU)

        def write(first, last, slot):
            layer.write(*(part[first:last] for part in rows), queue.wrap(torch.arange(slot, slot + last - first)))

        write(0, 5, PAGE)
        if drafts:
            write(8, 8 + drafts, PAGE + 5)
        write(5, 9, PAGE + 5)
        caches.append(torch.from_dlpack(layer.pages.memory)[1].clone())
    assert torch.equal(*caches)


def test_padding_is_not_stored(queue):
    layer = layer_of(queue, Formats("tq4", "tq8"), 4, PAGE, CPU)
    cache = torch.from_dlpack(layer.pages.memory)
    latents, rotary = torch.randn(4, 1, LATENT), torch.randn(4, 576)[:, None, LATENT:]
    layer.write(latents, rotary, queue.wrap(torch.tensor([PAD] * 4)))
    assert not cache.any()
    layer.write(latents, rotary, queue.wrap(torch.tensor([PAGE + 2, PAD, PAD])))
    assert cache[1].any() and not cache[0].any() and not cache[2:].any()


@pytest.mark.parametrize("k, v, token_bytes", [("bf16", "bf16", 1152), ("tq8", "tq8", 582), ("tq4", "tq8", 326), ("tq4", "bf16", 388)])
def test_bytes_of_a_token(k, v, token_bytes):
    formats = Formats(k, v)
    assert formats.token_bytes(1, LATENT, ROTARY, latent=True) == token_bytes
    for tokens in (8, 16, 24, 1024):
        assert formats.page_bytes(1, LATENT, ROTARY, tokens, latent=True) == token_bytes * tokens


@pytest.mark.parametrize(
    "k, v, dims, words",
    [("f32", "f16", (512, 64), "the latent of latent attention is stored as"), ("f16", "tq8", (512, 0), "rotary part"), ("tq4", "tq8", (520, 64), "520")],
)
def test_what_latents_are_not_stored_as(k, v, dims, words):
    with pytest.raises(gyre.Error, match=words):
        Formats(k, v).token_bytes(1, *dims, latent=True)
