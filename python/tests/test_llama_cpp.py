"""The call that loads libggml-gyre.so into llama-cpp-python; llama.cpp is not needed."""

import ctypes

import pytest

from gyre.integrations import llama_cpp


class Loader:
    """Stands in for libllama."""

    def __init__(self, result):
        self.result, self.paths, self.way = result, [], None

        def load(path):
            import os

            self.paths.append(path)
            self.way = os.environ.get("GYRE_GGML")
            return self.result

        self.ggml_backend_load = load


@pytest.fixture
def library(tmp_path, monkeypatch):
    path = tmp_path / "libggml-gyre.so"
    path.touch()
    monkeypatch.setenv("GYRE_GGML_LIBRARY", str(path))
    monkeypatch.delenv("GYRE_GGML", raising=False)
    return path


def test_load_passes_path_and_way(library, monkeypatch):
    import os

    for way in ("accel", "wrap"):
        loader = Loader(1)
        llama_cpp.load(way, library=loader)
        assert loader.paths == [os.fsencode(library)] and loader.way == way
    assert "GYRE_GGML" not in os.environ
    monkeypatch.setenv("GYRE_GGML", "off")
    llama_cpp.load(library=Loader(1))
    assert os.environ["GYRE_GGML"] == "off"


def test_refusals_are_named(library, monkeypatch):
    with pytest.raises(ValueError, match="accel, wrap, got 'hook'"):
        llama_cpp.load("hook", library=Loader(1))
    with pytest.raises(RuntimeError, match="did not load"):
        llama_cpp.load(library=Loader(None))
    monkeypatch.setenv("GYRE_GGML_LIBRARY", str(library) + ".missing")
    with pytest.raises(FileNotFoundError, match="missing"):
        llama_cpp.load(library=Loader(1))


def test_the_package_has_the_library_and_ggml_alone_can_use_it(monkeypatch):
    monkeypatch.delenv("GYRE_GGML_LIBRARY", raising=False)
    try:
        path = llama_cpp.library_path()
    except FileNotFoundError:
        pytest.skip("built without libggml-gyre.so")
    entry = ctypes.CDLL(str(path)).ggml_backend_init
    entry.restype = ctypes.c_void_p
    assert entry() is None  # whoever calls is no ggml: it stands aside
