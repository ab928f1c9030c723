#!/usr/bin/env python3
"""vLLM for a machine with a Hopper GPU, Python 3.12, torch from 2.11 on and no network, in an archive of some 12 MB, from PyPI.

    make_bundle.py FOLDER [--vllm 0.33.0] [--wheel FILE]         needs pip and readelf; nothing of vLLM is executed

writes FOLDER/vllm-VERSION.tar.xz and, once, FOLDER/packages.tar.xz with the packages that vLLM imports. vLLM's extensions
are built for torch's stable ABI of 2.11 (TORCH_TARGET_VERSION in its CMakeLists.txt), so they load with any newer torch.
What makes them large is machine code for seven GPUs and all head sizes: this keeps that of sm_90 and of heads of 128, and turns
the rest into zeros behind a header that no GPU matches. Left out: FlashAttention 2 and 4, MoE, DeepGEMM, FlashMLA, the
Rust front end.
"""

import argparse
import io
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from urllib.parse import urljoin

HEADS = ("hdim128_",)  # of FlashAttention 3's kernels
LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
# What vLLM imports for an offline engine. The machine has torch, triton, transformers, NumPy and what those bring.
PACKAGES = """annotated-doc==0.0.6 annotated-types==0.8.0 anyio==4.16.0 cachetools==8.0.0 cbor2==6.2.1 click==8.5.1 cloudpickle==3.1.2
compressed-tensors==0.17.0 distro==1.9.0 einops==0.8.2 fastapi==0.136.3 h11==0.16.0 httpcore==1.0.9 httpcore2==2.16.0 httpx==0.28.1
httpx2==2.16.0 idna==3.20 jiter==0.19.0 jmespath==1.1.0 loguru==0.7.3 msgspec==0.22.0 openai==3.49.0 opentelemetry-api==1.45.2
opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 opentelemetry-semantic-conventions-ai==0.5.1 packaging==26.3
partial-json-parser==0.2.1.1.post7 prometheus_client==0.26.0 py-cpuinfo==9.0.0 pybase64==1.5.1 pydantic==2.14.3 pydantic_core==2.50.4
pydantic-extra-types==2.11.1 python-json-logger==4.2.0 python-multipart==0.0.33 pyzmq==27.3.0 setproctitle==1.3.8 sniffio==1.3.1
starlette==1.10.0 truststore==0.10.5 typing-inspection==0.4.5 typing_extensions==4.16.0 orjson""".split()
# Imported, large, and of no use to an offline engine without grammars: empty modules where the machine has none.
EMPTY = "aiohttp uvloop xgrammar tvm_ffi llguidance openai_harmony lmformatenforcer outlines_core blake3 ijson lark".split()
# Translation units of vLLM's own extension whose kernels are kept.
UNITS = """activation_kernels layernorm_kernels layernorm_quant_kernels cache_kernels cache_kernels_fused pos_encoding_kernels sampler topk
common scaled_quant per_token_group_quant fused_layernorm_dynamic_per_token_quant merge_attn_states cuda_view cuda_utils_kernels
vocab_parallel_embedding_kernels fused_qknorm_rope_kernel cooperative_topk hadamard_transform_cuda gemm_kernels custom_all_reduce""".split()
SITE = '''"""In every process: empty modules of the names that vLLM imports and this machine does not have."""

import importlib.abc
import importlib.machinery
import sys
import types

EMPTY = {names}


class Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Thing,), {{}})


class Thing(metaclass=Meta):
    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Meta(name, (Thing,), {{}})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EMPTY:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())  # the last: what the machine has comes first
'''


class Remote(io.RawIOBase):
    """A file behind HTTP of which parts are read: a wheel's directory and the members that are wanted."""

    def __init__(self, url):
        self.url, self.at = url, 0
        self.size = int(self._get("0-0").headers["Content-Range"].split("/")[1])

    def _get(self, span):
        return urllib.request.urlopen(urllib.request.Request(self.url, headers={"Range": f"bytes={span}"}))

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer):
        end = min(self.at + len(buffer), self.size)
        if end <= self.at:
            return 0
        data = self._get(f"{self.at}-{end - 1}").read()
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def remote_wheel(name, pattern):
    from pip._internal.models.index import PyPI  # the index that pip uses

    request = urllib.request.Request(f"{PyPI.simple_url}/{name}/", headers={"Accept": "text/html"})
    page = urllib.request.urlopen(request).read().decode()
    for href, file in re.findall(r'<a[^>]*href="([^"]+)"[^>]*>\s*([^<]+?)\s*</a>', page):
        if re.fullmatch(pattern, file):
            return zipfile.ZipFile(io.BufferedReader(Remote(urljoin(request.full_url, href.split("#")[0])), 4 << 20))
    raise SystemExit(f"make_bundle: PyPI has no {pattern}")


def sections(path):
    text = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\]\s+(\.\S+)\s+\S+\s+(\w+)\s+(\w+)\s+(\w+)", text)
    return {name: tuple(int(x, 16) for x in numbers) for name, *numbers in found}


def device_units(path):
    """The translation unit of each fatbin, by its address."""
    text = subprocess.run(["readelf", "-sW", path], capture_output=True, text=True, check=True).stdout
    units, file = {}, None
    for line in text.splitlines():
        part = line.split()
        if len(part) < 8:
            continue
        if part[3] == "FILE":
            file = re.sub(r"^tmpxft_[0-9a-f]+_[0-9a-f]+-\d+_|(\.compute_\w+)?\.cudafe1\.cpp$", "", part[7])
        elif "fatbinData" in part[7]:
            units[int(part[1], 16)] = file
    return units


def prune(path, keep):
    """Zeroes the device code that keep(unit, kind, arch) does not want. kind: 1 PTX, 2 machine code."""
    data, where, units = bytearray(path.read_bytes()), sections(path), device_units(path)
    address, offset, size = where[".nv_fatbin"]
    at, kept, units_kept = offset, 0, set()
    while at + 16 <= offset + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        unit, entry, end = units.get(address + at - offset, "?"), at + header, at + header + length
        while entry + 64 <= end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            if keep(unit, kind, arch):
                kept += entry_size
                units_kept.add(unit)
            else:
                struct.pack_into("<I", data, entry + 28, 121)  # an architecture that no Hopper GPU takes
                data[entry + entry_header : entry + entry_header + entry_size] = bytes(entry_size)
            entry += entry_header + entry_size
        at = end
    for name in (".symtab", ".strtab"):  # the loader reads neither
        _, start, length = where[name]
        data[start : start + length] = bytes(length)
    path.write_bytes(data)
    print(f"{path.name}: {kept / 1e6:.1f} of {size / 1e6:.1f} MB of device code, {len(units_kept)} of {len(units)} units")


def unpack(archive, out, want):
    for item in sorted(archive.infolist(), key=lambda i: i.header_offset):
        if want(item.filename) and not item.is_dir():
            path = out / item.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(item) as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target, 8 << 20)


def is_python_part(name):
    if name.startswith("vllm-"):
        return name.endswith(("METADATA", "entry_points.txt", "WHEEL"))
    left_out = ("third_party/deep_gemm/", "third_party/fmha_sm100/", "third_party/tml_fa4/", "third_party/triton_kernels/", "vllm_flash_attn/cute/")
    return name.endswith((".py", ".jinja")) and not any(part in name for part in left_out) and "vllm/benchmarks/" not in name


def is_wanted(name):
    parts = ("/tests/", ".data/", "/licenses/")
    return not any(part in name for part in parts) and not name.endswith((".pyi", ".c", ".pyx", ".pxd", ".h", "RECORD"))


def keeps_own(unit, kind, arch):
    return kind == 2 and arch == 90 and unit in UNITS


def keeps_flash(unit, kind, arch):
    if "hdim" not in unit:
        return True
    return "softcap" not in unit and "fp16" not in unit and any(f"fwd_{heads}" in unit for heads in HEADS)


def add_vllm(root, version, wheel):
    archive = zipfile.ZipFile(wheel) if wheel else remote_wheel("vllm", rf"vllm-{re.escape(version)}-.*x86_64\.whl")
    unpack(archive, root, lambda name: name in LIBRARIES or is_python_part(name))
    prune(root / LIBRARIES[0], keeps_own)
    prune(root / LIBRARIES[1], keeps_flash)


def add_packages(root):
    tags = [x for minor in (17, 24, 26, 27, 28, 31, 34, 35, 39) for x in ("--platform", f"manylinux_2_{minor}_x86_64")]
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", cache]
        command += ["--platform", "manylinux2014_x86_64", *tags, "--python-version", "3.12", "--implementation", "cp"]
        subprocess.run([*command, *PACKAGES], check=True)
        for name in sorted(os.listdir(cache)):
            if "x86_64" not in name and not name.endswith("none-any.whl"):
                raise SystemExit(f"make_bundle: {name} is for another machine")
            unpack(zipfile.ZipFile(f"{cache}/{name}"), root, is_wanted)
    (root / "sitecustomize.py").write_text(SITE.format(names=EMPTY))


def pack(root, out):
    with tarfile.open(out, "w:xz", preset=7) as tar:
        tar.add(root, arcname=root.name)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--vllm", default="0.33.0")
    parser.add_argument("--wheel", help="of that version, if it is here")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        vllm, packages = pathlib.Path(folder) / f"vllm-{arguments.vllm}", pathlib.Path(folder) / "packages"
        add_vllm(vllm, arguments.vllm, arguments.wheel)
        pack(vllm, arguments.folder / f"vllm-{arguments.vllm}.tar.xz")
        if not (arguments.folder / "packages.tar.xz").exists():
            add_packages(packages)
            pack(packages, arguments.folder / "packages.tar.xz")


if __name__ == "__main__":
    main()
