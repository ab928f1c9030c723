"""Models whose last layers share the keys and values of earlier ones, and whose layers have dims of their own (Gemma 3n and 4)."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import padded, random_model, random_tokens

import gyre
from gyre import eval as gyre_eval
from gyre.eval.baselines import BASELINES, Baseline, RoundedCache
from gyre.eval.run import decoding_bytes
from gyre.integrations.transformers import GyreCache, enable

SHARED = ["gemma4-shared-window-9", "gemma3n-shared-window-9"]


def logits(model, ids, cache, pieces):
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache, use_cache=True).logits[0] for part in ids.split(pieces, dim=1)])


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_layer_is_stored_once(name):
    model = random_model(name, "gyre")
    cache = GyreCache(model.config, k="tq8", v="tq4", capacity=64)
    with torch.no_grad():
        model(random_tokens(20), past_key_values=cache)
    kept = cache.describe()
    assert len(cache.layers) == len(kept) == 3 and [layer.sharing for layer in cache.layers] == [0, 2, 1]
    dims = [32, 32, 64 if "gemma4" in name else 32]
    assert [each.layer.head_dim for each in kept] == dims and all(each.nbytes > 0 for each in kept)
    # The layer without a window stores K and V of 2 heads; two windows of 9 add little.
    assert 8 * dims[2] <= decoding_bytes(model.config, gyre_eval.Setting("f16", "f16"), 4096) < 8 * dims[2] + 20
    rounded = decoding_bytes(model.config, gyre_eval.Setting("", "", baseline="fp8"), 4096)
    assert rounded == 4 * (dims[2] + 2 * 32 * 9 / 4096)


def test_others_formats(monkeypatch):
    """Without rounding, a baseline's attention is the model's own."""
    monkeypatch.setitem(BASELINES, "exact", Baseline(32, lambda x: x))
    ids = random_tokens(40)
    with torch.no_grad():
        expected = random_model(SHARED[0], "eager")(ids).logits[0]
    model = random_model(SHARED[0], "gyre")
    torch.testing.assert_close(logits(model, ids, RoundedCache(model.config, "exact", 40), [20, 1, 19]), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(gyre.InvalidArgument, match="kivi4 is not for layers that share keys and values"):
        RoundedCache(model.config, "kivi4", 40)


@pytest.mark.parametrize("k, v, tail", [("tq8", "tq8", 0), ("tq4", "tq4", 16)])
@pytest.mark.parametrize("paged", [False, True])
def test_compressed_layers_that_share_are_those_that_store(k, v, tail, paged):
    """Each with a cache of its own, to which the same keys and values are written, gives the same bits."""
    model, ids = random_model(SHARED[0], "gyre"), random_tokens(60)
    how = dict(k=k, v=v, tail=tail, sink_tokens=1, paged=paged, capacity=64)
    cache, compared = GyreCache(model.config, **how), []

    class Alone:
        """Stands before a layer's attend()."""

        def __init__(self, layer):
            self.layer, self.inner = layer, layer.attend
            self.copies = [copy.deepcopy(layer) for _ in range(layer.sharing)]

        def __call__(self, step, query, mask, **options):
            reader = step.readers
            out = self.inner(step, query, mask, **options)
            if reader > 0:
                own = self.copies[reader - 1]
                wanted = own.attend(own.update(step.k, step.v)[0], query, mask, **options)
                compared.append(torch.equal(out, wanted))
            return out

    for layer in cache.layers:
        layer.attend = Alone(layer)
    logits(model, ids, cache, [40, 1, 1, 18])
    assert compared == [True] * (3 * 4)


def test_dims_of_256_and_512_as_gemma_4_has_them():
    sizes = dict(head_dim=256, global_head_dim=512, num_attention_heads=2, num_key_value_heads=1)
    ids = random_tokens(50)
    with torch.no_grad():
        expected = random_model(SHARED[0], "eager", **sizes)(ids).logits[0]
    model = random_model(SHARED[0], "gyre", **sizes)
    cache = GyreCache(model.config, k="f32", v="f32")
    torch.testing.assert_close(logits(model, ids, cache, [30, 1, 19]), expected, rtol=1e-4, atol=1e-4)
    assert [(each.layer.kv_heads, each.layer.head_dim) for each in cache.describe()] == [(1, 256), (1, 256), (1, 512)]


@pytest.mark.parametrize("name", SHARED)
def test_padded_batches_beams_and_generate(name):
    model = random_model(name, "gyre")
    rows = [random_tokens(20)[0], random_tokens(33)[0][5:]]
    ids, mask = padded(rows)
    with torch.no_grad():
        together = model(ids, attention_mask=mask, past_key_values=GyreCache(model.config, k="f32", v="f32")).logits[:, -1]
        for row, got in zip(rows, together):
            alone = model(row[None], past_key_values=GyreCache(model.config, k="f32", v="f32")).logits[0, -1]
            torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)
    few = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False)
    for more in ({}, dict(num_beams=3)):
        expected = random_model(name, "eager").generate(random_tokens(30), **few, **more)
        assert torch.equal(enable(random_model(name, "eager"), k="f32", v="f32").generate(random_tokens(30), **few, **more), expected)


def test_files_have_the_layers_that_store(tmp_path):
    """Also where a first step was longer than step_tokens, for which the rings that are shared have more room."""
    model, ids = random_model(SHARED[0], "gyre"), random_tokens(40)
    make = lambda: GyreCache(model.config, k="tq8", v="tq8", capacity=64, step_tokens=8)
    cache, again = make(), make()
    logits(model, ids[:, :30], cache, [30])
    cache.save(tmp_path / "a", ids[:, :30])
    again.load(tmp_path / "a", ids)
    assert again.get_seq_length() == 30 and [layer.step_tokens for layer in again.layers] == [8, 30, 30]
    assert torch.equal(logits(model, ids[:, 30:], again, [10]), logits(model, ids[:, 30:], cache, [10]))


def test_refusals():
    model = random_model(SHARED[0], "gyre")
    cache = GyreCache(model.config, k="f32", v="f32", step_tokens=8)
    logits(model, random_tokens(12), cache, [6, 6])
    with pytest.raises(gyre.InvalidArgument, match="at most 8 tokens in a step after the first, got 9.*prefill_chunk_size=8"):
        logits(model, random_tokens(9), cache, [9])
    cache.reset()
    logits(model, random_tokens(8), cache, [8])
    with pytest.raises(gyre.InvalidArgument, match="k must be one format or one for each of 3 layers, got 6"):
        GyreCache(model.config, k=["tq8"] * 6)
    with pytest.raises(gyre.InvalidArgument, match="use_bidirectional_attention"):
        GyreCache(random_model(SHARED[0], "gyre", use_bidirectional_attention="all").config)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="torch.compile is not supported over layers that share"):
        compiled(random_tokens(8), past_key_values=GyreCache(model.config, k="f32", v="f32"))
    step = cache.layers[1].step(*torch.zeros(2, 1, 2, 1, 32))
    assert step.to(torch.device("cpu")) is step
    with pytest.raises(gyre.InvalidArgument, match="must be on one device, got cpu and meta"):
        step.to(torch.device("meta"))
