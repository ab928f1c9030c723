"""The options of the vLLM plugin, and what it takes from the environment; vLLM is not needed."""

import pytest

import gyre
from gyre.integrations.vllm.config import ConfigError, Formats, Options, cache_dtypes, parse


def test_formats_of_layers():
    assert parse(None) == parse({}) == parse({"gyre": {}}) == Options(Formats("tq8", "tq8"))
    assert parse({"gyre": {"v": "bf16"}, "other": 1}).of(3, None) == Formats("tq8", "bf16")
    layers = {"0": {"k": "f16", "v": "f16"}, "5": {"v": "tq8"}, "sliding_window": {"k": "tq4"}}
    options = parse({"gyre": {"k": "tq6", "v": "tq3", "layers": layers}})
    assert options.of(0, None) == options.of(0, 512) == Formats("f16", "f16")  # a number comes before the kind
    assert options.of(5, None) == Formats("tq6", "tq8")
    assert options.of(1, 512) == Formats("tq4", "tq3")
    assert options.of(1, None) == options.of(None, None) == Formats("tq6", "tq3")


@pytest.mark.parametrize(
    "given, words",
    [
        ("tq4", "must be an object"),
        ({"k": "int4"}, "additional_config.*int4"),
        ({"k": 4}, "k must be the name of a format, got 4"),
        ({"format": "tq4"}, "'format'; known are k, v, layers, calibration, budget"),
        ({"calibration": 3}, '"calibration" must be the path of a file, got 3'),
        ({"calibration": "x", "budget": "4"}, "\"budget\" must be a number of bits, got '4'"),
        ({"calibration": "x", "budget": True}, '"budget" must be a number of bits, got True'),
        ({"budget": 4.125}, 'a budget of 4.125 bits needs a "calibration"'),
        ({"calibration": "x", "budget": 4, "v": "tq4"}, '"v" is given, and a budget of 4 bits'),
        ({"layers": ["tq4"]}, '"layers" must be an object'),
        ({"layers": {"0": "tq4"}}, "layer '0' must be an object"),
        ({"layers": {"0": {"q": "tq4"}}}, "layer '0' has 'q'"),
        ({"layers": {"0": {"v": "tq9"}}}, "layer '0'.*tq9"),
        ({"layers": {"first": {"v": "tq4"}}}, "number or \"sliding_window\", got 'first'"),
        ({"layers": {"-1": {"v": "tq4"}}}, "got '-1'"),
    ],
)
def test_wrong_options_are_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        parse({"gyre": given})


def test_calibrations():
    assert parse({"gyre": {"v": "tq4", "calibration": "m.gyrecal"}}) == Options(Formats("tq8", "tq4"), calibration="m.gyrecal")
    options = parse({"gyre": {"calibration": "m.gyrecal", "budget": 4}})
    assert (options.calibration, options.budget) == ("m.gyrecal", 4.0)
    assert [Formats(*pair).compressed for pair in (("tq4", "f16"), ("bf16", "tq2"), ("f32", "f16"))] == [
        (True, False),
        (False, True),
        (False, False),
    ]


@pytest.mark.parametrize("k", ["f32", "f16", "bf16", "tq8", "tq5", "tq4", "tq3", "tq2"])
@pytest.mark.parametrize("heads, dim, v_dim", [(1, 64, 64), (8, 128, 128), (3, 80, 80), (2, 256, 256), (2, 192, 128)])
def test_pages_are_bytes_per_token(k, heads, dim, v_dim):
    formats = Formats(k, "tq4")
    for tokens in (8, 16, 24, 128, 1024):
        assert formats.token_bytes(heads, dim, v_dim) * tokens == formats.page_bytes(heads, dim, v_dim, tokens)
    assert Formats("tq8", "tq4").token_bytes(2, 128, 128) == 2 * (130 + 66)
    assert Formats("bf16", "bf16").token_bytes(2, 128, 128) == 2 * 512


def test_heads_that_a_format_does_not_have():
    with pytest.raises(gyre.Error, match="head dims from 16"):
        Formats("tq8", "tq4").token_bytes(2, 7, 7)


def test_names_of_kv_cache_dtypes():
    names = cache_dtypes()
    assert names["gyre_tq8_tq4"] == Formats("tq8", "tq4") and names["gyre_tq4"] == Formats("tq4", "tq4")
    assert "gyre_tq4_tq4" not in names and "gyre_f16" not in names
    assert parse(None, "gyre_tq8_tq4") == Options(Formats("tq8", "tq4"))
    layers = {"0": {"v": "tq8"}}
    assert parse({"gyre": {"layers": layers}}, "gyre_tq4").of(0, None) == Formats("tq4", "tq8")
    assert parse({}, "bfloat16") == Options()
    with pytest.raises(ConfigError, match='gyre_tq4 names the formats, and "v" is given'):
        parse({"gyre": {"v": "tq8"}}, "gyre_tq4")
