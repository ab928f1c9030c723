"""Gyre: the KV path of LLM inference, on CPUs and GPUs.

Rotary embedding, compressed KV caches and attention over them. Memory of NumPy, PyTorch and anything else with
`__dlpack__` is shared, never copied. Calls record into an `Encoder`; nothing runs before `submit()`.
"""

from . import _gyre
from ._gyre import *  # noqa: F403

__version__ = _gyre.__version__  # the library's own: right without the metadata of an installed package, too

for _error in (_gyre.Error, *_gyre.Error.__subclasses__()):
    _error.__module__ = __name__  # what tracebacks show
del _error
