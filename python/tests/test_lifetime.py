"""Objects may go in any order, on any thread, and nothing is left behind."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

import gyre


def run_python(code, **environment):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    usual = {name: value for name, value in os.environ.items() if name != "GYRE_LEAK_WARNINGS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**usual, **environment})


class Watched(np.ndarray):
    """An array that weak references can follow."""


def watched(*shape):
    array = np.ones(shape, np.float32).view(Watched)
    return array, weakref.ref(array)


def alive(reference):
    gc.collect()
    return reference() is not None


def test_recorded_work_holds_its_arrays(encoder):
    x, x_alive = watched(2, 64)
    out, out_alive = watched(2, 64)
    gyre.hadamard(encoder, x, out)
    del x, out
    assert alive(x_alive) and alive(out_alive)
    encoder.submit().wait()
    assert not alive(x_alive) and not alive(out_alive)


def test_dropped_work_lets_go_of_its_arrays(encoder):
    x, x_alive = watched(2, 64)
    gyre.hadamard(encoder, x, x)
    del x
    assert alive(x_alive)
    encoder.clear()
    assert not alive(x_alive)
    own = gyre.Encoder("cpu")
    x, x_alive = watched(2, 64)
    gyre.hadamard(own, x, x)
    del x, own
    assert not alive(x_alive)


def test_a_refused_op_lets_go_of_its_arrays(encoder):
    x, x_alive = watched(2, 64)
    with pytest.raises(gyre.Error):
        gyre.hadamard(encoder, x, np.zeros((3, 64), np.float32))
    del x
    assert not alive(x_alive)


def test_a_graph_holds_its_arrays():
    encoder = gyre.Encoder("cpu")
    x, x_alive = watched(2, 64)
    out = np.zeros((2, 64), np.float32)
    gyre.hadamard(encoder, x, out)
    graph = encoder.instantiate()
    del x, encoder
    assert alive(x_alive)
    graph.replay().wait()
    assert out[0, 0] == 8
    del graph
    assert not alive(x_alive)


NAMES = ["device", "encoder", "graph", "cache", "tensor", "array", "view", "fence"]


@pytest.mark.parametrize("seed", range(8))
def test_everything_may_go_in_any_order(seed):
    device = gyre.Device("cpu", threads=2)
    encoder = gyre.Encoder(device)
    cache = gyre.KvCache(device, kv_heads=1, head_dim=64, capacity=8)
    tensor = gyre.zeros((1, 1, 64), device=device)
    cache.begin_step(encoder, 1)
    fence = encoder.submit()
    cache.append(encoder, 0, tensor, tensor)
    cache.attend(encoder, 0, tensor, gyre.zeros((1, 1, 64), device=device))
    objects = {
        "device": device,
        "encoder": encoder,
        "cache": cache,
        "tensor": tensor,
        "array": tensor.numpy(),
        "view": gyre.from_dlpack(tensor, device)[0],
        "fence": fence,
        "graph": encoder.instantiate(),
    }
    del device, encoder, cache, tensor, fence
    for name in np.random.default_rng(seed).permutation(NAMES):
        del objects[name]
        gc.collect()
        if "graph" in objects:
            objects["graph"].replay().wait()
        for held in ("array", "view"):
            if held in objects:
                assert np.isfinite(np.asarray(objects[held])).all()


def test_the_last_holder_may_be_a_thread_without_the_gil():
    """submit() lets go of the GIL, and of the arrays after the work."""
    device = gyre.Device("cpu", threads=2)
    references = []

    def work():
        encoder = gyre.Encoder(device)
        for _ in range(50):
            x, x_alive = watched(4, 64)
            references.append(x_alive)
            gyre.hadamard(encoder, x, x)
            del x
            encoder.submit().wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(references) == 200 and not any(one() is not None for one in references)


def test_waiting_lets_other_threads_run():
    """One list of many rows takes a while; meanwhile this process's other threads must count on."""
    encoder = gyre.Encoder(gyre.Device("cpu", threads=1))
    x = np.ones((1 << 15, 512), np.float32)
    for _ in range(8):
        gyre.hadamard(encoder, x, x)
    submitted = threading.Event()

    def submit():
        submitted.set()
        encoder.submit().wait()
        nonlocal done
        done = time.perf_counter()

    done = 0.0
    thread = threading.Thread(target=submit)
    thread.start()
    submitted.wait()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
    thread.join()
    assert sum(tick < done for tick in ticks) > 100


def test_an_encoder_refuses_a_second_thread():
    device = gyre.Device("cpu", threads=1)
    encoder = gyre.Encoder(device)
    x = np.ones((1 << 15, 512), np.float32)
    for _ in range(8):
        gyre.hadamard(encoder, x, x)
    thread = threading.Thread(target=lambda: encoder.submit().wait())
    thread.start()
    time.sleep(0.01)  # the thread is inside by now, and for much longer
    refusals = 0
    while thread.is_alive():
        try:
            encoder.size
        except gyre.Error as error:
            assert "another thread" in str(error)
            refusals += 1
    thread.join()
    assert refusals > 0 and encoder.size == 0


def test_a_cache_refuses_a_second_thread(tmp_path):
    cache = gyre.KvCache("cpu", kv_heads=8, head_dim=128, capacity=1 << 13, layers=[gyre.KvLayer("f32", "f32")] * 2)
    encoder = gyre.Encoder("cpu")
    k = np.ones((512, 8, 128), np.float32)
    for _ in range(16):
        cache.begin_step(encoder, 512)
        for layer in range(2):
            cache.append(encoder, layer, k, k)
    encoder.submit().wait()
    path = tmp_path / "cache"
    thread = threading.Thread(target=lambda: cache.save(path))
    thread.start()
    time.sleep(0.01)
    refusals = 0
    while thread.is_alive():
        try:
            cache.length
        except gyre.Error as error:
            assert "another thread" in str(error)
            refusals += 1
    thread.join()
    assert refusals > 0 and cache.length == 1 << 13
    assert gyre.inspect_snapshot(path).length == 1 << 13
    path.unlink()  # 128 MiB that pytest would keep


def test_threads_share_a_device():
    device = gyre.Device("cpu", threads=2)
    wrong = []

    def work(value):
        encoder = gyre.Encoder(device)
        x, out = np.full((4, 64), value, np.float32), np.zeros((4, 64), np.float32)
        for _ in range(100):
            gyre.hadamard(encoder, x, out)
            encoder.submit().wait()
            if abs(out[0, 0] - 8 * value) > 1e-4 * value:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_end_of_the_process_is_quiet():
    """Objects that live until the interpreter ends, in modules and in cycles, bring no message and no crash."""
    code = """
        import numpy as np, gyre
        x = np.ones((2, 64), np.float32)
        t, e = gyre.from_numpy(x), gyre.Encoder("cpu")
        gyre.hadamard(e, t, t)
        c = gyre.KvCache("cpu", kv_heads=1, head_dim=64, capacity=8)
        own = gyre.Device("cpu", threads=2)
        class Node: pass
        n = Node(); n.self = n; n.held = [gyre.zeros((2,), device=own), own, e, t.__dlpack__(), t.numpy()]
    """
    ended = run_python(code, GYRE_LEAK_WARNINGS="1")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "leak" not in ended.stderr and "rror" not in ended.stderr, ended.stderr


def test_what_others_hold_at_the_end_is_not_reported():
    """A server ends while its threads still hold modules. nanobind's report is there for those who ask."""
    code = """
        import ctypes, gyre
        held = gyre.Encoder("cpu")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    """
    ended = run_python(code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert "leaked" in run_python(code, GYRE_LEAK_WARNINGS="1").stderr


def test_no_growth_of_encoders_graphs_and_fences(no_growth):
    x = np.ones((1, 64), np.float32)

    def cycle():
        encoder = gyre.Encoder("cpu")
        gyre.hadamard(encoder, x, x)
        encoder.submit().wait()
        gyre.hadamard(encoder, x, x)
        encoder.instantiate().replay()

    no_growth(cycle)


def test_no_growth_of_caches(no_growth):
    encoder = gyre.Encoder("cpu")
    k, out = np.ones((1, 1, 64), np.float32), np.ones((1, 1, 64), np.float32)

    def cycle():
        cache = gyre.KvCache("cpu", kv_heads=1, head_dim=64, capacity=8)
        cache.begin_step(encoder, 1)
        cache.append(encoder, 0, k, k)
        cache.attend(encoder, 0, k, out)
        encoder.submit().wait()

    no_growth(cycle, cycles=20_000)
