"""generate() with a cache of its own."""

from __future__ import annotations

from .cache import GyreCache
from .config import refused

_DEFAULT_NEW_TOKENS = 20  # transformers'


def enable(model, **options):
    """The model attends with Gyre, and its generate() makes a GyreCache with these options where none is given. What
    has no room in the cache is refused before the first token. Returns the model.

    Its class becomes a subclass that overrides only generate().
    """
    GyreCache(model.config, **options)  # refused now, not at the first text
    model.set_attn_implementation("gyre")
    if not isinstance(model, _Enabled):
        kind = type(model)
        model.__class__ = type(kind.__name__, (_Enabled, kind), {"__module__": kind.__module__})
    model._gyre_options = options
    return model


class _Enabled:
    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        def option(name: str):
            configs = (generation_config, self.generation_config)
            given = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in given if value is not None), None)

        if option("use_cache") is not False and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = GyreCache(self.config, **self._gyre_options)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, GyreCache):
            prompt = _prompt_tokens(inputs, kwargs)
            new, limit = option("max_new_tokens"), option("max_length")
            if new is None:
                new = _DEFAULT_NEW_TOKENS if limit is None else max(0, limit - prompt)
            cache.require(prompt + max(0, new - 1))  # the last one is not stored
        return super().generate(inputs, generation_config, *args, **kwargs)


def _prompt_tokens(inputs, kwargs: dict) -> int:
    """Columns of the prompt, those that are in the cache already included."""
    given = (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    prompt = next((x for x in given if x is not None), None)
    if prompt is None:
        raise refused("generate: no prompt is given, as inputs, input_ids or inputs_embeds")
    mask = kwargs.get("attention_mask")  # covers everything where the prompt is its new tokens alone
    return max(prompt.shape[1], 0 if mask is None else mask.shape[-1])
