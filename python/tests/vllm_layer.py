"""vLLM's Attention layer with Gyre's backend, without a model: what a layer may have, and what is refused. For
vllm_engine.py, which runs it in an environment with vLLM."""

import contextlib

import torch
from vllm.config import AttentionConfig, CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_contract import Batch, reference

from gyre.integrations.vllm import register

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 128
CPU = torch.device("cpu")
# (queries, length): decodes, a chunk, a prompt, one token.
REQUESTS = [(1, 260), (1, 40), (24, 148), (13, 13), (1, 1)]
SCALE = DIM**-0.5


@contextlib.contextmanager
def config_of(k="f32", v="f32", **changed):
    register()
    config = VllmConfig(
        attention_config=AttentionConfig(backend=AttentionBackendEnum.CUSTOM),
        cache_config=CacheConfig(block_size=PAGE),
        additional_config={"gyre": {"k": k, "v": v}},
    )
    for path, value in changed.items():
        *owner, name = path.split("__")
        setattr(getattr(config, owner[0]) if owner else config, name, value)
    with set_current_vllm_config(config):
        yield config


class Layer:
    """A layer of vLLM's, loaded, and its pages in vLLM's memory."""

    def __init__(self, config, make=Attention, **options):
        self.name = "model.layers.0.self_attn.attn"
        self.layer = make(HEADS, DIM, SCALE, num_kv_heads=KV_HEADS, prefix=self.name, **options)
        self.layer.process_weights_after_loading(torch.float32)
        backend = self.layer.get_attn_backend()
        spec = backend.customize_spec(self.layer.get_kv_cache_spec(config))
        self.builder = backend.get_builder_cls()(spec, [self.name], config, CPU)
        self.page = spec.block_size
        self.token_bytes = spec.state_content_bytes

    def metadata(self, batch, **changed):
        usual = dict(
            query_start_loc=batch.cu_seqlens_q,
            query_start_loc_cpu=batch.cu_seqlens_q,
            seq_lens=batch.kv_lengths,
            num_reqs=len(batch.kv_lengths),
            num_actual_tokens=len(batch.slots),
            max_query_len=batch.max_query_length,
            max_seq_len=batch.max_kv_length,
            block_table_tensor=batch.table,
            slot_mapping=batch.slots,
            is_prefilling=torch.tensor([queries == length for queries, length in batch.requests]),
        )
        return self.builder.build(0, CommonAttentionMetadata(**{**usual, **changed}))

    def run(self, batch, **changed):
        cache = torch.zeros(batch.blocks, 1, self.page, self.token_bytes, dtype=torch.uint8)
        impl = self.layer.impl
        for r, (k, v) in enumerate(batch.past):
            if len(k):
                slots = [batch._slot(batch.host_table[r], p) for p in range(len(k))]
                impl.do_kv_cache_update(self.layer, k, v, cache, torch.tensor(slots))
        impl.do_kv_cache_update(self.layer, batch.k, batch.v, cache, batch.slots)
        out = torch.full_like(batch.q, 7.0)
        return impl.forward(self.layer, batch.q, batch.k, batch.v, cache, self.metadata(batch), out, **changed)


def batch_of(seed=1):
    return Batch(CPU, HEADS, KV_HEADS, DIM, PAGE, REQUESTS, seed=seed)


def features():
    """Sinks, soft caps, ALiBi and windows as vLLM hands them to a layer, against double precision. Each must count:
    the reference without it is far off."""
    torch.manual_seed(5)
    sinks, alibi_slopes = torch.randn(HEADS), (torch.rand(HEADS) / 8).tolist()
    cases = {
        "plain": ({}, {}),
        "sinks": (dict(sinks=sinks), dict(sink_logits=sinks)),
        "soft cap": (dict(logits_soft_cap=2.0), dict(soft_cap=2.0)),
        "ALiBi": (dict(alibi_slopes=alibi_slopes), dict(alibi_slopes=torch.tensor(alibi_slopes))),
        "window": (dict(per_layer_sliding_window=33), dict(window=33)),
        "all": (
            dict(sinks=sinks, logits_soft_cap=2.0, alibi_slopes=alibi_slopes, per_layer_sliding_window=100),
            dict(sink_logits=sinks, soft_cap=2.0, alibi_slopes=torch.tensor(alibi_slopes), window=100),
        ),
    }
    batch, worst = batch_of(), 0.0
    plain = reference(batch, SCALE)
    for name, (options, expected) in cases.items():
        with config_of() as config:
            out = Layer(config, **options).run(batch).double()
        wanted = reference(batch, SCALE, **expected)
        error = (out - wanted).abs().max().item()
        assert error < 2e-5, f"{name}: an element is off by {error}"
        assert not expected or (wanted - plain).abs().max() > 1e-2, f"{name} changes nothing"
        worst = max(worst, error)
    return f"{', '.join(cases)}: within {worst:.1e} of double precision"


def refused(words, action, kinds=(NotImplementedError, ValueError)):
    try:
        action()
    except kinds as error:
        assert words in str(error) and "gyre" in str(error), f"expected {words!r}: {error}"
    else:
        raise AssertionError(f"taken: {words}")


def refuse_layer(words, make=Attention, changed=None, **options):
    with config_of(**(changed or {})) as config:
        refused(words, lambda: Layer(config, make, **options))
    return 1


def refuse_step(words, forward=None, **metadata):
    """What only a step shows."""
    batch = batch_of()
    with config_of() as config:
        layer = Layer(config)
        if forward is not None:
            refused(words, lambda: layer.run(batch, **forward))
        else:
            refused(words, lambda: layer.metadata(batch, **metadata))
    return 1


def refusals():
    from vllm.config import KVTransferConfig
    from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention

    connector, count = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"), 0
    for kind in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER):
        count += refuse_layer(f"attention of type {kind}", attn_type=kind)
    count += refuse_layer("attention with chunks is not supported", chunks=torch.ones(3))
    count += refuse_layer("ChunkedLocalAttention_64_", ChunkedLocalAttention, attention_chunk_size=64)
    count += refuse_layer("KV connectors", changed=dict(kv_transfer_config=connector))
    count += refuse_layer("context parallel", changed=dict(parallel_config__decode_context_parallel_size=2))
    count += refuse_layer("--kv-cache-dtype fp8", changed=dict(cache_config__cache_dtype="fp8"))
    count += refuse_layer("--block-size must be a multiple of 8", changed=dict(cache_config__block_size=12))
    count += refuse_layer("int4", changed=dict(k="int4"))
    with config_of() as config:
        refused("must be in float32", lambda: _loaded_in(config, torch.float64))
        count += 1
    scale = torch.ones(1)
    for name in ("output_scale", "output_block_scale"):
        count += refuse_step("fused quantization of the output", forward={name: scale})
    count += refuse_step("must be causal", causal=False)
    count += refuse_step("must be causal", causal=torch.tensor([True]))
    count += refuse_step("ranges of images", mm_req_doc_ranges={0: [(0, 4)]})
    count += refuse_step("R-SWA", rswa_prefix_lens=torch.tensor([1]))
    return f"{count} layers and steps refused by name"


def _loaded_in(config, dtype):
    layer = Attention(HEADS, DIM, SCALE, num_kv_heads=KV_HEADS, prefix="model.layers.1.self_attn.attn")
    layer.process_weights_after_loading(dtype)
