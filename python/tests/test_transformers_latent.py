"""Models with latent attention (MLA) over Gyre's cache against the same models with their own."""

import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf_models import padded, random_tokens

import gyre
from gyre.integrations.transformers import GyreCache

pytestmark = pytest.mark.skipif(not hasattr(transformers, "DeepseekV3Config"), reason="transformers has no DeepSeek-V3")


def model(attention: str, vocab_size: int = 61, kind: str = "DeepseekV3", **changes):
    shape = dict(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,  # a small error must not choose other experts
        kv_lora_rank=64,
        q_lora_rank=24,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=24,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    config._attn_implementation = attention
    torch.manual_seed(7)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def logits(made, ids, cache, chunks) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([made(chunk, past_key_values=cache, use_cache=True).logits[0] for chunk in ids.split(chunks, dim=1)])


def test_logits_are_those_of_the_models_own_cache():
    ids = random_tokens(90)
    with torch.no_grad():
        expected = model("eager")(ids).logits[0]
    made = model("gyre")
    cache = GyreCache(made.config, k="f16", v="f16")
    got = logits(made, ids, cache, [60] + [1] * 30)
    assert (got - expected).abs().max() < 2e-2 * expected.abs().max()
    info = cache.describe()[0].layer
    assert (info.kv_heads, info.head_dim, info.v_head_dim, info.latent) == (1, 64, 16, True)


OTHERS = {
    "DeepseekV2": {"topk_method": "greedy"},
    "Glm4MoeLite": {"mlp_layer_types": ["dense"] * 3},
    "Mistral4": {},
    "MiniCPM3": {},
    "Youtu": {},
    "LongcatFlash": {"num_layers": 2, "head_dim": 16, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2},
    "AXK1": {},
}


def latent_model(attention: str, kind: str):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, f"{kind}Config")
    modeling = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    if not any(hasattr(thing, "expand_kv") for thing in vars(modeling).values()):
        pytest.skip(f"{kind} of transformers {transformers.__version__} caches keys and values of all heads")
    return model(attention, kind=kind, **OTHERS[kind])


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_take_the_same_cache(kind):
    ids = random_tokens(90)
    with torch.no_grad():
        expected = latent_model("eager", kind)(ids).logits[0]
    made = latent_model("gyre", kind)
    cache = GyreCache(made.config, k="f16", v="f16")
    got = logits(made, ids, cache, [60] + [1] * 30)
    assert (got - expected).abs().max() < 2e-2 * expected.abs().max()
    layers = cache.describe()
    assert len(layers) == made.config.num_hidden_layers
    assert {(each.layer.head_dim, each.layer.v_head_dim, each.layer.latent) for each in layers} == {(64, 16, True)}


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_an_indexer_is_refused_by_name(kind):
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    config = getattr(transformers, f"{kind}Config")()
    with pytest.raises(gyre.InvalidArgument, match=f"{config.model_type} attends to index_topk=2048 tokens that an indexer chooses"):
        GyreCache(config)


@pytest.mark.parametrize("k, bound", [("tq8", 0.03), ("tq4", 0.3)])
def test_compressed_logits_are_close(k, bound):
    ids = random_tokens(200)
    with torch.no_grad():
        expected = model("eager")(ids).logits[0]
    made = model("gyre")
    got = logits(made, ids, GyreCache(made.config, k=k, v="tq8", tail=16), [150] + [1] * 50)
    assert ((got - expected).pow(2).mean() / expected.pow(2).mean()).sqrt() < bound


def test_a_padded_batch_is_each_row_alone():
    made = model("gyre")
    rows = [random_tokens(20)[0], random_tokens(33)[0][5:]]
    ids, mask = padded(rows)
    with torch.no_grad():
        together = made(ids, attention_mask=mask, past_key_values=GyreCache(made.config, k="f16", v="f16")).logits[:, -1]
        for row, got in zip(rows, together):
            cache = GyreCache(made.config, k="f16", v="f16")
            alone = made(row[None], past_key_values=cache).logits[0, -1]
            assert (got - alone).abs().max() < 1e-2 * alone.abs().max()


def test_refusals():
    made = model("eager")
    with torch.no_grad(), pytest.raises(gyre.InvalidArgument, match="a GyreCache is read by Gyre's attention only"):
        made(random_tokens(4), past_key_values=GyreCache(made.config))
    with torch.no_grad(), pytest.raises(gyre.InvalidArgument, match="stored as f16, bf16 or a native format, got f32"):
        model("gyre")(random_tokens(4), past_key_values=GyreCache(made.config, k="f32", v="f32"))
