#!/usr/bin/env python3
"""Attention of llama.cpp's CPU backend with and without libggml-gyre.so, in one process, turn by turn (docs/llama_cpp.md).

Builds one FLASH_ATTN_EXT node in llama.cpp's own layout through ggml's C interface, computes it with a CPU backend that was made
before the library was loaded and with one that was made after, and prints medians and how far each is from double precision over the same bytes (normalised mean squared error).
`make llama` builds what it needs.
"""

import argparse
import ctypes as c
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


class Traits(c.Structure):
    TO_FLOAT = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_int64)
    _fields_ = [("name", c.c_char_p), ("block", c.c_int64), ("interleave", c.c_int64), ("size", c.c_size_t), ("quantized", c.c_bool),
                ("to_float", TO_FLOAT)]


class Ggml:
    """ggml's functions, by name, with pointers as they are."""

    SIGNATURES = {
        "ggml_init": (c.c_void_p, [InitParams]),
        "ggml_free": (None, [c.c_void_p]),
        "ggml_new_tensor_4d": (c.c_void_p, [c.c_void_p, c.c_int] + [c.c_int64] * 4),
        "ggml_permute": (c.c_void_p, [c.c_void_p, c.c_void_p] + [c.c_int] * 4),
        "ggml_flash_attn_ext": (c.c_void_p, [c.c_void_p] * 5 + [c.c_float] * 3),
        "ggml_flash_attn_ext_set_prec": (None, [c.c_void_p, c.c_int]),
        "ggml_new_graph": (c.c_void_p, [c.c_void_p]),
        "ggml_build_forward_expand": (None, [c.c_void_p, c.c_void_p]),
        "ggml_quantize_chunk": (c.c_size_t, [c.c_int, c.c_void_p, c.c_void_p] + [c.c_int64] * 3 + [c.c_void_p]),
        "ggml_nbytes": (c.c_size_t, [c.c_void_p]),
        "ggml_get_type_traits": (c.POINTER(Traits), [c.c_int]),
        "ggml_backend_load": (c.c_void_p, [c.c_char_p]),
        "ggml_backend_init_by_type": (c.c_void_p, [c.c_int, c.c_char_p]),
        "ggml_backend_alloc_ctx_tensors": (c.c_void_p, [c.c_void_p, c.c_void_p]),
        "ggml_backend_buffer_free": (None, [c.c_void_p]),
        "ggml_backend_tensor_set": (None, [c.c_void_p, c.c_void_p, c.c_size_t, c.c_size_t]),
        "ggml_backend_tensor_get": (None, [c.c_void_p, c.c_void_p, c.c_size_t, c.c_size_t]),
        "ggml_backend_graph_compute": (c.c_int, [c.c_void_p, c.c_void_p]),
        "ggml_backend_get_device": (c.c_void_p, [c.c_void_p]),
        "ggml_backend_dev_backend_reg": (c.c_void_p, [c.c_void_p]),
        "ggml_backend_reg_get_proc_address": (c.c_void_p, [c.c_void_p, c.c_char_p]),
    }

    def __init__(self, folder: Path):
        libraries = [c.CDLL(str(folder / name), mode=c.RTLD_GLOBAL) for name in ("libggml-base.so", "libggml.so")]
        for name, (result, arguments) in self.SIGNATURES.items():
            function = next(f for library in libraries if (f := getattr(library, name, None)) is not None)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        if not self.backend_load(str(folder / "libggml-cpu.so").encode()):
            raise SystemExit("libggml-cpu.so cannot be loaded")

    def cpu(self, threads: int):
        backend = self.backend_init_by_type(CPU, None)
        registry = self.backend_dev_backend_reg(self.backend_get_device(backend))
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        c.CFUNCTYPE(None, c.c_void_p, c.c_int)(address)(backend, threads)
        return backend


class Node:
    """One attention node: queries and a causal mask over the last of `cells` cells."""

    def __init__(self, ggml: Ggml, backend, shape, k_type: str, v_type: str, tokens: int, cells: int):
        self.ggml = ggml
        heads, kv_heads, dim = shape
        self.context = ggml.init(InitParams(1 << 20, None, True))
        new = lambda kind, *ne: ggml.new_tensor_4d(self.context, TYPES[kind], *ne)
        q, k, v = new("f32", dim, heads, tokens, 1), new(k_type, dim, kv_heads, cells, 1), new(v_type, dim, kv_heads, cells, 1)
        mask = new("f16", cells, tokens, 1, 1)
        turn = lambda tensor: ggml.permute(self.context, tensor, 0, 2, 1, 3)
        self.out = ggml.flash_attn_ext(self.context, turn(q), turn(k), turn(v), mask, dim**-0.5, 0.0, 0.0)
        ggml.flash_attn_ext_set_prec(self.out, 10)
        self.shape = (tokens, heads, dim)
        self.graph = ggml.new_graph(self.context)
        ggml.build_forward_expand(self.graph, self.out)
        self.buffer = ggml.backend_alloc_ctx_tensors(self.context, backend)
        random = np.random.default_rng(1)
        self.q = self.set(q, "f32", random.standard_normal((tokens * heads, dim), dtype=np.float32))
        self.k = self.set(k, k_type, random.standard_normal((cells * kv_heads, dim), dtype=np.float32))
        self.v = self.set(v, v_type, random.standard_normal((cells * kv_heads, dim), dtype=np.float32))
        self.seen = np.arange(cells)[None, :] <= cells - tokens + np.arange(tokens)[:, None]
        self.set(mask, "f16", np.where(self.seen, 0.0, -np.inf).astype(np.float32))

    def set(self, tensor, kind: str, values: np.ndarray) -> np.ndarray:
        """Returns the values as the tensor has them."""
        size = self.ggml.nbytes(tensor)
        if kind == "f32":
            data = values
        elif kind == "f16":
            data = values.astype(np.float16)
        elif kind == "bf16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            data = np.empty(size, np.uint8)
            self.ggml.quantize_chunk(TYPES[kind], values.ctypes.data, data.ctypes.data, 0, *values.shape, None)
        assert data.nbytes == size
        self.ggml.backend_tensor_set(tensor, data.ctypes.data, 0, size)
        if kind == "f32":
            return values
        held = np.empty(values.shape, np.float32)
        self.ggml.get_type_traits(TYPES[kind]).contents.to_float(data.ctypes.data, held.ctypes.data, held.size)
        return held

    def run(self, backend, clock=time.perf_counter) -> float:
        begin = clock()
        if self.ggml.backend_graph_compute(backend, self.graph) != 0:
            raise SystemExit("a graph failed")
        return clock() - begin

    def result(self) -> np.ndarray:
        values = np.empty(self.shape, np.float32)
        self.ggml.backend_tensor_get(self.out, values.ctypes.data, 0, values.nbytes)
        return values.astype(np.float64)

    def expected(self) -> np.ndarray:
        """[token][head] of the query heads of KV head 0, in double precision."""
        tokens, heads, dim = self.shape
        cells = self.seen.shape[1]
        q = self.q.astype(np.float64).reshape(tokens, heads, dim)
        k, v = (x.astype(np.float64).reshape(cells, -1, dim)[:, 0] for x in (self.k, self.v))
        group = heads * cells * dim // self.k.size
        out = np.empty((tokens, group, dim))
        for head in range(group):
            logits = np.where(self.seen, q[:, head] @ k.T * dim**-0.5, -np.inf)
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[:, head] = weights @ v / weights.sum(axis=1, keepdims=True)
        return out

    def free(self):
        self.ggml.backend_buffer_free(self.buffer)
        self.ggml.free(self.context)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", type=Path, default=ROOT / "build/llama/build/bin", help="folder of ggml's libraries")
    parser.add_argument("--library", type=Path, default=ROOT / "build/release/integrations/ggml/libggml-gyre.so")
    parser.add_argument("--shape", default="32/8/128", help="query heads / KV heads / head dim")
    parser.add_argument("--types", default="f16,bf16,q8_0,q4_0,q5_1,q8_0/q4_0", help="of K and V, or K/V")
    parser.add_argument("--sizes", default="1x16384,512x4096", help="tokens x cells, the tokens' own among them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread; for machines that others use, too")
    parser.add_argument("--seconds", type=float, default=6, help="for each row")
    options = parser.parse_args()

    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time counts one thread: --threads 1")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    ggml = Ggml(options.ggml)
    stock = ggml.cpu(options.threads)
    os.environ["GYRE_GGML"] = "wrap"
    if not ggml.backend_load(str(options.library).encode()):
        raise SystemExit(f"{options.library} cannot be loaded")
    gyre = ggml.cpu(options.threads)
    print(f"{options.shape}, {options.threads} threads, medians in milliseconds")
    print(f"{'tokens':>7} {'cells':>6} {'K':>5} {'V':>5} {'ggml':>9} {'gyre':>9} {'times':>6} {'NMSE':>8} {'gyre':>8}")
    for size in options.sizes.split(","):
        tokens, cells = map(int, size.split("x"))
        for kind in options.types.split(","):
            k_type, v_type = (kind.split("/") * 2)[:2]
            node = Node(ggml, stock, tuple(map(int, options.shape.split("/"))), k_type, v_type, tokens, cells)
            expected, errors = node.expected(), []
            for backend in (stock, gyre):
                node.run(backend)
                error = node.result()[:, : expected.shape[1]] - expected
                errors.append(np.sum(error**2) / np.sum(expected**2))
            times = {stock: [], gyre: []}
            end = time.perf_counter() + options.seconds
            while time.perf_counter() < end or len(times[gyre]) < 3:
                for backend in (stock, gyre):
                    times[backend].append(node.run(backend, clock))
            before, after = (statistics.median(times[backend]) * 1e3 for backend in (stock, gyre))
            print(f"{tokens:7} {cells:6} {k_type:>5} {v_type:>5} {before:9.2f} {after:9.2f} {before / after:6.2f} {errors[0]:8.1e} {errors[1]:8.1e}", flush=True)
            node.free()


if __name__ == "__main__":
    sys.exit(main())
