"""What vLLM's names of backends resolve to, whenever a layer selects its backend: CUSTOM to Gyre's class for the kind of
attention that the model has, those of the CPU platform to Gyre's if the config asks for CUSTOM, and to vLLM's own otherwise."""

from __future__ import annotations

NAMES = ("CUSTOM", "CPU_ATTN", "CPU_MLA", "AMX_MLA")


def __getattr__(name: str):
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Enum

    if name not in NAMES:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if name != "CUSTOM" and (config is None or config.attention_config.backend is not Enum.CUSTOM):
        return resolve_obj_by_qualname(Enum[name].value)  # the value is vLLM's path, overrides are kept elsewhere
    model = None if config is None else config.model_config
    if name.endswith("_MLA") or (name == "CUSTOM" and model is not None and model.use_mla):
        from .mla import GyreMlaBackend

        return GyreMlaBackend
    from .backend import GyreBackend

    return GyreBackend
