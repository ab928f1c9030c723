"""One layer's attention, as vLLM calls it."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import gyre
from gyre.calibrate.file import Calibration
from gyre.calibrate.layer import LayerCalibration

from .backend import GyreBackend, GyreMetadata, backend_of, options_of, refuse_config
from .calibration import check, load, rank_heads, refuse_means
from .config import ConfigError, Formats, cache_dtypes
from .pages import DTYPES, LayerPages, Queue, Workload, queue_of


class PagedLayer:
    """What layers of all kinds share: the options, the formats, and pages in vLLM's memory."""

    backend: ClassVar[type[GyreBackend]] = GyreBackend
    latent: ClassVar[bool] = False
    max_rows: ClassVar[int | None] = None  # query heads times tokens of one call
    page_tokens: int | None = None  # None: as vLLM says
    kv_sharing_target_layer_name: str | None = None
    sliding_window: int | None = None
    num_heads: int
    kv_cache_dtype: str

    def read_options(self) -> None:
        self.config = get_current_vllm_config()
        refuse_config(self.config)
        self.options = options_of(self.config)
        self.formats = self.options.of(None, self.sliding_window)
        self.dims = (0, 0, 0)  # KV heads, coordinates of K and of V
        self.layer_calibration: LayerCalibration | None = None
        self.pages: LayerPages | None = None
        self._cache = 0

    @property
    def stored(self) -> str:
        return str(self.formats)

    def dims_of(self, layer) -> tuple[int, int, int]:
        raise NotImplementedError

    def calibration_of(self, number: int) -> LayerCalibration | None:
        raise NotImplementedError

    def read_calibration(self) -> Calibration | None:
        """The file that the options name, for this model."""
        path, model = self.options.calibration, self.config.model_config
        if path is not None and model is not None:
            check(path, model.hf_config, model.max_model_len)
        return None if path is None else load(path)

    @property
    def has_transform(self) -> bool:
        return self.layer_calibration is not None and self.layer_calibration.parts[0].basis is not None

    @property
    def call_tokens(self) -> int:
        """That one call may have."""
        tokens = self.config.scheduler_config.max_num_batched_tokens
        return tokens if self.max_rows is None else min(tokens, max(self.max_rows // self.num_heads, 1))

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
        if layer.attn_backend.get_builder_cls() is not self.backend.get_builder_cls():
            raise NotImplementedError(f"gyre: attention as {layer.attn_backend.__name__} has it is not supported")
        if act_dtype not in DTYPES:
            raise ValueError(f"gyre: the model must be in float32, float16 or bfloat16, got {act_dtype}")
        number = extract_layer_index(self.kv_sharing_target_layer_name or name)
        self.formats = self.options.of(number, self.sliding_window)
        if self.kv_cache_dtype == "auto" and self.config.cache_config.cache_dtype in cache_dtypes():
            self.formats = Formats(DTYPES[act_dtype], DTYPES[act_dtype])  # one of --kv-cache-dtype-skip-layers
        self.dims = self.dims_of(layer)
        try:  # head sizes that a format does not have
            token_bytes = self.formats.token_bytes(*self.dims, latent=self.latent)
        except gyre.Error as error:
            raise ConfigError(f"gyre: layer {number}: {error}") from error
        self.layer_calibration = self.calibration_of(number)
        layer.attn_backend = backend_of(self.backend, self.formats, token_bytes, self.page_tokens)
        self.pages = None

    def bind(self, kv_cache: torch.Tensor) -> LayerPages:
        """Pages over the layer's cache, made once for each cache that vLLM gives the layer."""
        self.pages = LayerPages(
            queue_of(kv_cache.device),
            kv_cache,
            self.formats,
            *self.dims,
            page_tokens=kv_cache.shape[-2],
            layer_calibration=self.layer_calibration,
            latent=self.latent,
        )
        self._cache = kv_cache.data_ptr()
        return self.pages

    def pages_of(self, kv_cache: torch.Tensor) -> LayerPages:
        if self.pages is None or self._cache != kv_cache.data_ptr():
            return self.bind(kv_cache.view(torch.uint8))  # vLLM's MLA layer hands a cache that it does not know over as FP8
        return self.pages

    def prepare(self, queue: Queue, page_tokens: int) -> None:
        """Before the first step: kernels and scratch memory for the largest one that the scheduler may make."""
        scheduler, model, speculation = self.config.scheduler_config, self.config.model_config, self.config.speculative_config
        if not queue.cuda or model is None:
            return
        kv_heads, head_dim, v_head_dim = self.dims
        work = Workload(
            formats=self.formats,
            heads=self.num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            page_tokens=page_tokens,
            window=self.sliding_window or 0,
            dtype=torch.float32 if self.has_transform else model.dtype,
            tokens=self.call_tokens,
            sequences=scheduler.max_num_seqs,
            max_kv_length=model.max_model_len,
            drafts=0 if speculation is None else speculation.num_speculative_tokens or 0,
            latent=self.latent,
        )
        queue.prepare(work)


class GyreImpl(PagedLayer, AttentionImpl[GyreMetadata]):
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
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window  # the query's own key included
        self.soft_cap = logits_soft_cap or 0.0
        self.alibi_slopes, self.sinks = alibi_slopes, sinks
        self._sinks = self._slopes = None
        self.read_options()

    def dims_of(self, layer) -> tuple[int, int, int]:
        return self.num_kv_heads, self.head_size, layer.head_size_v

    def calibration_of(self, number: int) -> LayerCalibration | None:
        """What the calibration says about the heads that this rank has."""
        calibration = self.read_calibration()
        if calibration is None:
            return None
        layer_calibration = LayerCalibration.of(calibration, number, self.formats.compressed)
        if layer_calibration is None:
            return None
        refuse_means(layer_calibration, self.sinks is not None, self.soft_cap != 0)
        dims = self.dims[1:]
        kv_heads, *own_dims = calibration.dims[number]
        if dims != tuple(own_dims):
            raise ConfigError(
                f"gyre: the calibration is for heads of {own_dims[0]} and {own_dims[1]}, layer {number} has {dims[0]} and {dims[1]}"
            )
        ranks = get_tensor_model_parallel_world_size()
        first = rank_heads(kv_heads, self.num_kv_heads, get_tensor_model_parallel_rank(), ranks)
        if first + self.num_kv_heads > kv_heads:
            raise ConfigError(
                f"gyre: the calibration has {kv_heads} KV heads, rank {first // self.num_kv_heads} of {ranks} "
                f"has {self.num_kv_heads} from {first}"
            )
        return layer_calibration.heads(first, self.num_kv_heads)

    def bind(self, kv_cache: torch.Tensor) -> LayerPages:
        pages = super().bind(kv_cache)
        if self.sinks is not None:
            self._sinks = pages.queue.wrap(self.sinks.detach().float().contiguous())
        if self.alibi_slopes is not None:
            alibi_slopes = torch.as_tensor(self.alibi_slopes, dtype=torch.float32, device=kv_cache.device)
            self._slopes = pages.queue.wrap(alibi_slopes.contiguous())
        return pages

    def _profile(self, query: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """vLLM measures the memory of a step without pages: takes what attention will take."""
        self.prepare(queue_of(query.device), self.config.cache_config.block_size or 64)
        if self.has_transform:  # PagesCalibration.enter()
            for tensor in (query, output):
                torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        return output.zero_()

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        """Before forward(): k and v of all tokens of the step, padding included."""
        if kv_cache.numel() == 0:  # profiling
            return
        pages = self.pages_of(kv_cache)
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
            return self._profile(query, output)
        self.pages_of(kv_cache).attend(
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
