"""One layer's attention, as vLLM calls it."""

from __future__ import annotations

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from gyre.calibrate.layer import LayerCalibration

from .backend import GyreMetadata, GyreMetadataBuilder, backend_of, options_of, refuse_config
from .calibration import check, load, rank_heads, refuse_means
from .config import ConfigError, Formats, cache_dtypes
from .pages import DTYPES, LayerPages, Queue, Workload, queue_of


class GyreImpl(AttentionImpl[GyreMetadata]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others,
    ):
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"gyre: attention of type {attn_type} is not supported, decoders' alone is")
        asked = [name for name, value in others.items() if value is not None and value is not False]
        if asked:
            raise NotImplementedError(f"gyre: attention with {', '.join(asked)} is not supported")
        self.config = get_current_vllm_config()
        refuse_config(self.config)
        self.options = options_of(self.config)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window  # the query's own key included
        self.soft_cap = logits_soft_cap or 0.0
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self.formats = self.options.of(None, sliding_window)
        self.layer_calibration: LayerCalibration | None = None
        self.pages: LayerPages | None = None
        self._cache = 0
        self._sinks = self._slopes = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM asks the layer's backend for its pages after this, and nothing before tells an Impl its layer."""
        layers = self.config.compilation_config.static_forward_context
        for name, layer in layers.items():
            if getattr(layer, "impl", None) is self:
                break
        else:
            raise RuntimeError("gyre: vLLM does not know the layer of this attention")
        # vLLM wraps a backend's builder for chunked local attention (Llama 4) and others; the layer's class below would
        # drop that without a word.
        if layer.attn_backend.get_builder_cls() is not GyreMetadataBuilder:
            raise NotImplementedError(f"gyre: attention as {layer.attn_backend.__name__} has it is not supported")
        if act_dtype not in DTYPES:
            raise ValueError(f"gyre: the model must be in float32, float16 or bfloat16, got {act_dtype}")
        number = extract_layer_index(self.kv_sharing_target_layer_name or name)
        self.formats = self.options.of(number, self.sliding_window)
        if self.kv_cache_dtype == "auto" and self.config.cache_config.cache_dtype in cache_dtypes():
            self.formats = Formats(DTYPES[act_dtype], DTYPES[act_dtype])  # one of --kv-cache-dtype-skip-layers
        # Refuses head sizes that a format does not have.
        self.formats.token_bytes(self.num_kv_heads, self.head_size, layer.head_size_v)
        self.layer_calibration = self._layer_calibration(number, layer.head_size_v)
        layer.attn_backend = backend_of(self.formats)
        self.pages = None

    def _layer_calibration(self, number: int, v_head_size: int) -> LayerCalibration | None:
        """What the calibration says about the heads that this rank has."""
        path, model = self.options.calibration, self.config.model_config
        if path is None:
            return None
        calibration = load(path)
        if model is not None:
            check(path, model.hf_config, model.max_model_len)
        layer_calibration = LayerCalibration.of(calibration, number, self.formats.compressed)
        if layer_calibration is None:
            return None
        refuse_means(layer_calibration, self.sinks is not None, self.soft_cap != 0)
        if (self.head_size, v_head_size) != (calibration.head_dim, calibration.head_dim):
            raise ConfigError(
                f"gyre: the calibration is for heads of {calibration.head_dim}, layer {number} has {self.head_size} and {v_head_size}"
            )
        ranks = get_tensor_model_parallel_world_size()
        first = rank_heads(calibration.kv_heads, self.num_kv_heads, get_tensor_model_parallel_rank(), ranks)
        if first + self.num_kv_heads > calibration.kv_heads:
            raise ConfigError(
                f"gyre: the calibration has {calibration.kv_heads} KV heads, rank {first // self.num_kv_heads} of {ranks} "
                f"has {self.num_kv_heads} from {first}"
            )
        return layer_calibration.heads(first, self.num_kv_heads)

    def _bind(self, layer, kv_cache: torch.Tensor) -> LayerPages:
        """Pages over the layer's cache, made once for each cache that vLLM gives the layer."""
        queue = queue_of(kv_cache.device)
        self.pages = LayerPages(
            queue,
            kv_cache,
            self.formats,
            self.num_kv_heads,
            self.head_size,
            layer.head_size_v,
            page_tokens=kv_cache.shape[2],
            layer_calibration=self.layer_calibration,
        )
        self._cache = kv_cache.data_ptr()
        if self.sinks is not None:
            self._sinks = queue.wrap(self.sinks.detach().float().contiguous())
        if self.alibi_slopes is not None:
            alibi_slopes = torch.as_tensor(self.alibi_slopes, dtype=torch.float32, device=kv_cache.device)
            self._slopes = queue.wrap(alibi_slopes.contiguous())
        return self.pages

    def _pages_of(self, layer, kv_cache: torch.Tensor) -> LayerPages:
        if self.pages is None or self._cache != kv_cache.data_ptr():
            return self._bind(layer, kv_cache)
        return self.pages

    def prepare(self, layer, queue: Queue, page_tokens: int) -> None:
        """Before the first step: kernels and scratch memory for the largest one that the scheduler may make."""
        scheduler, model, speculation = self.config.scheduler_config, self.config.model_config, self.config.speculative_config
        if not queue.cuda or model is None:
            return
        transformed = self.layer_calibration is not None and self.layer_calibration.parts[0].basis is not None
        work = Workload(
            formats=self.formats,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            v_head_dim=layer.head_size_v,
            page_tokens=page_tokens,
            window=self.sliding_window or 0,
            dtype=torch.float32 if transformed else model.dtype,
            tokens=scheduler.max_num_batched_tokens,
            sequences=scheduler.max_num_seqs,
            max_kv_length=model.max_model_len,
            drafts=0 if speculation is None else speculation.num_speculative_tokens or 0,
        )
        queue.prepare(work)

    def _profile(self, layer, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """vLLM measures the memory of a step without pages: takes what attention will take."""
        self.prepare(layer, queue_of(query.device), self.config.cache_config.block_size or 64)
        if self.layer_calibration is not None:  # PagesCalibration.enter()
            for tensor in (query, output):
                torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        return output.zero_()

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Before forward(): k and v of all tokens of the step, padding included."""
        if kv_cache.numel() == 0:  # profiling
            return
        pages = self._pages_of(layer, kv_cache)
        pages.write(key, value, pages.queue.slots(slot_mapping))

    def forward(
        self,
        layer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GyreMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("gyre: fused quantization of the output is not supported")
        if attn_metadata is None:
            return self._profile(layer, query, output)
        self._pages_of(layer, kv_cache).attend(
            query,
            output,
            attn_metadata.step,
            self.scale,
            window=self.sliding_window or 0,
            soft_cap=self.soft_cap,
            sink_logits=self._sinks,
            alibi_slopes=self._slopes,
        )
        return output
