"""A GyreCache in a file, with its tokens."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import padded, random_model, random_tokens

import gyre
from gyre.integrations.transformers import GyreCache

FEW = dict(max_new_tokens=10, min_new_tokens=10, do_sample=False)
IDS = random_tokens(90)


@pytest.fixture(scope="module")
def model():
    return random_model("qwen3-window-13", "gyre")


def make(model, **options) -> GyreCache:
    return GyreCache(model.config, **{**dict(k="tq8", v="tq4", tail=20, sink_tokens=4, step_tokens=16), **options})


@torch.no_grad()
def fill(model, ids, cache, mask=None) -> GyreCache:
    model(ids, past_key_values=cache, use_cache=True, attention_mask=mask)
    return cache


@pytest.fixture
def path(model, tmp_path):
    path = tmp_path / "text.gyre"
    fill(model, IDS[:, :70], make(model)).save(path, IDS)
    return path


def refuses(pattern: str, kind=gyre.InvalidArgument):
    return pytest.raises(kind, match=pattern)


@pytest.mark.parametrize("paged", [False, True])
def test_a_text_goes_on(model, tmp_path, paged):
    cache = fill(model, IDS[:, :70], make(model, paged=paged))
    cache.save(tmp_path / "text.gyre", IDS.tolist()[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.gyre"]
    expected = model.generate(IDS, past_key_values=cache, **FEW)
    loaded = make(model, paged=paged)
    loaded.load(tmp_path / "text.gyre", IDS)
    assert loaded.get_seq_length() == 70
    assert torch.equal(model.generate(IDS, past_key_values=loaded, **FEW), expected)


def test_the_last_token_of_the_same_prompt_is_computed_again(model, path):
    loaded = make(model)
    loaded.load(path, IDS[:, :70])
    assert loaded.get_seq_length() == 69
    cache = fill(model, IDS[:, :70], make(model))
    cache.crop(-1)
    given, expected = (model.generate(IDS[:, :70], past_key_values=c, **FEW) for c in (loaded, cache))
    assert torch.equal(given, expected)


def test_a_batch(model, tmp_path):
    rows = [IDS[0, :70], IDS[0, 3:20], IDS[0, 5:6]]
    ids, mask = padded(rows)
    cache = fill(model, ids, make(model), mask)
    cache.save(tmp_path / "batch", ids)
    more, more_mask = (torch.cat([x, torch.ones(3, 2, dtype=x.dtype)], 1) for x in (ids, mask))
    loaded = make(model)
    loaded.load(tmp_path / "batch", more)
    assert loaded.batch_size == 3
    given, expected = (
        model.generate(more, attention_mask=more_mask, past_key_values=c, **FEW) for c in (loaded, cache)
    )
    assert torch.equal(given, expected)
    other = more.clone()
    other[2, 0] = 9  # padding
    make(model).load(tmp_path / "batch", other)
    other[1, 60] += 1
    with refuses("position 60 of row 1 is token"):
        make(model).load(tmp_path / "batch", other)


def test_another_prompt(model, path):
    other = IDS.clone()
    other[0, 41:] = 7
    other[0, 41] = 8
    cache = make(model)
    with refuses(f"position 41 of row 0 is token 8, the file has {IDS[0, 41]}"):
        cache.load(path, other)
    with refuses("ends at position 30, .* has 70 tokens"):
        cache.load(path, IDS[:, :30])
    with refuses("integers"):
        cache.load(path, IDS.float())
    with refuses(r"\[1, tokens\], got \[2, 90\]"):
        cache.load(path, IDS.repeat(2, 1))
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    cache.load(path, IDS)
    with refuses("must be a new one"):
        cache.load(path, IDS)


def test_another_cache(model, path):
    for options, pattern in (
        (dict(k="tq4"), "layer 0 as .*tq8.*the cache has .*tq4"),
        (dict(tail=9), "layer 0"),
        (dict(capacity=60), "would be 70, the cache has room for 60"),
        (dict(paged=True), "paged=False"),
        (dict(step_tokens=17), "slots"),
    ):
        cache = make(model, **options)
        with refuses(pattern):
            cache.load(path, IDS)
        assert cache.get_seq_length() == 0 and cache.nbytes == 0
    with refuses("has 4 layers, the cache has 3"):
        make(random_model("llama", "gyre", num_hidden_layers=3)).load(path, IDS)


def test_damage(model, path, tmp_path):
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "little")
    ids = 16 + length
    for place in (0, 9, 20, ids + 5, ids + 70 * 8 + 5, ids + 70 * 9 + 3, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 4
        (tmp_path / "changed").write_bytes(changed)
        cache = make(model)
        with refuses("load: .*changed: ", gyre.IoError):
            cache.load(tmp_path / "changed", IDS)
        assert cache.get_seq_length() == 0 and cache.nbytes == 0
    for size in (0, 10, 16 + length // 2, 16 + length + 100, len(data) - 1):
        (tmp_path / "short").write_bytes(data[:size])
        with refuses("ends early", gyre.IoError):
            make(model).load(tmp_path / "short", IDS)
    with refuses("No such file", gyre.IoError):
        make(model).load(tmp_path / "nothing", IDS)


@pytest.mark.parametrize(
    "change", [dict(rows=-1), dict(columns="a"), dict(rows=1 << 50), dict(parts=[]), dict(layers=3), dict(paged=None)]
)
def test_descriptions_that_are_made_up(model, path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "little")
    text = json.dumps({**json.loads(data[16 : 16 + length]), **change}).encode()
    path.write_bytes(data[:12] + len(text).to_bytes(4, "little") + text + data[16 + length :])
    with refuses("cannot be read", gyre.IoError):
        make(model).load(path, IDS)


def test_what_cannot_be_saved(model, path, tmp_path):
    with refuses("empty"):
        make(model).save(tmp_path / "x", IDS)
    cache = fill(model, IDS, make(model))
    with refuses("holds 90 tokens, 89 token ids"):
        cache.save(path, IDS[:, :89])
    with refuses("no folder", gyre.IoError):
        cache.save(tmp_path / "no folder" / "x", IDS)
    make(model).load(path, IDS)  # what was there is still there
    cache.save(path, IDS)
    with refuses("the prompt ends at position 70"):
        make(model).load(path, IDS[:, :70])
