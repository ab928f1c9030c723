"""decode_loop.c from Python, with nothing but ctypes and the shared library.

usage: decode_loop.py <libgyre.so>
"""

import ctypes
import sys
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_uint64, c_void_p, sizeof

LAYERS, HEADS, KV_HEADS, DIM, PROMPT, STEPS = 2, 8, 2, 64, 100, 20
F32, KV_F16 = 1, 2

gyre = ctypes.CDLL(sys.argv[1])
gyre.gyre_version.restype = gyre.gyre_last_error.restype = ctypes.c_char_p


def call(name, *arguments):
    """Calls gyre_<name>; what is refused becomes an exception."""
    if getattr(gyre, "gyre_" + name)(*arguments):
        raise RuntimeError(gyre.gyre_last_error().decode())


class Sized(Structure):
    """A struct that begins with its own size; what is not named is 0."""

    def __init__(self, **fields):
        super().__init__(size=sizeof(type(self)), **fields)


class KvLayer(Sized):
    _fields_ = [("size", c_uint64), ("k", c_int32), ("v", c_int32)] + [
        (name, c_uint64) for name in ("window", "tail", "sink_tokens")
    ]


class KvCacheOptions(Sized):
    _fields_ = (
        [(name, c_uint64) for name in ("size", "kv_heads", "head_dim", "v_head_dim", "capacity")]
        + [("layers", POINTER(KvLayer))]
        + [(name, c_uint64) for name in ("layer_count", "step_tokens")]
    )


class RopeAppendInputs(Sized):
    # The fields after `v` are left away: a struct of an older version is fine.
    _fields_ = [("size", c_uint64)] + [(name, c_void_p) for name in ("q", "q_out", "k", "v")]


class AttendInputs(Sized):
    _fields_ = [("size", c_uint64), ("q", c_void_p), ("out", c_void_p)]


class Handle(c_void_p):
    """A handle that destroys itself."""

    def __init__(self, kind, make, *arguments):
        super().__init__()
        self.kind = kind
        call(make, *arguments, byref(self))

    def __del__(self):
        getattr(gyre, f"gyre_{self.kind}_destroy")(self)


class Step:
    def __init__(self, device, tokens):
        self.q, self.k, self.v, self.out = (
            Handle("tensor", "tensor_create", device, F32, 3, (c_uint64 * 3)(tokens, heads, DIM))
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )

    def fill(self, first, tokens):
        """Stands in for a model: value i is i everywhere; queries and keys are 0."""
        row = KV_HEADS * DIM
        numbers = (c_float * (tokens * row))(*(first + i // row for i in range(tokens * row)))
        call("tensor_write", self.v, numbers, c_uint64(sizeof(numbers)))

    def record(self, cache, encoder):
        append = RopeAppendInputs(q=self.q, q_out=self.q, k=self.k, v=self.v)
        attend = AttendInputs(q=self.q, out=self.out)
        for layer in range(LAYERS):
            call("kv_cache_rope_append", cache, encoder, c_uint64(layer), byref(append), None)
            call("kv_cache_attend", cache, encoder, c_uint64(layer), byref(attend), None)


def main():
    device = Handle("device", "device_open", b"cpu", None)
    encoder = Handle("encoder", "encoder_create", device)
    layers = (KvLayer * LAYERS)(*(KvLayer(v=KV_F16) for _ in range(LAYERS)))
    options = KvCacheOptions(
        kv_heads=KV_HEADS, head_dim=DIM, capacity=256, layers=layers, layer_count=LAYERS
    )
    cache = Handle("kv_cache", "kv_cache_create", device, byref(options))

    prompt, step = Step(device, PROMPT), Step(device, 1)
    prompt.fill(0, PROMPT)
    call("kv_cache_begin_step", cache, encoder, c_uint64(PROMPT))
    prompt.record(cache, encoder)
    call("encoder_submit", encoder, None)

    step.record(cache, encoder)
    graph = Handle("graph", "encoder_instantiate", encoder)
    for token in range(PROMPT, PROMPT + STEPS):
        step.fill(token, 1)
        call("kv_cache_begin_step", cache, encoder, c_uint64(1))
        call("encoder_submit", encoder, None)
        call("graph_replay", graph, None)
        call("device_wait", device)

    out, length = (c_float * (HEADS * DIM))(), c_uint64()
    call("kv_cache_length", cache, byref(length))
    call("tensor_read", step.out, out, c_uint64(sizeof(out)))
    version = gyre.gyre_version().decode()
    print(f"Gyre {version}: {length.value} tokens, their mean is {out[0]:.1f}")


main()
