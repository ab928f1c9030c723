"""The classes that vLLM asks a backend for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import vllm
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .calibration import with_budget
from .config import Formats, Options, cache_dtypes, parse
from .pages import Step, queue_of

_VERSIONS = ("0.32", "0.33")
if not vllm.__version__.startswith(tuple(f"{version}." for version in _VERSIONS)):
    raise ImportError(f"gyre: the plugin is for vLLM {', '.join(_VERSIONS)}, this is {vllm.__version__}")

_log = init_logger("vllm.gyre")  # vLLM's handlers are on "vllm"
_MAX_PAGE_TOKENS = 1024


class GyreBackend(AttentionBackend):
    """Pages are opaque bytes. A layer's class is a subclass that knows the layer's bytes per token (`backend_of`)."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *cache_dtypes()]
    token_bytes: ClassVar[int | None] = None  # what one token takes in a layer: K and V of all heads, or latent and rotary part
    page_tokens: ClassVar[int | None] = None  # None: as vLLM says

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks it up among its own names

    @staticmethod
    def get_impl_cls():
        from .layer import GyreImpl

        return GyreImpl

    @staticmethod
    def get_builder_cls():
        return GyreMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(8)]  # V's tiles have 8 tokens

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, 64)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Called again on its own result, and for windows with one token."""
        if spec.state_content_bytes is not None:
            return spec
        if cls.token_bytes is None:
            raise RuntimeError("gyre: vLLM asked for a layer's pages before its weights were loaded")
        if spec.block_size > 1 and (spec.block_size % 8 != 0 or spec.block_size > _MAX_PAGE_TOKENS):
            raise ValueError(
                f"gyre: --block-size must be a multiple of 8, at most {_MAX_PAGE_TOKENS}, got {spec.block_size}"
            )
        spec = replace(spec, dtype=torch.uint8, num_head_slots=1, state_content_bytes=cls.token_bytes)
        return spec if cls.page_tokens is None else replace(spec, block_size=cls.page_tokens)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True  # a row's bits depend on its own request alone

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@functools.cache
def backend_of(
    base: type[GyreBackend], formats: Formats, token_bytes: int, page_tokens: int | None = None
) -> type[GyreBackend]:
    """The backend of layers with these formats: customize_spec is told neither the layer nor the config."""
    name = f"{base.__name__}_{formats.k}_{formats.v}"
    own = {"token_bytes": token_bytes, "page_tokens": page_tokens, "__module__": base.__module__}
    return type(name, (base,), own)


def options_of(config: VllmConfig) -> Options:
    return with_budget(parse(config.additional_config, config.cache_config.cache_dtype))


def refuse_config(config: VllmConfig) -> None:
    """What the CPU platform does not ask a backend about."""
    if config.kv_transfer_config is not None:
        raise NotImplementedError("gyre: KV connectors are not supported")
    for phase in ("decode", "prefill"):
        if getattr(config.parallel_config, f"{phase}_context_parallel_size") > 1:
            raise NotImplementedError(f"gyre: {phase} context parallelism is not supported")
    dtype = config.cache_config.cache_dtype
    if dtype not in GyreBackend.supported_kv_cache_dtypes:
        raise ValueError(
            f"gyre: --kv-cache-dtype {dtype} was asked for with --attention-backend CUSTOM; say the format in "
            '--additional-config \'{"gyre": {"k": "tq8", "v": "tq4"}}\' instead'
        )


@dataclass
class GyreMetadata(AttentionMetadata):
    step: Step


class GyreMetadataBuilder(AttentionMetadataBuilder[GyreMetadata]):
    # Lengths and tables are read from device memory, bounds come from the host: one graph serves all batches with as
    # many queries in each request.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.queue = queue_of(torch.device(device))
        self.prompts: Prompts | None = None
        if self.queue.cuda:
            graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
            self.prompts = Prompts(max(vllm_config.scheduler_config.max_num_seqs, graphs), device)
        layers = vllm_config.compilation_config.static_forward_context
        for name in layer_names:
            if name in layers:
                layers[name].impl.prepare(self.queue, kv_cache_spec.block_size)
        self._announce()

    def _announce(self) -> None:
        spec, layers = self.kv_cache_spec, self.vllm_config.compilation_config.static_forward_context
        blocks = self.vllm_config.cache_config.num_gpu_blocks or 0
        formats = dict.fromkeys(layers[name].impl.stored for name in self.layer_names if name in layers)
        _log.info(
            "Gyre's attention on %s: %s; %d layers, pages of %d tokens and %d bytes, %d pages, %d tokens",
            self.queue.device.name,
            " / ".join(formats),
            len(self.layer_names),
            spec.block_size,
            spec.page_size_bytes,
            blocks,
            blocks * spec.block_size,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GyreMetadata:
        return self._build(common_attn_metadata, self._prompts(common_attn_metadata))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> GyreMetadata:
        """vLLM also replays a graph for decoding with the last token of a prompt, if that is alone in its chunk. The kernel for
        prompts is in the graph only where vLLM keeps all other bits, too: with nothing to do it takes 4 us a layer."""
        takes_prompts = self.prompts is not None and envs.VLLM_BATCH_INVARIANT
        prompts = self.prompts.none(common_attn_metadata.num_reqs) if takes_prompts else None
        return self._build(common_attn_metadata, prompts)

    def _build(self, c: CommonAttentionMetadata, is_prefill: torch.Tensor | None) -> GyreMetadata:
        self._refuse(c)
        step = self.queue.step(
            slots=c.slot_mapping,
            table=c.block_table_tensor,
            kv_lengths=c.seq_lens,
            cu_seqlens_q=c.query_start_loc,
            is_prefill=is_prefill,
            max_query_length=c.max_query_len,
            min_query_length=_shortest(c),
            max_kv_length=self._longest(c),
        )
        return GyreMetadata(step)

    def _refuse(self, c: CommonAttentionMetadata) -> None:
        if c.causal is not True:
            raise NotImplementedError("gyre: attention must be causal")
        if c.mm_req_doc_ranges or c.rswa_prefix_lens is not None:
            raise NotImplementedError("gyre: bidirectional ranges of images and R-SWA are not supported")

    def _longest(self, c: CommonAttentionMetadata) -> int:
        """Keys that a request has at most."""
        return min(c.max_seq_len, c.block_table_tensor.shape[1] * self.kv_cache_spec.block_size)

    def _prompts(self, c: CommonAttentionMetadata) -> torch.Tensor | None:
        """Which requests are in their prompt: its bits do not depend on how it is cut. None while all decode."""
        flags = c.is_prefilling
        has_prompts = flags is not None and bool(flags.any())
        if self.prompts is None:
            return flags if has_prompts else None
        if has_prompts:
            return self.prompts.of(flags, c.num_reqs)
        self.prompts.none(c.num_reqs)  # for a graph that is replayed
        return None


class Prompts:
    """Flags of a step's requests at one address, which captured graphs read."""

    def __init__(self, requests: int, device):
        self.flags = torch.zeros(requests, dtype=torch.uint8, device=device)
        self.are_set = False

    def of(self, flags: torch.Tensor, requests: int) -> torch.Tensor:
        """`flags` may leave out requests that are padding."""
        self.none(requests)
        self.flags[: flags.shape[0]].copy_(flags.view(torch.uint8), non_blocking=True)
        self.are_set = True
        return self.flags[:requests]

    def none(self, requests: int) -> torch.Tensor:
        if self.are_set:
            self.flags.zero_()
            self.are_set = False
        return self.flags[:requests]


def _shortest(c: CommonAttentionMetadata) -> int:
    """Queries that every request has at least; requests that are padding have none."""
    if c.max_query_len <= 1:
        return 1
    queries = c.query_start_loc_cpu[1 : c.num_reqs + 1] - c.query_start_loc_cpu[: c.num_reqs]
    queries = queries[queries > 0]
    return int(queries.min()) if len(queries) else 1
