"""Gyre: the KV path of LLM inference, on CPUs and GPUs.

Rotary embedding, compressed KV caches and attention over them. Memory of NumPy, PyTorch and anything else with
`__dlpack__` is shared, never copied. Calls record into an `Encoder`; nothing runs before `submit()`.
"""

from . import _gyre
from ._gyre import *  # noqa: F403
from ._gyre import __version__ as __version__

for _error in (_gyre.Error, *_gyre.Error.__subclasses__()):
    _error.__module__ = __name__  # what tracebacks show
del _error
