"""gyre.rope against what others wrote: the rotary functions of transformers, and MLX."""

import importlib

import numpy as np
import pytest

import gyre

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 23, 6, 2, 128
SECTIONS = [16, 24, 24]  # pairs of time, height and width


def heads(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((TOKENS, count, HEAD_DIM), dtype=np.float32)


def positions_3d() -> np.ndarray:
    """Text, then an image of 3 x 4 patches, then text, as M-RoPE counts them."""
    text = np.arange(5)
    rows, columns = np.divmod(np.arange(12), 4)
    image = np.stack([np.zeros(12, int), rows, columns]) + 5
    after = np.arange(6) + 9
    return np.concatenate([np.tile(text, (3, 1)), image, np.tile(after, (3, 1))], axis=1).astype(np.int32)


def ours(q, k, positions, **options) -> tuple[np.ndarray, np.ndarray]:
    out = np.empty_like(q), np.empty_like(k)
    encoder = gyre.Encoder("cpu")
    gyre.rope(encoder, x=q, positions=positions, out=out[0], k=k, k_out=out[1], **options)
    encoder.submit().wait()
    return out


def check(given, expected) -> None:
    # Transformers multiplies positions and frequencies in f32: angles are off by 2^-24 of them.
    for a, b in zip(given, expected):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=0)


@pytest.fixture
def rotary():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def rotate(family: str, embedding: str, config: str, q, k, positions, layer_type=None, **options):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        made = getattr(transformers, config)(
            hidden_size=HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            **options,
        )
        q, k = (torch.from_numpy(x).transpose(0, 1)[None] for x in (q, k))
        ids = torch.from_numpy(positions).long()[..., None, :]
        more = {} if layer_type is None else {"layer_type": layer_type}
        cos, sin = getattr(module, embedding)(made)(q, ids if ids.dim() == 3 else ids.view(1, -1), **more)
        apply = getattr(module, "apply_multimodal_rotary_pos_emb", None)
        rotated = (
            apply(q, k, cos, sin, SECTIONS) if apply and cos.dim() == 4 else module.apply_rotary_pos_emb(q, k, cos, sin)
        )
        return [x[0].transpose(0, 1).numpy() for x in rotated]

    return rotate


@pytest.mark.parametrize("first", [0, 5000])
def test_llama(rotary, first):
    q, k, positions = heads(HEADS), heads(KV_HEADS), np.arange(first, first + TOKENS, dtype=np.int32)
    expected = rotary(
        "llama",
        "LlamaRotaryEmbedding",
        "LlamaConfig",
        q,
        k,
        positions,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    given = ours(q, k, positions, base=5e5)
    for a, b in zip(given, expected):
        np.testing.assert_allclose(a, b, atol=2e-5 + first * 2e-7, rtol=0)


def test_llama3_scaling(rotary):
    q, k, positions = heads(HEADS), heads(KV_HEADS), np.arange(TOKENS, dtype=np.int32)
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    expected = rotary(
        "llama",
        "LlamaRotaryEmbedding",
        "LlamaConfig",
        q,
        k,
        positions,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling},
    )
    frequencies = gyre.rope_frequencies(rope_theta=5e5, rotary_dim=HEAD_DIM, rope_type="llama3", **scaling)
    check(ours(q, k, positions, frequencies=gyre.rope_table("cpu", frequencies.inverse)), expected)


THETA = 5e5
YARN = dict(factor=4.0, original_max_position_embeddings=4096)
YARN_ALL = dict(**YARN, beta_fast=20.0, beta_slow=2.0, truncate=False, mscale=0.7, mscale_all_dim=1.2)
FACTORS = dict(short_factor=np.linspace(1, 1.5, 64).tolist(), long_factor=np.linspace(1, 40, 64).tolist())


def table(**options) -> dict:
    """Frequencies from gyre.rope_frequencies, as options of gyre.rope."""
    made = gyre.rope_frequencies(rope_theta=THETA, rotary_dim=HEAD_DIM, **options)
    return dict(frequencies=gyre.rope_table("cpu", made.inverse), magnitude=made.attention_factor)


def longrope(factors: list, original: int, longest: int) -> dict:
    magnitude = (1 + np.log(longest / original) / np.log(original)) ** 0.5
    return dict(factors=np.array(factors, np.float32), base=THETA, magnitude=magnitude)


# docs/model_config.md: what a config says, and what gyre.rope is given. 23 tokens: more than 16, fewer than 4096.
@pytest.mark.parametrize(
    "longest, parameters, options",
    [
        (2048, dict(rope_type="linear", factor=2.5), lambda: table(rope_type="linear", factor=2.5)),
        (
            16,
            dict(rope_type="dynamic", factor=3.0),
            lambda: table(rope_type="dynamic", factor=3.0, original_max_position_embeddings=16, seq_len=TOKENS),
        ),
        (16384, dict(rope_type="yarn", **YARN), lambda: table(rope_type="yarn", **YARN)),
        (16384, dict(rope_type="yarn", **YARN_ALL), lambda: table(rope_type="yarn", **YARN_ALL)),
        (
            131072,
            dict(rope_type="longrope", original_max_position_embeddings=4096, **FACTORS),
            lambda: longrope(FACTORS["short_factor"], 4096, 131072),
        ),
        (
            131072,
            dict(rope_type="longrope", original_max_position_embeddings=16, **FACTORS),
            lambda: longrope(FACTORS["long_factor"], 16, 131072),
        ),
        (
            2048,
            dict(rope_type="proportional", partial_rotary_factor=0.25),
            lambda: dict(base=THETA, rotary_dim=HEAD_DIM // 4, partner="head_dim", exponent="head_dim"),
        ),
    ],
    ids=["linear", "dynamic", "yarn", "yarn-all", "longrope-short", "longrope-long", "proportional"],
)
def test_scaling(rotary, longest, parameters, options):
    q, k, positions = heads(HEADS), heads(KV_HEADS), np.arange(TOKENS, dtype=np.int32)
    expected = rotary(
        "llama",
        "LlamaRotaryEmbedding",
        "LlamaConfig",
        q,
        k,
        positions,
        max_position_embeddings=longest,
        rope_parameters={"rope_theta": THETA, **parameters},
    )
    check(ours(q, k, positions, **options()), expected)


@pytest.mark.parametrize(
    "family, embedding, config, pairing",
    [
        ("phi3", "Phi3RotaryEmbedding", "Phi3Config", "split_half"),
        ("glm", "GlmRotaryEmbedding", "GlmConfig", "adjacent"),
    ],
)
def test_partial(rotary, family, embedding, config, pairing):
    q, k, positions = heads(HEADS), heads(KV_HEADS), np.arange(TOKENS, dtype=np.int32)
    parameters = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}
    expected = rotary(family, embedding, config, q, k, positions, rope_parameters=parameters, pad_token_id=0)
    check(ours(q, k, positions, pairing=pairing, rotary_dim=HEAD_DIM // 2, base=THETA), expected)


@pytest.mark.parametrize("layer_type, theta", [("sliding_attention", 1e4), ("full_attention", 1e6)])
def test_gemma3(rotary, layer_type, theta):
    q, k, positions = heads(HEADS), heads(KV_HEADS), np.arange(TOKENS, dtype=np.int32)
    expected = rotary(
        "gemma3", "Gemma3RotaryEmbedding", "Gemma3TextConfig", q, k, positions, layer_type, num_hidden_layers=6
    )
    check(ours(q, k, positions, base=theta), expected)


# They have three axes; ours, as in other engines, four. When axes take turns, pairs for which an axis has no turn left
# follow the fourth here and time there: so the fourth is time.
@pytest.mark.parametrize(
    "family, embedding, config, mode",
    [
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", "sectioned"),
        ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", "Qwen3VLTextConfig", "interleaved"),
    ],
)
def test_qwen_vl(rotary, family, embedding, config, mode):
    q, k, positions = heads(HEADS), heads(KV_HEADS), positions_3d()
    interleaved = {"mrope_interleaved": True} if mode == "interleaved" else {}
    sections = [24, 20, 20] if mode == "interleaved" else SECTIONS
    expected = rotary(
        family,
        embedding,
        config,
        q,
        k,
        positions,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections, **interleaved},
    )
    four = np.concatenate([positions, positions[:1]])
    check(ours(q, k, four, mode=mode, sections=[*sections, 0], base=1e6), expected)


@pytest.mark.parametrize("pairing", ["split_half", "adjacent"])
@pytest.mark.parametrize("rotary_dim, first", [(HEAD_DIM, 0), (HEAD_DIM, 700), (64, 3)])
def test_mlx(pairing, rotary_dim, first):
    mlx = pytest.importorskip(
        "mlx.core", reason="MLX is not installed, or has no CPU library here", exc_type=ImportError
    )
    mlx.set_default_device(mlx.cpu)
    q, k = heads(HEADS), heads(KV_HEADS)
    expected = [
        np.array(
            mlx.fast.rope(
                mlx.array(x.transpose(1, 0, 2)[None]),
                rotary_dim,
                traditional=pairing == "adjacent",
                base=10000.0,
                scale=1.0,
                offset=first,
            )
        )[0].transpose(1, 0, 2)
        for x in (q, k)
    ]
    positions = np.arange(first, first + TOKENS, dtype=np.int32)
    given = ours(q, k, positions, pairing=pairing, rotary_dim=rotary_dim)
    for a, b in zip(given, expected):
        np.testing.assert_allclose(a, b, atol=2e-5 + first * 2e-6, rtol=0)
