"""Latent attention (MLA) under vLLM. Decoding attends over the stored latents with absorbed queries. A prompt's new tokens
attend to each other un-absorbed, by vLLM's own prefill kernels, and to what is stored before them as decoding does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonPrefillMetadata
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from gyre.calibrate.layer import LayerCalibration

from .backend import GyreBackend, GyreMetadataBuilder
from .calibration import latent_calibration
from .latent import MAX_ROWS, Part, Tokens, attend_context, parts_of
from .layer import PagedLayer
from .pages import queue_of


class GyreMlaBackend(GyreBackend):
    @staticmethod
    def get_impl_cls():
        return GyreMlaImpl

    @staticmethod
    def get_builder_cls():
        return GyreMlaMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False


@dataclass
class GyreMlaMetadata(AttentionMetadata):
    """Names as vLLM's layer reads them: requests that decode come first."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: list[Part] | None
    prefill: MLACommonPrefillMetadata | None
    context: list[Part]  # of the prefills' tokens, over the keys before them


class GyreMlaMetadataBuilder(GyreMetadataBuilder):
    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.heads, self.prefill_kernels = layer.num_heads, layer.prefill_backend.clone()

    def _prompts(self, c: CommonAttentionMetadata) -> torch.Tensor | None:
        return super()._prompts(c) if envs.VLLM_BATCH_INVARIANT else None

    def _build(self, c: CommonAttentionMetadata, is_prefill: torch.Tensor | None) -> GyreMlaMetadata:
        self._refuse(c)
        requests, tokens = c.num_reqs, c.num_actual_tokens
        # Batch-invariant: prompts, too, are computed absorbed, over what is stored, however they are cut.
        decodes, decode_tokens, max_queries = requests, tokens, c.max_query_len
        if not envs.VLLM_BATCH_INVARIANT:
            threshold = self.reorder_batch_threshold
            decodes, _, decode_tokens, _ = split_decodes_and_prefills(c, decode_threshold=threshold)
            max_queries = min(max_queries, threshold)
        decode, prefill, context = None, None, []
        if decodes > 0:
            decoding = Tokens(
                0,
                decode_tokens,
                c.query_start_loc[: decodes + 1],
                c.slot_mapping[:decode_tokens],
                c.block_table_tensor[:decodes],
                max_queries,
            )
            decode = parts_of(self.queue, self.heads, decoding, c.seq_lens[:decodes], self._longest(c), is_prefill)
        if decodes < requests:
            context = self._context(c, decodes, decode_tokens)
            prefill = self._prefill(c, decodes, bool(context))
        return GyreMlaMetadata(tokens, decodes, decode_tokens, requests - decodes, decode, prefill, context)

    def _context(self, c: CommonAttentionMetadata, first: int, first_token: int) -> list[Part]:
        """Steps of the requests from `first` on over the keys before their new tokens; none if nothing is stored."""
        starts, last = c.query_start_loc[first : c.num_reqs + 1], c.num_reqs
        starts_cpu = c.query_start_loc_cpu[first : last + 1]
        stored = int((c.seq_lens_cpu_upper_bound[first:last] - (starts_cpu[1:] - starts_cpu[:-1])).max())  # exact for prompts
        if stored == 0:
            return []
        new_tokens = Tokens(
            first_token,
            c.num_actual_tokens - first_token,
            starts,
            c.slot_mapping[first_token : c.num_actual_tokens],
            c.block_table_tensor[first:last],
            c.max_query_len,
        )
        lengths = c.seq_lens[first:last] - (starts[1:] - starts[:-1])
        return parts_of(self.queue, self.heads, new_tokens, lengths, stored, causal=False)

    def _prefill(self, c: CommonAttentionMetadata, first: int, has_context: bool) -> MLACommonPrefillMetadata:
        """For vLLM's prefill kernels, which see the new tokens alone."""
        starts, starts_cpu = (t[first : c.num_reqs + 1] for t in (c.query_start_loc, c.query_start_loc_cpu))
        dtype, table = self.vllm_config.model_config.dtype, c.block_table_tensor[first : c.num_reqs]
        chunked = None
        if has_context:  # the kernels then return the log-sum-exp; `_compute_prefill_context` has chunks of its own
            none = torch.empty(0, device=table.device)
            chunked = MLACommonPrefillMetadata.ChunkedContextMetadata(none, none, [], [], [])
        prefill = MLACommonPrefillMetadata(
            block_table=table,
            query_start_loc=starts - starts[0],
            max_query_len=c.max_query_len,
            chunked_context=chunked,
            q_data_type=dtype,
            output_dtype=dtype,
            prefill_backend=self.prefill_kernels,
            query_lens_cpu=starts_cpu[1:] - starts_cpu[:-1],
        )
        self.prefill_kernels.prepare_metadata(prefill)
        return prefill


def rotates_neighbours(rotary_dim: int) -> bool | None:
    """Whether the model's rotary embedding has the pairs (2m, 2m + 1), not (m, m + n); None: it cannot be told. A layer does not see it,
    but vLLM keeps all that were made."""
    made = rotary_embedding._ROPE_DICT.values()
    neighbours = {not rope.is_neox_style for rope in made if rope.rotary_dim == rotary_dim == rope.head_size}
    return neighbours.pop() if len(neighbours) == 1 else None


class GyreMlaImpl(PagedLayer, MLACommonImpl[GyreMlaMetadata]):
    backend = GyreMlaBackend
    latent = True
    max_rows = MAX_ROWS

    def __init__(self, *args, sliding_window: int | None = None, indexer: object | None = None, **others):
        if sliding_window is not None:
            raise NotImplementedError("gyre: MLA with a sliding window is not supported")
        if indexer is not None or "topk_indices_buffer" in others:
            raise NotImplementedError("gyre: sparse MLA (an indexer that chooses keys) is not supported")
        super().__init__(*args, sliding_window=None, **others)
        self.supports_quant_query_input = False
        self.read_options()
        # vLLM's own CPU kernel has pages of 16, whatever the platform was told. Gyre's unpacks 64 keys at a time.
        cache = self.config.cache_config
        if current_platform.is_cpu() and cache.block_size == 16 and not cache.user_specified_block_size:
            self.page_tokens = 64

    def fused_output_quant_supported(self, quant_key) -> bool:
        return False

    @property
    def stored(self) -> str:
        return f"latent {self.formats.k}, rotary part {self.formats.v}"

    def dims_of(self, layer) -> tuple[int, int, int]:
        self.layer = layer  # has the up-projections
        return 1, self.kv_lora_rank, self.qk_rope_head_dim

    def calibration_of(self, number: int) -> LayerCalibration | None:
        """All ranks have the same: query heads are divided between them, the latent is not."""
        calibration = self.read_calibration()
        if calibration is None:
            return None
        return latent_calibration(calibration, number, self.formats, self.dims[1:], rotates_neighbours(self.qk_rope_head_dim))

    def reserve_workspace(self) -> None:
        """vLLM measures the memory of a step (from 0.33 on)."""
        device = next(self.kv_b_proj.parameters()).device
        self.prepare(queue_of(device), self.config.cache_config.block_size or 64)
        if self.has_transform:  # PagesCalibration.enter()
            rows = self.call_tokens * self.num_heads
            for dim in (self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank):
                torch.empty(rows, dim, dtype=torch.float32, device=device)

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale) -> None:
        """Before the attention: kv_c_normed [tokens, latent], k_pe [tokens, 1, rotary], padding included."""
        if kv_cache.numel() == 0:  # profiling
            return
        pages = self.pages_of(kv_cache)
        pages.write(kv_c_normed.unsqueeze(1), k_pe.view(len(k_pe), 1, -1), pages.queue.slots(slot_mapping))

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata: GyreMlaMetadata, layer):
        """Absorbed queries: the latent's coordinates and the rotary ones, together or apart."""
        pages = self.pages_of(kv_c_and_k_pe_cache)
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        out = q.new_empty(*q.shape[:2], self.kv_lora_rank)
        for rows, step in attn_metadata.decode:
            pages.attend(q[rows], out[rows], step, self.scale)
        return out, None

    def _compute_prefill_context(self, q, kv_c_and_k_pe_cache, attn_metadata: GyreMlaMetadata, k_scale):
        """vLLM merges it with the attention of the new tokens to each other, which must lie alike in memory."""
        padded = getattr(attn_metadata.prefill.prefill_backend, "requires_v_padding", False)
        out = q.new_empty(*q.shape[:2], self.qk_head_dim if padded else self.v_head_dim)[..., : self.v_head_dim]
        up_k, up_v = self.layer.W_UK_T, self.layer.W_UV
        pages = self.pages_of(kv_c_and_k_pe_cache)
        return out, attend_context(pages, q, attn_metadata.context, self.scale, up_k, up_v, out)
