"""gyre.calibrate: moments, bases and factors, against plain calculations."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import random_model, random_tokens

import gyre
from gyre.calibrate import solve
from gyre.calibrate.model import attentions
from gyre.calibrate.moments import FIRST_TOKENS, SKIPPED, collect
from gyre.calibrate.rotary import Rotary, of_layers
from gyre.calibrate.run import calibrate, windows

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few")


def symmetric(heads, d, seed=1):
    x = torch.randn(heads, d, 3 * d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x @ x.transpose(1, 2)


@pytest.mark.parametrize("d, pairs, scale", [(16, 8, 1.0), (16, 5, 1.3)])
@pytest.mark.parametrize("positions", [1, 37])
def test_moments_over_a_range_are_those_of_its_positions_one_by_one(d, pairs, scale, positions):
    rotary = Rotary(1e4 ** -(torch.arange(pairs, dtype=torch.float64) / pairs), scale)
    rows = torch.randn(2, 9, d, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    every = torch.cat([rotary.rotate(rows, torch.full((9,), p)) for p in range(positions)], 1)
    moments = rows.transpose(1, 2) @ rows / 9
    torch.testing.assert_close(rotary.moments(moments, positions), every.transpose(1, 2) @ every / every.shape[1])
    torch.testing.assert_close(rotary.mean(rows.mean(1), positions), every.mean(1))


def test_pair_energies_do_not_depend_on_positions():
    rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64), 1.5)
    rows = torch.randn(1, 4000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rotated = rotary.rotate(rows, torch.arange(4000)).square().mean(1)
    energies = rotary.pair_energies(rows.square().mean(1))
    torch.testing.assert_close(energies[:, 4:], rows.square().mean(1)[:, 4:])
    torch.testing.assert_close(energies[:, :2] * 2, rotated[:, :2] + rotated[:, 2:4])
    assert torch.equal(energies[:, :2], energies[:, 2:4])


YARN = dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    rope_theta=1e4,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama", {}),
        ("llama", dict(rope_parameters=YARN)),
        ("llama", dict(rope_parameters=LLAMA3)),
        ("llama-mha", {}),
        ("mistral-window-11", {}),
        ("qwen2-window-7", {}),
        ("qwen3", {}),
        ("gemma2-caps-window-9", {}),
        ("gemma3-window-5", {}),
        ("gpt-oss-sinks-window-6", {}),
        ("gemma4-shared-window-9", {}),
        ("gemma4-keys-are-values", {}),
        ("gemma3n-shared-window-9", {}),
    ],
)
def test_moments_are_those_of_the_keys_that_the_model_caches(name, changes):
    model = random_model(name, "eager", **changes)
    ids = random_tokens(90)[0]
    parts, rotaries = attentions(model), of_layers(model.get_decoder())
    moments, tokens = collect(model, parts, rotaries, [ids], progress=False)
    assert tokens == 90 - SKIPPED and model.config._attn_implementation == "eager"
    with torch.no_grad():
        cache = transformers.DynamicCache()  # without the config: window layers keep all
        model(ids[None], past_key_values=cache, use_cache=True)
    for layer, rotary, found in zip(cache.layers, rotaries, moments):
        keys, values = layer.keys[0].double(), layer.values[0, :, SKIPPED:].double()
        back = Rotary(rotary.frequencies, 1 / rotary.scale).rotate(keys, -torch.arange(90))[:, SKIPPED:]
        torch.testing.assert_close(found.k_mean, back.mean(1), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(found.k_second, back.transpose(1, 2) @ back / tokens, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(found.v_second, values.transpose(1, 2) @ values / tokens, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2-caps-window-9", "gpt-oss-sinks-window-6"])
def test_position_0_is_known_by_its_attention_and_its_rows(name):
    model, ids = random_model(name, "eager"), random_tokens(90)[0]
    parts = attentions(model)
    moments, _ = collect(model, parts, of_layers(model.get_decoder()), [ids], progress=False)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        probabilities = model(ids[None], output_attentions=True).attentions
        model(ids[None, :1], past_key_values=cache, use_cache=True)
    assert any(getattr(part.module, "sliding_window", None) is None for part in parts)
    for part, found, p, layer in zip(parts, moments, probabilities, cache.layers):
        mass = p[0, :, 45:, 0].unflatten(0, (part.kv_heads, -1)).mean((1, 2)).double()
        if getattr(part.module, "sliding_window", None):
            mass = torch.zeros_like(mass)  # position 0 leaves the window
        torch.testing.assert_close(found.first_mass, mass, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(found.first_k[:, 0], layer.keys[0, :, 0].double(), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(found.first_v[:, 0], layer.values[0, :, 0].double(), atol=1e-4, rtol=1e-3)
        assert found.first_k.shape == (part.kv_heads, FIRST_TOKENS, part.head_dim)


def test_position_0_counts_by_its_attention():
    """A row far from all others: a mean that knows it leaves it shorter."""
    generator = torch.Generator().manual_seed(1)
    rows = 1 + 0.1 * torch.randn(2, 400, 16, dtype=torch.float64, generator=generator)
    first = torch.zeros(2, 3, 16, dtype=torch.float64)
    given = rows.mean(1), rows.transpose(1, 2) @ rows / 400
    mean, second = solve.with_first(*given, first, torch.tensor([0.0, 0.4], dtype=torch.float64))
    assert torch.equal(mean[0], given[0][0]) and torch.equal(second[0], given[1][0])
    every = torch.cat([rows[1], first[1, :1].expand(400 * 2 // 3, -1)])  # 0.4 of all rows
    torch.testing.assert_close(mean[1], every.mean(0), atol=2e-3, rtol=0)
    torch.testing.assert_close(second[1], every.T @ every / len(every), atol=2e-3, rtol=0)


def test_moments_of_queries_are_over_the_heads_that_share_a_kv_head():
    model = random_model("qwen3", "eager")
    seen = []
    model.model.layers[1].self_attn.q_norm.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    moments, _ = collect(model, attentions(model), of_layers(model.get_decoder()), [random_tokens(80)[0]], progress=False)
    q = seen[1][SKIPPED:].double()  # behind those alone at position 0; [tokens, 6 heads, d]; heads 0 to 2 share the first KV head
    for kv_head in range(2):
        rows = q[:, 3 * kv_head : 3 * kv_head + 3].flatten(0, 1)
        torch.testing.assert_close(moments[1].q_second[kv_head], rows.T @ rows / len(rows))


@pytest.mark.parametrize("d", [32, 48, 128])
@pytest.mark.parametrize("basis", [True, False])
def test_the_factor_is_that_of_the_weights_in_the_stored_domain(d, basis):
    covariance, weights = symmetric(2, d), symmetric(2, d, 2)
    part = solve.part(covariance if basis else None, weights, None)
    assert part.mean is None and (part.basis is not None) == basis
    assert torch.equal(part.factor, part.factor.triu(1)) and (part.diagonal > 0).all()
    if basis:
        identity = torch.eye(d, dtype=torch.float64).expand(2, d, d)
        torch.testing.assert_close(part.basis.double() @ part.inverse.double(), identity, atol=1e-5, rtol=0)
        torch.testing.assert_close(part.basis, part.basis.transpose(1, 2), atol=1e-6, rtol=0)
        power = torch.linalg.matrix_power(part.inverse.double(), 10)  # B^-10 = (C + 0.05)^3
        scaled = covariance / covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + 0.05 * identity
        torch.testing.assert_close(power, torch.linalg.matrix_power(scaled, 3), atol=1e-3, rtol=1e-3)
    # An error e of what is stored is an error B^-1 R^T e of the row, whose cost is its square in the weights.
    stored = torch.randn(2, 7, d, generator=torch.Generator().manual_seed(5))
    row = stored.clone()
    encoder = gyre.Encoder("cpu")
    gyre.hadamard(encoder, row, row, direction="inverse", signs="native")
    encoder.submit().wait()
    row = (row @ part.inverse if basis else row).double()
    scaled = weights / weights.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] + 0.03 * torch.eye(d, dtype=torch.float64)
    cost = torch.einsum("hni,hij,hnj->hn", row, scaled, row)
    upper = (part.factor + torch.eye(d)) * part.diagonal[:, None, :]
    torch.testing.assert_close((stored @ upper).square().sum(-1).double(), cost, atol=1e-4, rtol=1e-4)


def test_weights_of_values_are_what_the_output_projection_makes_of_an_error():
    model = random_model("llama", "eager")
    attention = attentions(model)[2]
    error = torch.randn(attention.head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    heads = torch.zeros(attention.heads, attention.head_dim, dtype=torch.float64)
    weights = attention.value_weights()
    for kv_head in range(2):
        costs = []
        for head in range(3 * kv_head, 3 * kv_head + 3):
            one = heads.clone()
            one[head] = error
            costs.append((model.model.layers[2].self_attn.o_proj.weight.double() @ one.flatten()).square().sum())
        torch.testing.assert_close(error @ weights[kv_head] @ error, sum(costs))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3-window-5"])
def test_moments_from_weights_are_those_of_independent_inputs(name):
    model = random_model(name, "eager")
    attention = attentions(model)[1]
    with torch.no_grad():
        for norm in (attention.input_norm, attention.before_rotary("k")):
            if "norm" in type(norm).__name__.lower():
                norm.weight += 0.3 * torch.randn(norm.weight.shape, generator=torch.Generator().manual_seed(4))
        x = attention.input_norm(torch.randn(200_000, 48, generator=torch.Generator().manual_seed(2)))
        k = attention.module.k_proj(x).unflatten(-1, (2, 32))
        k = attention.module.k_norm(k) if hasattr(attention.module, "k_norm") else k
        v = attention.module.v_proj(x).unflatten(-1, (2, 32))
    for name, rows in (("k", k), ("v", v)):
        sampled = torch.einsum("nhi,nhj->hij", rows, rows).double() / len(rows)
        given = attention.second_moment(name)
        tolerance = 0.25 if hasattr(attention.module, "k_norm") and name == "k" else 0.03  # a norm of a row is no constant
        assert (given - sampled).norm() < tolerance * sampled.norm()


def test_no_text_is_right_at_every_position():
    model = random_model("qwen3", "eager")
    calibration = calibrate(model, None, 123)
    assert (calibration.recipe, calibration.capacity, calibration.tokens) == ("Q", 0, 0)
    rotary = of_layers(model.get_decoder())[0]
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(6)).double()
    at = torch.arange(100, 105)
    basis = calibration.layers[0][0].basis.double()
    torch.testing.assert_close(rotary.rotate(x @ basis, at), rotary.rotate(x, at) @ basis)
    assert calibration.layers[0][0].mean is None and calibration.layers[0][1].mean is None


def test_it_is_deterministic():
    first, again = (calibrate(random_model("qwen3", "eager"), [random_tokens(120)[0]], 256, progress=False) for _ in range(2))
    for one, other in zip(first.layers, again.layers):
        for a, b in zip(one, other):
            assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))


def test_windows_begin_as_a_text_does():
    parts = windows(list(range(100)), 256, 90, 40)
    assert [part[:3].tolist() for part in parts] == [[256, 0, 1], [256, 39, 40]]  # 12 more are not more than are left out
    assert [len(part) for part in parts] == [40, 40]


def refused(model, message, texts=(200,)):
    with pytest.raises(gyre.Error, match=message):
        calibrate(model, [random_tokens(count)[0] for count in texts], 256, progress=False)


def test_other_models_are_refused_by_name():
    phi = transformers.Phi3Config(
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    refused(transformers.Phi3ForCausalLM(phi).eval(), "phi3 is not built as Llama")
    refused(random_model("llama", "eager", head_dim=48), "head_dim must be a power of two from 16 to 512, got 48")
    dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    refused(random_model("llama", "eager", rope_parameters=dynamic), "rope_type dynamic")


def test_a_rotation_that_is_not_the_one_of_the_moments_is_refused():
    cohere = transformers.CohereConfig(  # pairs of neighbours
        vocab_size=61, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    refused(transformers.CohereForCausalLM(cohere).eval(), "cohere: keys of layer 0 are not the ones before rotation")


def test_few_tokens_are_refused_or_warned_about():
    refused(random_model("llama", "eager"), "31 tokens are too few for rows of 32 coordinates", [47])
    with pytest.warns(gyre.calibrate.CalibrationWarning, match="32 tokens are few"):
        calibrate(random_model("llama", "eager"), [random_tokens(48)[0]], 256, progress=False)
