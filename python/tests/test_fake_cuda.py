"""test_cuda.py on the stand-in for CUDA's driver that the C++ tests have: the exchange of memory, not the kernels."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("fake_cuda")
    sources, library = [ROOT / "tests" / name for name in ("cuda/fake_cuda.cpp", "cuda_host/host_kernels.cpp")], folder / "libcuda.so.1"
    includes = [f"-I{ROOT / name}" for name in ("include", "src", "tests")]
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", *includes, *sources, "-o", library], check=True)
    return folder


def test_exchange_of_device_memory(fake_driver):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(fake_driver), "XDG_CACHE_HOME": str(fake_driver)}
    tests = pathlib.Path(__file__).with_name("test_cuda.py")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tests, "-k", "not torch"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "there is no CUDA device" not in ran.stdout and " passed" in ran.stdout, ran.stdout
