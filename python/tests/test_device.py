"""Devices, errors, tracing."""

import json
import os

import numpy as np
import pytest

import gyre


def test_devices_are_listed_with_reasons():
    infos = {info.name.split(":")[0]: info for info in gyre.devices()}
    assert infos["cpu"].available and infos["cpu"].compute_units > 0 and infos["cpu"].memory_bytes > 0
    for info in gyre.devices():
        assert info.available or info.reason, repr(info)


def test_a_name_alone_is_one_device_for_all():
    assert gyre.Device("cpu") == gyre.Device() == gyre.zeros((1,)).device == gyre.Encoder().device
    assert hash(gyre.Device("cpu")) == hash(gyre.Device())
    own = gyre.Device("cpu", threads=1)
    assert own != gyre.Device("cpu") and own != "cpu" and own.info.compute_units == 1
    assert own.stream == 0
    own.wait()


def test_unknown_devices_are_refused():
    for name in ("gpu", "cpu:1", ""):
        with pytest.raises(ValueError, match="device.open"):
            gyre.Device(name)
        with pytest.raises(ValueError, match="device.open"):
            gyre.zeros((1,), device=name)
    with pytest.raises(NotImplementedError) as caught:
        gyre.Device("metal")
    assert isinstance(caught.value, gyre.Error) and caught.value.code == "unsupported"


def test_memory_of_the_host_is_good_for_every_cpu_device():
    own = gyre.Device("cpu", threads=1)
    x = gyre.zeros((2, 64))
    x.numpy()[:] = 1
    encoder = gyre.Encoder(own)
    gyre.hadamard(encoder, x, x)
    encoder.submit().wait()
    assert x.numpy()[0, 0] == 8 and gyre.asarray(x, own).data_ptr == x.data_ptr
    assert gyre.asarray(x, own).device == own


def test_an_encoder_submits_at_the_end_of_its_block():
    x = np.ones((2, 64), np.float32)
    with gyre.Encoder() as encoder:
        gyre.hadamard(encoder, x, x)
        assert x[0, 0] == 1 and len(encoder) == 1
    assert x[0, 0] == 8 and len(encoder) == 0
    with pytest.raises(KeyError):
        with encoder:
            gyre.hadamard(encoder, x, x)
            raise KeyError
    assert x[0, 0] == 8 and len(encoder) == 0
    with pytest.raises(ValueError, match="encoder.submit.*no step"):
        cache = gyre.KvCache(kv_heads=1, head_dim=64, capacity=8)
        with encoder:
            cache.append(encoder, 0, np.zeros((1, 1, 64), np.float32), np.zeros((1, 1, 64), np.float32))
    encoder.clear()


def test_pool_and_trim():
    device = gyre.Device("cpu", pool_limit_bytes=1 << 20)
    tensor = gyre.zeros((1024,), device=device)
    assert device.memory().in_use_bytes >= 4096
    del tensor
    use = device.memory()
    assert use.in_use_bytes == 0 and use.cached_bytes >= 4096 and use.system_allocations == 1
    device.trim()
    assert device.memory().cached_bytes == 0


def test_errors_are_of_their_kind():
    kinds = {
        "invalid_argument": (gyre.InvalidArgument, ValueError),
        "unsupported": (gyre.Unsupported, NotImplementedError),
        "out_of_memory": (gyre.OutOfMemory, MemoryError),
        "compile_failed": (gyre.CompileFailed, RuntimeError),
        "device_lost": (gyre.DeviceLost, RuntimeError),
        "io": (gyre.IoError, OSError),
    }
    for code, (kind, also) in kinds.items():
        assert issubclass(kind, gyre.Error) and issubclass(kind, also) and kind.code == code
        assert kind.__module__ == "gyre"
    assert not issubclass(gyre.Error, ValueError)


def test_traces():
    device = gyre.Device("cpu", threads=1)
    encoder = gyre.Encoder(device)
    x = np.zeros((2, 64), np.float32)
    device.start_trace()
    gyre.hadamard(encoder, x, x)
    encoder.submit().wait()
    trace = device.stop_trace()
    assert len(trace) == 1 and trace.dropped == 0
    assert "hadamard" in trace.text() and "hadamard" in trace.table()
    assert any("hadamard" in str(event) for event in json.loads(trace.chrome())["traceEvents"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_devices_of_its_own():
    x = np.ones((64, 4, 64), np.float32)
    encoder = gyre.Encoder("cpu")
    gyre.hadamard(encoder, x, x)
    encoder.submit().wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            encoder = gyre.Encoder("cpu")
            for _ in range(3):
                gyre.hadamard(encoder, x, x)
            encoder.submit().wait()
            code = 0 if abs(x[0, 0] - 1).max() < 1e-4 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_everything_public_has_a_docstring():
    for name in dir(gyre._gyre):
        if not name.startswith("_"):
            assert getattr(gyre, name).__doc__, name
