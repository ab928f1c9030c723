"""Hugging Face models on a Gyre cache.

    import gyre.integrations.transformers as gyre_hf

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="gyre")
    cache = gyre_hf.GyreCache(model.config, k="tq8", v="tq4")
    model.generate(**inputs, past_key_values=cache)

Importing this module registers the attention function and the mask function "gyre". The model is not
patched: it calls the cache's update(), which hands a step to the attention function where others hand
the whole history, and the attention function stores the step and attends over what is stored.
"""

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .attention import attention, attention_mask
from .cache import GyreCache
from .generation import enable

__all__ = ["GyreCache", "attention", "attention_mask", "enable"]

AttentionInterface.register("gyre", attention)
AttentionMaskInterface.register("gyre", attention_mask)
