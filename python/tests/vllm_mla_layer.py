"""vLLM's MLAAttention layer with Gyre's backend, without a model: decoding, drafts, prompts in chunks, and what is refused. For
vllm_engine.py, which runs it in an environment with vLLM."""

import contextlib
import os
import pathlib
import tempfile
from types import SimpleNamespace

import torch
from transformers import DeepseekV3Config
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend
from vllm_latent_contract import LATENT, OWN, ROTARY, SCALE, V_DIM, Projections, batch_of, calibration_of, error_of, reference
from vllm_layer import config_of, refused

from gyre.calibrate.file import identity
from gyre.integrations.vllm.calibration import latent_calibration
from gyre.integrations.vllm.config import Formats

HEADS, PAGE, NAME = 6, 16, "model.layers.0.self_attn.attn"
CPU = torch.device("cpu")
HF = DeepseekV3Config(num_hidden_layers=1)
MODEL = dict(use_mla=True, rswa_window=None, max_model_len=2048, hf_text_config=SimpleNamespace(), hf_config=HF)
# Decoding and drafts, then chunks with a past, then first chunks: vLLM's order.
REQUESTS = [(1, 260), (4, 40), (3, 3), (24, 148), (9, 33), (13, 13), (30, 30)]
DECODES = 3
BOUNDS = {torch.float32: 1e-8, torch.bfloat16: 3e-5}


class UpProjection(torch.nn.Module):
    """kv_b_proj: K's coordinates of a head, then V's."""

    quant_method = None

    def __init__(self, projections):
        super().__init__()
        rows = torch.cat((projections.up_k, projections.up_v.transpose(1, 2)), 1)
        self.weight = torch.nn.Parameter(rows.flatten(0, 1).contiguous(), requires_grad=False)
        self.params_dtype = rows.dtype

    def forward(self, x):
        return x @ self.weight.T, None


@contextlib.contextmanager
def mla_config(dtype=torch.float32, **options):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        usual = {"k": "tq8", "v": "tq8", "cache_config__block_size": PAGE}
        with config_of(**{**usual, "model_config": SimpleNamespace(dtype=dtype, **MODEL), **options}) as config:
            yield config
    finally:
        torch.set_default_dtype(before)


def make(projections, rotary=ROTARY, **options):
    return MLAAttention(HEADS, SCALE, OWN, rotary, V_DIM, None, LATENT, UpProjection(projections), prefix=NAME, **options)


class Layer:
    def __init__(self, config, projections, threshold=4, **options):
        self.layer = make(projections, cache_config=config.cache_config, **options)
        self.layer.process_weights_after_loading(config.model_config.dtype)
        backend = self.layer.get_attn_backend()
        self.spec = backend.customize_spec(self.layer.get_kv_cache_spec(config))
        self.builder = backend.get_builder_cls()(self.spec, [NAME], config, CPU)
        self.builder.reorder_batch_threshold = threshold  # as with 3 drafts

    def metadata(self, batch, **changed):
        usual = dict(
            query_start_loc=batch.cu_seqlens_q,
            query_start_loc_cpu=batch.cu_seqlens_q,
            seq_lens=batch.kv_lengths,
            seq_lens_cpu_upper_bound=batch.kv_lengths,
            num_reqs=len(batch.kv_lengths),
            num_actual_tokens=batch.tokens,
            max_query_len=batch.max_query_length,
            max_seq_len=batch.max_kv_length,
            block_table_tensor=batch.table,
            slot_mapping=batch.slots,
            is_prefilling=torch.tensor([queries > 4 for queries, _ in batch.requests]),
        )
        return self.builder.build(0, CommonAttentionMetadata(**{**usual, **changed}))

    def run(self, batch, projections):
        """As vLLM's opaque ops call a layer."""
        layer, whole = self.layer, torch.zeros(batch.blocks, 1, PAGE, self.spec.state_content_bytes, dtype=torch.uint8)
        layer.bind_kv_cache(whole)

        def write(latents, rotary, slots, metadata):
            layer.update_kv_cache(latents[:, 0], rotary, layer.kv_cache, slots, metadata, layer.kv_cache_dtype, layer._k_scale)

        metadata = self.metadata(batch)
        for r, (latents, rotary) in enumerate(batch.past):
            if len(latents):
                write(latents, rotary, torch.tensor([batch._slot(batch.host_table[r], p) for p in range(len(latents))]), None)
        write(batch.k, batch.v, batch.slots, metadata)
        out = torch.full((len(batch.q), HEADS * V_DIM), 7.0, dtype=batch.q.dtype)
        layer.forward_impl(projections.q, batch.k[:, 0], batch.v, layer.kv_cache, metadata, out)
        assert (out[batch.tokens :] == 7).all(), "rows of no request were written"
        return out[: batch.tokens].view(-1, HEADS, V_DIM), metadata


def steps():
    """Ragged steps, with and without requests that decode, against double precision over the stored values."""
    worst, count = 0.0, 0
    for k, v in (("f16", "f16"), ("bf16", "bf16"), ("tq8", "tq8"), ("tq4", "tq8")):
        formats = Formats(k, v)
        for dtype, bound in BOUNDS.items():
            for requests, decodes in ((REQUESTS, DECODES), (REQUESTS[:DECODES], DECODES), (REQUESTS[DECODES:], 0), (REQUESTS[-2:], 0)):
                for invariant in (False, True):
                    os.environ["VLLM_BATCH_INVARIANT"] = str(int(invariant))
                    batch = batch_of(CPU, HEADS, PAGE, requests, padded_tokens=3, seed=count, dtype=dtype)
                    projections = Projections(batch)
                    with mla_config(dtype, k=k, v=v) as config:
                        layer = Layer(config, projections)
                        out, metadata = layer.run(batch, projections)
                    absorbed = len(requests) if invariant else decodes
                    assert metadata.num_decodes == absorbed and metadata.num_prefills == len(requests) - absorbed
                    begin = sum(queries for queries, _ in requests[:absorbed])
                    wanted = [reference(batch, projections.absorbed(), formats, stored) for stored in (True, False)]
                    wanted = projections.expand(torch.cat((wanted[0][:begin], wanted[1][begin:])))
                    error = error_of(out, wanted)
                    assert error < bound, f"{k}/{v} {dtype} {requests}, batch-invariant {invariant}: {error}"
                    worst, count = max(worst, error / bound), count + 1
    os.environ["VLLM_BATCH_INVARIANT"] = "0"
    return f"{count} steps within {worst:.2f} of their bounds"


@contextlib.contextmanager
def rotary_embeddings(*neox_styles):
    """Those that a model has made."""
    with config_of():
        made = {style: rotary_embedding.RotaryEmbedding(ROTARY, ROTARY, 64, 10000.0, style, torch.float32) for style in neox_styles}
    before = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    rotary_embedding._ROPE_DICT.update(made)
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(before)


@contextlib.contextmanager
def calibration_file(**options):
    made = calibration_of(**options)
    made.identity = identity(HF)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "mla.gyrecal")
        made.save(path)
        yield made, path


def calibrated():
    """As steps(), with a calibration: decodes, drafts and chunks, whose context is merged by its log-sum-exp."""
    count, worst = 0, 0.0
    cases = (("tq4", "tq8", True, False), ("tq4", "tq8", True, True), ("tq4", "bf16", True, False), ("tq8", "tq8", False, False))
    for k, v, transform, neox in cases:
        formats = Formats(k, v)
        with calibration_file(transform=transform) as (made, path), rotary_embeddings(neox):
            own = latent_calibration(made, 0, formats, (LATENT, ROTARY), not neox)
            for dtype, bound in BOUNDS.items():
                batch = batch_of(CPU, HEADS, PAGE, REQUESTS, padded_tokens=3, seed=count, dtype=dtype)
                projections = Projections(batch)
                with mla_config(dtype, additional_config={"gyre": {"k": k, "v": v, "calibration": str(path)}}) as config:
                    out, _ = Layer(config, projections).run(batch, projections)
                wanted = [reference(batch, projections.absorbed(), formats, stored, own) for stored in (True, False)]
                begin = sum(queries for queries, _ in REQUESTS[:DECODES])
                error = error_of(out, projections.expand(torch.cat((wanted[0][:begin], wanted[1][begin:]))))
                assert error < bound, f"{k}/{v} {dtype}, transform {transform}, neox {neox}: {error}"
                worst, count = max(worst, error / bound), count + 1
    return f"{count} calibrated steps within {worst:.2f} of their bounds"


def sizes():
    """What vLLM allocates for a token, and a format for each layer."""
    batch = batch_of(CPU, HEADS, PAGE, [(1, 1)])
    for k, v, token_bytes in (("bf16", "bf16", 1152), ("tq8", "tq8", 582), ("tq4", "tq8", 326), ("tq4", "bf16", 388)):
        with mla_config(k=k, v=v) as config:
            spec = Layer(config, Projections(batch)).spec
        assert spec.page_size_bytes == PAGE * token_bytes and spec.dtype == torch.uint8, spec
    with mla_config(additional_config={"gyre": {"k": "tq4", "layers": {"0": {"k": "bf16", "v": "bf16"}}}}) as config:
        assert Layer(config, Projections(batch)).spec.page_size_bytes == PAGE * 1152
    with mla_config(additional_config=None) as config:
        assert Layer(config, Projections(batch)).spec.page_size_bytes == PAGE * 582  # tq8
    return "bytes per token of 4 pairs, of a layer's own and of the default"


def refuse(words, changed=None, **options):
    projections = Projections(batch_of(CPU, HEADS, PAGE, [(1, 1)]))
    with mla_config(**(changed or {})) as config:
        refused(words, lambda: Layer(config, projections, **options))
    return 1


def refusals():
    count = refuse("stored as f16, bf16 or a native format, got f32", dict(k="f32"))
    count += refuse("rotary part", rotary=0)
    count += refuse("sliding window", sliding_window=64)
    count += refuse("sparse MLA", indexer=object())
    with calibration_file() as (_, path), rotary_embeddings(False, True):
        named = lambda **formats: dict(additional_config={"gyre": {"calibration": str(path), **formats}})
        count += refuse("orders rotary coordinates is not known", named(k="tq4", v="tq8"))
        count += refuse("stores the latent as bf16 and the rotary part as tq8", named(k="bf16", v="tq8"))
        count += refuse("none.gyrecal", dict(additional_config={"gyre": {"calibration": "none.gyrecal"}}))
        count += refuse("no formats for 4.25 bits", dict(additional_config={"gyre": {"calibration": str(path), "budget": 4.25}}))
        model = SimpleNamespace(dtype=torch.float32, **{**MODEL, "hf_config": DeepseekV3Config(num_hidden_layers=2)})
        count += refuse("made for m, whose config differs", dict(named(k="tq4", v="tq8"), model_config=model))
    count += refuse("--block-size must be a multiple of 8", {"cache_config__block_size": 12})
    count += refuse("decode context parallel", dict(parallel_config__decode_context_parallel_size=2))
    count += refuse("prefill context parallel", dict(parallel_config__prefill_context_parallel_size=2))
    count += refuse("--kv-cache-dtype fp8", dict(cache_config__cache_dtype="fp8"))
    batch = batch_of(CPU, HEADS, PAGE, REQUESTS)
    with mla_config() as config:
        layer = Layer(config, Projections(batch))
        refused("must be causal", lambda: layer.metadata(batch, causal=False))
        count += 1
    with mla_config() as config:
        assert get_attn_backend(576, torch.float32, "auto", use_mla=True).is_mla()
        assert AttentionBackendEnum.CUSTOM.get_class().is_mla()
        config.attention_config.backend = None
        assert AttentionBackendEnum.CPU_MLA.get_class().get_name() == "CPU_MLA"  # vLLM's own
    return f"{count} layers and steps refused by name"


if __name__ == "__main__":
    for function in (sizes, steps, calibrated, refusals):
        print(function.__name__, function())
