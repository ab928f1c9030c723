"""What must not happen: an abort at exit, a Ctrl-C that is not heard, an error of the wrong kind."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import gyre

# Seconds of attention in one list.
LONG = """
    import numpy as np, gyre
    device = gyre.Device("cpu", threads=THREADS)
    cache = gyre.KvCache(device, kv_heads=2, head_dim=64, capacity=8192, step_tokens=4096)
    encoder = gyre.Encoder(device)
    rng = np.random.default_rng(1)
    k = rng.standard_normal((4096, 2, 64), dtype=np.float32)
    q = rng.standard_normal((4096, 8, 64), dtype=np.float32)
    out = np.zeros_like(q)
    cache.begin_step(encoder, 4096)
    cache.append(encoder, 0, k, k)
    encoder.submit().wait()
    def record():
        for _ in range(100):
            cache.attend(encoder, 0, q, out)
"""


def run(script, **options):
    text = textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, **options
    )


def test_a_daemon_thread_inside_a_call_does_not_abort_the_exit():
    script = textwrap.dedent(LONG.replace("THREADS", "1")) + textwrap.dedent(
        """
        import threading, time
        started = threading.Event()
        def work():
            e = gyre.Encoder(device)
            a, b = np.zeros((64, 2, 64), np.float32), np.zeros((64, 2, 64), np.float32)
            while True:
                gyre.kv_copy(e, a, b)
                started.set()
                e.submit().wait()
        for _ in range(4):
            threading.Thread(target=work, daemon=True).start()
        started.wait()
        time.sleep(0.05)
        """
    )
    for _ in range(5):
        done = run(script)
        assert done.returncode == 0, done.stderr
        assert "terminate" not in done.stderr and "FATAL" not in done.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_long_list_and_the_cache_goes_on(threads):
    script = textwrap.dedent(LONG.replace("THREADS", str(threads))) + textwrap.dedent(
        """
        import os, signal, threading, time
        # Ignored where the tests run in the background of a script.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sent = []
        def interrupt():
            time.sleep(0.3)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        record()
        threading.Thread(target=interrupt).start()
        try:
            encoder.submit().wait()
            print("not interrupted")
        except KeyboardInterrupt:
            print("took", time.monotonic() - sent[0])
        encoder.clear()
        one = np.zeros((1, 8, 64), np.float32)
        cache.begin_step(encoder, 1)
        cache.append(encoder, 0, k[:1], k[:1])
        cache.attend(encoder, 0, q[:1], one)
        encoder.submit().wait()
        print("length", cache.length, "finite", bool(np.isfinite(one).all() and one.any()))
        """
    )
    done = run(script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0].startswith("took "), done.stdout
    # 100 ms are promised on a machine that does nothing else; this one may.
    assert float(lines[0].split()[1]) < 0.5
    assert lines[1] == "length 4097 finite True"


class Device:
    """An array whose protocol answers nonsense."""

    def __init__(self, array, **attributes):
        self.array = array
        for name, value in attributes.items():
            setattr(self, name, value)

    def __dlpack__(self, **_):
        return self.array.__dlpack__()


@pytest.mark.parametrize("device", [("cpu", 0), (1, "x"), (1, None), (1, 2, 3), (1 << 40, 0)])
def test_a_protocol_of_the_wrong_type_is_a_type_error(device):
    array = np.zeros((4, 2, 16), np.float32)
    source = Device(array, __dlpack_device__=lambda: device)
    encoder = gyre.Encoder("cpu")
    with pytest.raises(TypeError):
        gyre.kv_copy(encoder, source, array.copy())
    assert encoder.size == 0


def test_a_subinterpreter_is_refused():
    script = """
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        try:
            one = interpreters.create(isolated=False)
        except TypeError:
            one = interpreters.create("legacy")
        text = '''
        try:
            import gyre
            print("imported")
        except ImportError as error:
            print("refused:", error)
        '''
        import textwrap, sys
        interpreters.run_string(one, f"import sys; sys.path[:] = {sys.path!r}\\n" + textwrap.dedent(text))
        import gyre
        print(gyre.Device("cpu").name)
    """
    done = run(script)
    if "No module named" in done.stderr:
        pytest.skip("this Python has no subinterpreters")
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "subinterpreter" in done.stdout, done.stdout
    assert done.stdout.rstrip().endswith("cpu")


