"""Calibrations of models whose layers have dims of their own, and whose last layers share the caches of earlier ones (Gemma 3n and 4)."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tqdm")

import safetensors
from hf_models import TEXT, random_model, random_tokens

import gyre
from gyre.calibrate import Calibration, __main__
from gyre.calibrate.model import attentions
from gyre.calibrate.moments import SKIPPED, collect
from gyre.calibrate.rotary import of_layers
from gyre.calibrate.run import calibrate
from gyre.integrations.transformers import GyreCache

pytestmark = pytest.mark.filterwarnings("ignore:calibrate. .* tokens are few")

GEMMA4, KEYS_ARE_VALUES, GEMMA3N = "gemma4-shared-window-9", "gemma4-keys-are-values", "gemma3n-shared-window-9"
OWNERS = {0: [], 1: [3, 4], 2: [5]}  # layers that share the cache of each


def collected(name):
    model, ids, seen = random_model(name, "eager"), random_tokens(90)[0], {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.q_norm.register_forward_hook(lambda module, args, out, i=i: seen.setdefault(i, []).append(out[0].double()))
    parts = attentions(model)
    return model, ids, seen, parts, collect(model, parts, of_layers(model.get_decoder()), [ids], progress=False)[0]


@pytest.mark.parametrize("name", [GEMMA4, GEMMA3N])
def test_queries_and_outputs_are_those_of_all_layers_that_read_a_cache(name):
    model, ids, seen, parts, moments = collected(name)
    assert {part.index: [reader.index for reader in part.readers] for part in parts} == OWNERS
    with torch.no_grad():
        probabilities = model(ids[None], output_attentions=True).attentions
    for part, found in zip(parts, moments):
        readers = [part.index, *OWNERS[part.index]]
        weights = part.value_weights()
        for kv_head in range(2):
            heads = slice(3 * kv_head, 3 * kv_head + 3)
            # Behind the call for tokens that are alone at position 0; [tokens, 6 heads, d].
            rows = torch.cat([seen[i][1][SKIPPED:, heads].flatten(0, 1) for i in readers])
            torch.testing.assert_close(found.q_second[kv_head], rows.T @ rows / len(rows), atol=1e-6, rtol=1e-5)
            mass = torch.stack([probabilities[i][0, heads, 45:, 0].mean() for i in readers]).mean()
            mass = torch.zeros_like(mass) if part.module.sliding_window else mass
            torch.testing.assert_close(found.first_mass[kv_head].float(), mass, atol=1e-4, rtol=1e-3)
            wanted = 0
            for i in readers:
                out = model.model.layers[i].self_attn.o_proj.weight.detach().double().unflatten(1, (6, part.head_dim))[:, heads]
                wanted = wanted + torch.einsum("nhi,nhj->ij", out, out)
            torch.testing.assert_close(weights[kv_head], wanted)


def test_without_a_text_queries_are_those_of_all_layers_that_read_a_cache():
    model = random_model(GEMMA4, "eager")
    part = attentions(model)[1]
    alone = [attentions(model)[1], *part.readers]
    alone[0].readers.clear()
    for reader in alone[1:]:
        object.__setattr__(reader, "kv_heads", 2)
    wanted = sum(each.second_moment("q") for each in alone) / 3
    torch.testing.assert_close(part.second_moment("q"), wanted)
    assert (wanted - alone[0].second_moment("q")).norm() > 0.01 * wanted.norm()


def test_values_may_be_projected_keys():
    part = attentions(random_model(KEYS_ARE_VALUES, "eager"))[1]
    assert part.module.v_proj is None and (part.kv_heads, part.head_dim) == (1, 64)
    weight = part.module.k_proj.weight.detach().double()
    wanted = weight @ weight.T  # gains of the input's norm are 1 in a random model
    torch.testing.assert_close(part.second_moment("v")[0], wanted / wanted.diagonal().mean())


def logits(model, ids, cache):
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache, use_cache=True).logits[0] for part in ids.split([60, 1, 1, 138], dim=1)])


def distance(model, expected, ids, **how):
    got = logits(model, ids, GyreCache(model.config, tail=0, sink_tokens=0, capacity=256, **how))
    return ((got - expected).square().mean() / expected.square().mean()).item()


@pytest.mark.parametrize(
    "name, sizes, dims",
    [
        (GEMMA4, {}, [(2, 32, 32), (2, 32, 32), (2, 64, 64)]),
        (KEYS_ARE_VALUES, {}, [(2, 32, 32), (1, 64, 64)] * 2),
        (GEMMA3N, {}, [(2, 32, 32)] * 3),
        (
            GEMMA4,
            dict(head_dim=256, global_head_dim=512, num_attention_heads=2, num_key_value_heads=1),
            [(1, 256, 256), (1, 256, 256), (1, 512, 512)],
        ),
    ],
)
def test_the_same_bytes_lose_less(name, sizes, dims, tmp_path):
    model, ids, path = random_model(name, "gyre", **sizes), random_tokens(200), tmp_path / "a.gyrecal"
    calibrate(model, [random_tokens(560)[0]], 256, progress=False).save(path)
    assert Calibration.load(path).dims == dims
    with safetensors.safe_open(path, "pt") as file:
        said = json.loads(file.metadata()["gyrecal"])
    assert said["version"] == (3 if len(set(dims)) > 1 else 2) and ("dims" in said) == (len(set(dims)) > 1)
    with torch.no_grad():
        expected = random_model(name, "eager", **sizes)(ids).logits[0]
    for paged in (False, True):
        plain = distance(model, expected, ids, k="tq4", v="tq4", paged=paged)
        assert distance(model, expected, ids, k="tq4", v="tq4", paged=paged, calibration=path) < 0.85 * plain


def test_files_whose_dims_are_not_those_of_the_tensors_are_refused(tmp_path):
    from safetensors.torch import save_file

    from gyre.calibrate.file import _checksum

    calibrate(random_model(GEMMA4, "eager"), None, 0).save(tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", "pt") as file:
        tensors, said = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["gyrecal"])
    said.pop("checksum")
    good = said["dims"]
    for message, dims in (
        (r"layers.2.k.basis must be finite f32 \[2, 32, 32\]", good[:2] + good[:1]),
        (r"layers.0.v.basis must be finite f32 \[2, 64, 64\]", [[2, 32, 64], *good[1:]]),
        ("description cannot be read", good[:2]),
        ("description cannot be read", [*good[:2], [2, 64]]),
        ("description cannot be read", [*good[:2], [2, 64, 0]]),
        ("description cannot be read", 3),
    ):
        changed = {**said, "dims": dims}
        save_file(tensors, tmp_path / "b", {"gyrecal": json.dumps({**changed, "checksum": _checksum(changed, tensors)})})
        with pytest.raises(gyre.IoError, match=message):
            Calibration.load(tmp_path / "b")


def test_other_dims_and_other_sharing_are_another_model():
    model = random_model(GEMMA4, "eager")
    calibration = calibrate(model, None, 0, name="random")
    GyreCache(model.config, calibration=calibration)
    for changes in (dict(global_head_dim=32), dict(num_kv_shared_layers=2), dict(global_head_dim=128)):
        with pytest.raises(gyre.InvalidArgument, match="made for random, whose config differs"):
            GyreCache(random_model(GEMMA4, "eager", **changes).config, calibration=calibration)


def test_the_command(tmp_path, capsys):
    random_model(GEMMA4, "eager", vocab_size=300, vocab_size_per_layer_input=300).save_pretrained(tmp_path)
    path = tmp_path / "a.gyrecal"
    assert __main__.main([str(tmp_path), str(TEXT), "--tokens", "200", "--quiet", "--budget", "4.5", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    assert "3 layers, 2 KV heads, head_dim 32 in 2 of them; 2 KV heads, head_dim 64 in 1 of them, 185 tokens" in said
    made = Calibration.load(path)
    assert len(made.sensitivities) == 3 and [budget.by for budget in made.budgets] == ["coordinate", "bytes"]
    # A scale for each row of 32 and of 64: half of the coordinates have 1/2 bit of it, the others 1/4.
    bits = {"tq2": 2, "tq3": 3, "tq4": 4, "tq5": 5, "tq6": 6, "tq8": 8}
    budget, coordinates = made.budget(4.5, "coordinate"), (64, 64, 128)
    used = sum((bits[k] + bits[v]) * count for k, v, count in zip(budget.k, budget.v, coordinates)) / 512 + 0.375
    assert budget.used == pytest.approx(used) and used <= 4.5
    model = random_model(GEMMA4, "gyre", vocab_size=300, vocab_size_per_layer_input=300)
    cache = GyreCache(model.config, calibration=path, budget=4.5)
    assert [(layer.stored.k, layer.stored.v) for layer in cache.layers] == list(zip(budget.k, budget.v))
