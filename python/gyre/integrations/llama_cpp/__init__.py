"""Attention of llama-cpp-python by Gyre, over llama.cpp's own caches (docs/llama_cpp.md).

    from gyre.integrations import llama_cpp
    llama_cpp.load()
    model = Llama("model.gguf", flash_attn=True, type_k=2, type_v=2)   # long contexts are faster
"""

import ctypes
import os
from pathlib import Path

__all__ = ["library_path", "load"]

_WAYS = ("accel", "wrap")


def library_path() -> Path:
    """Where libggml-gyre.so is: GYRE_GGML_LIBRARY, or beside the package's own module."""
    named = os.environ.get("GYRE_GGML_LIBRARY")
    path = Path(named) if named else Path(__file__).resolve().parents[2] / "libggml-gyre.so"
    if not path.is_file():
        raise FileNotFoundError(f"libggml-gyre.so is not at {path}; GYRE_GGML_LIBRARY names another place")
    return path


def load(way: str = "accel", library: "ctypes.CDLL | None" = None) -> None:
    """Loads Gyre's attention into the llama.cpp of this process. Call it before you make a `Llama`.

    way: "accel", an accelerator device, the interface that ggml documents, or "wrap", which wraps the CPU device and saves the
    graph splits. library: libllama, if it is not llama-cpp-python's.

    RuntimeError: llama.cpp did not take the library. The reason is on stderr, in a line that begins with "ggml-gyre:".
    """
    if way not in _WAYS:
        raise ValueError(f"way must be one of {', '.join(_WAYS)}, got {way!r}")
    path = library_path()
    if library is None:
        import llama_cpp

        library = llama_cpp.llama_cpp._lib  # the libggml that is really in use is found through this handle
        llama_cpp.llama_backend_init()  # where backends are libraries of their own: loads the CPU's
    loader = library.ggml_backend_load
    loader.restype, loader.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    before = os.environ.get("GYRE_GGML")
    os.environ["GYRE_GGML"] = way
    try:
        loaded = loader(os.fsencode(path))
    finally:
        if before is None:
            del os.environ["GYRE_GGML"]
        else:
            os.environ["GYRE_GGML"] = before
    if not loaded:
        raise RuntimeError(f"llama.cpp did not load {path}; stderr says why")
