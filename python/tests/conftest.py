import gc
import os

import numpy as np
import pytest

import gyre


@pytest.fixture
def encoder():
    return gyre.Encoder("cpu")


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def no_growth():
    """Calls `action` often; the process must not get larger. A leak of 64 bytes a call is found."""

    def check(action, cycles=100_000):
        for _ in range(cycles // 10):  # pools and caches fill
            action()
        before = resident_bytes()
        for _ in range(cycles):
            action()
        assert resident_bytes() - before < 32 * cycles

    return check
