"""What the names of the CPU platform's backends resolve to, whenever a layer selects its backend: Gyre's class if the
config asks for CUSTOM, vLLM's own otherwise."""

from __future__ import annotations


def __getattr__(name: str):
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Enum

    if name not in ("CPU_ATTN", "CPU_MLA", "AMX_MLA"):
        raise AttributeError(name)
    if get_current_vllm_config().attention_config.backend is not Enum.CUSTOM:
        return resolve_obj_by_qualname(Enum[name].value)  # the value is vLLM's path, overrides are kept elsewhere
    if name != "CPU_ATTN":
        raise NotImplementedError("gyre: --attention-backend CUSTOM was asked for, and MLA is not supported")
    from .backend import GyreBackend

    return GyreBackend
