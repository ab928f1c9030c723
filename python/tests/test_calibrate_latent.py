"""Calibrations of latent layers (MLA): moments against plain calculations, and what a calibrated cache gives."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import TEXT, padded, random_tokens
from test_transformers_latent import logits, model

import gyre
from gyre import eval as gyre_eval
from gyre.calibrate import Calibration, __main__, latent
from gyre.calibrate.moments import SKIPPED
from gyre.calibrate.run import calibrate
from gyre.eval.baselines import BASELINES, Baseline, RoundedCache
from gyre.integrations.transformers import GyreCache

pytestmark = [
    pytest.mark.skipif(not hasattr(transformers, "DeepseekV3Config"), reason="transformers has no DeepSeek-V3"),
    pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few"),
]


@pytest.fixture(scope="module")
def made():
    return model("gyre")


@pytest.fixture(scope="module")
def calibration(made):
    return calibrate(made, [random_tokens(400)[0]], 0, name="random", progress=False)


def test_moments_are_those_of_the_models_own_tensors(made):
    ids, own = random_tokens(90)[0], model("eager")
    module, seen = own.get_decoder().layers[1].self_attn, {}
    module.kv_a_layernorm.register_forward_hook(lambda module, args, out: seen.update(latent=out[0].double()))
    module.kv_a_proj_with_mqa.register_forward_hook(lambda module, args, out: seen.update(k=out[0, :, 64:].double()))
    module.q_b_proj.register_forward_hook(lambda module, args, out: seen.update(q=out[0].double().unflatten(-1, (6, 32))))
    rotate = transformers.models.deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave
    with torch.no_grad():
        own(ids[None])
        cos, sin = own.get_decoder().rotary_emb(torch.zeros(1), torch.arange(90)[None])
        q_rotary, k_rotary = rotate(seen["q"][None, :, :, 16:].transpose(1, 2), seen["k"][None, None], cos, sin)
        q_rotary, k_rotary = q_rotary[0].transpose(0, 1).double(), k_rotary[0, 0].double()
    moments = latent.collect(made, latent.attentions(made), [ids], progress=False)[1]
    rows = seen["latent"][SKIPPED:]
    torch.testing.assert_close(moments.latent.mean[0], rows.mean(0), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(moments.latent.moment[0], rows.T @ rows / len(rows), atol=2e-3, rtol=2e-3)
    rows = k_rotary[SKIPPED:]
    torch.testing.assert_close(moments.rotary.moment[0], rows.T @ rows / len(rows), atol=2e-3, rtol=2e-3)
    # What errors of the keys cost, one query at a time.
    heads, scale = 6, module.scaling
    up = module.kv_b_proj.weight.detach().double().view(heads, 40, 64)
    out = module.o_proj.weight.detach().double().view(48, heads, 24)
    keys = torch.cat([seen["latent"], k_rotary], -1)
    expected, expected_rotary = 0, 0
    for head in range(heads):
        through = out[:, head] @ up[head, 16:]
        queries = torch.cat([seen["q"][:, head, :16] @ up[head, :16], q_rotary[:, head]], -1)
        for t in range(SKIPPED, 90):
            p = (scale * keys[: t + 1] @ queries[t]).softmax(0)
            rows = seen["latent"][: t + 1]
            moves = (rows - p @ rows) @ through.T
            of_scores = (p * scale * moves.norm(dim=1)).square().sum() * torch.outer(queries[t], queries[t])
            expected = expected + p.square().sum() * (through.T @ through) + of_scores[:64, :64]
            expected_rotary = expected_rotary + of_scores[64:, 64:]
    for got, wanted in ((moments.value_weights + moments.key_weights, expected), (moments.rotary_weights, expected_rotary)):
        torch.testing.assert_close(got, wanted, atol=1e-2 * wanted.abs().max().item(), rtol=0)


def test_rotary_parts_have_a_factor_for_each_pair(calibration):
    for _, rotary in calibration.layers:
        diagonal = rotary.basis[0].diagonal()
        assert torch.equal(rotary.basis[0], diagonal.diag()) and rotary.mean is None
        assert torch.equal(diagonal[:8], diagonal[8:]) and diagonal.std() > 0


def test_without_a_transform_there_is_error_feedback_alone(made, calibration):
    ids = random_tokens(220)
    with torch.no_grad():
        expected = model("eager")(ids).logits[0]
    alone = calibrate(made, [random_tokens(400)[0]], 0, transform=False, progress=False)
    assert (alone.recipe, calibration.recipe) == ("F", "R")
    for part in (part for layer in alone.layers for part in layer):
        assert part.basis is None and part.inverse is None and part.mean is None and part.factor.abs().max() > 0
    plain = distance(made, ids, expected, k="tq4", v="tq8")
    assert distance(made, ids, expected, k="tq4", v="tq8", calibration=alone) < 0.9 * plain


def distance(made, ids, expected, **how) -> float:
    got = logits(made, ids, GyreCache(made.config, tail=0, sink_tokens=0, **how), [60, 1, 1, len(ids[0]) - 62])
    return ((got - expected).square().mean() / expected.square().mean()).item()


@pytest.mark.parametrize("paged", [False, True])
def test_the_same_bytes_lose_less(made, calibration, paged):
    ids = random_tokens(220)
    with torch.no_grad():
        expected = model("eager")(ids).logits[0]
    for format in ("tq4", "tq3"):
        plain = distance(made, ids, expected, k=format, v="tq8", paged=paged)
        assert distance(made, ids, expected, k=format, v="tq8", paged=paged, calibration=calibration) < 0.8 * plain


@pytest.mark.parametrize("paged", [False, True])
def test_latents_of_512_as_deepseek_has_them(paged, tmp_path):
    large = dict(kv_lora_rank=512, qk_rope_head_dim=64)
    made = model("gyre", **large)
    path = tmp_path / "512.gyrecal"
    calibrate(made, [random_tokens(600)[0]], 0, progress=False).save(path)
    read = Calibration.load(path)
    assert (read.dims, read.capacity) == ([(1, 512, 64)] * 3, 0)
    ids = random_tokens(100)
    with torch.no_grad():
        expected = model("eager", **large)(ids).logits[0]
    for format in ("tq4", "tq3"):
        plain = distance(made, ids, expected, k=format, v="tq8", paged=paged)
        assert distance(made, ids, expected, k=format, v="tq8", paged=paged, calibration=path) < 0.8 * plain


def test_a_padded_batch_is_each_row_alone(made, calibration):
    how = dict(k="tq8", v="tq8", calibration=calibration)
    rows = [random_tokens(20)[0], random_tokens(33)[0][5:]]
    ids, mask = padded(rows)
    with torch.no_grad():
        together = made(ids, attention_mask=mask, past_key_values=GyreCache(made.config, **how)).logits[:, -1]
        for row, got in zip(rows, together):
            alone = made(row[None], past_key_values=GyreCache(made.config, **how)).logits[0, -1]
            assert (got - alone).abs().max() < 1e-2 * alone.abs().max()


def test_files(made, calibration, tmp_path):
    path = tmp_path / "latent.gyrecal"
    calibration.save(path)
    read = Calibration.load(path)
    assert (read.dims, read.capacity) == ([(1, 64, 16)] * 3, 0)
    ids = random_tokens(40)
    both = [GyreCache(made.config, k="tq4", v="tq8", calibration=one) for one in (calibration, path)]
    one, other = (logits(made, ids, cache, [40]) for cache in both)
    assert torch.equal(one, other)
    config = type(made.config).from_dict({**made.config.to_dict(), "kv_lora_rank": 32})
    with pytest.raises(gyre.InvalidArgument, match="made for random, whose config differs"):
        GyreCache(config, k="tq4", v="tq8", calibration=read)


def test_refusals(made, calibration):
    with pytest.raises(gyre.InvalidArgument, match="calibrated from a text"):
        calibrate(made, None, 0)
    with pytest.raises(gyre.InvalidArgument, match="take no budget"):
        GyreCache(made.config, calibration=calibration, budget=4.25)
    config = type(made.config).from_dict({**made.config.to_dict(), "kv_lora_rank": 48})
    with pytest.raises(gyre.InvalidArgument, match=r"kv_lora_rank \(the latent\) must be a power of two .* got 48"):
        calibrate(transformers.DeepseekV3ForCausalLM(config), [random_tokens(90)[0]], 0)
    with pytest.raises(gyre.InvalidArgument, match="63 tokens are too few for rows of 64 coordinates .* give more text$"):
        calibrate(made, [random_tokens(SKIPPED + 63)[0]], 0)


def test_the_command(monkeypatch, tmp_path, capsys):
    model("gyre", vocab_size=300).save_pretrained(tmp_path)
    command = [str(tmp_path), str(TEXT), "--tokens", "100", "--quiet", "--out", str(tmp_path / "a.gyrecal")]
    assert __main__.main(command) == 0
    assert "3 layers, latents of 64 coordinates, rotary parts of 16, " in capsys.readouterr().out
    with monkeypatch.context() as patched:  # is refused before the text passes through the model
        patched.setattr(__main__, "calibrate", lambda *args: pytest.fail("calibrate was called"))
        assert __main__.main([*command, "--budget", "4.25"]) == 1
    assert capsys.readouterr().err.endswith("calibrate: latent layers (MLA) take no --budget\n")


def test_others_formats(monkeypatch, made):
    """Without rounding, a baseline's attention is the model's own."""
    monkeypatch.setitem(BASELINES, "exact", Baseline(32, lambda x: x))
    ids = random_tokens(40)
    with torch.inference_mode():
        expected = model("eager")(ids).logits[0]
    got = logits(made, ids, RoundedCache(made.config, "exact", 40), [20, 1, 19])
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    rows = gyre_eval.evaluate(made, [ids[0]], gyre_eval.settings(["tq4/tq8", "fp8"]), progress=False)
    assert rows[1].bytes_per_token == 3 * (64 + 16) and 0 < rows[1].kld_mean < rows[0].kld_mean
    with pytest.raises(gyre.InvalidArgument, match="fp8-tiles is for latent layers of a multiple of 128"):
        RoundedCache(made.config, "fp8-tiles", 40)
    with pytest.raises(gyre.InvalidArgument, match="kivi4 is not for latent layers"):
        RoundedCache(made.config, "kivi4", 40)
