"""A cache in one file, with the tokens that it holds.

    0   GYRETEXT
    8   u32 version 1, u32 bytes of the description
    16  description: JSON, see _describe()
        token ids: i64 [batch, columns], then the mask: u8 [batch, columns]; little endian
        SHA-256 of all before
        parts, layer by layer and row by row: what KvCache.save() or KvPool.save() wrote, which checks itself
"""

from __future__ import annotations

import array
import hashlib
import json
import os
import pathlib
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence

import torch

import gyre

from .config import refused

_MAGIC = b"GYRETEXT"
_VERSION = 1
_START = struct.Struct("<8sII")
_MAX_DESCRIPTION = 1 << 24


def save(cache, path: str | os.PathLike, token_ids: torch.Tensor | Sequence) -> None:
    rows, columns = cache.batch_size, cache.get_seq_length()
    if rows < 0 or columns == 0:
        raise refused("save: the cache is empty")
    if any(layer.length != columns for layer in cache.layers):
        raise refused("save: a forward pass was interrupted, call reset() or crop() first")
    ids = _ids("save", token_ids, rows)
    if ids.shape[1] < columns:
        raise refused(f"save: the cache holds {columns} tokens, {ids.shape[1]} token ids were given")
    path = pathlib.Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            parts = [pathlib.Path(folder) / str(i) for i in range(len(cache.layers) * rows)]
            names = iter(parts)
            for layer in cache.layers:
                layer.store.save(names)
            whole = pathlib.Path(folder) / "whole"
            with open(whole, "wb") as file:
                file.write(_head(cache, ids[:, :columns], [part.stat().st_size for part in parts]))
                for part in parts:
                    with open(part, "rb") as source:
                        shutil.copyfileobj(source, file, 1 << 22)
                    part.unlink()
                file.flush()
                os.fsync(file.fileno())
            os.replace(whole, path)
    except OSError as error:
        raise _io(f"save: {path}: {error}") from error


def load(cache, path: str | os.PathLike, token_ids: torch.Tensor | Sequence) -> None:
    if cache.get_seq_length() != 0 or cache.batch_size >= 0:
        raise refused("load: the cache must be a new one, this one has had tokens")
    path = pathlib.Path(path)
    try:
        with open(path, "rb") as file:
            said, stored, mask = _read_head(file)
            _check_fits(path, cache, said)
            ids = _ids("load", token_ids, said["rows"])
            _check_prompt(path, stored, mask, ids)
            with tempfile.TemporaryDirectory(prefix="gyre-") as folder:
                parts = _parts(file, said["parts"], pathlib.Path(folder))
                device = token_ids.device if isinstance(token_ids, torch.Tensor) else torch.device("cpu")
                _fill(cache, said, mask, parts, device)
    except OSError as error:  # gyre.IoError is one: then a part is damaged
        raise _io(f"load: {path}: {error}") from error
    if ids.shape[1] == stored.shape[1]:
        cache.crop(-1)  # somebody must compute the logits of the last token


def _fill(cache, said: dict, mask: torch.Tensor, parts, device: torch.device) -> None:
    """All layers or, if a part is refused, none."""
    made = []
    for layer, about in zip(cache.layers, said["layers"]):
        store = layer.make_store(said["rows"], about["kv_heads"], about["head_dim"], about["tokens"], device, about.get("step_tokens"))
        store.load(parts)
        made.append(store)
    for layer, store in zip(cache.layers, made):
        layer.use(store, device)
        layer.length = mask.shape[1]
    cache.columns.record(said["rows"], 0, mask.shape[1], None if mask.all() else mask)


def _head(cache, ids: torch.Tensor, parts: list[int]) -> bytes:
    text = json.dumps(_describe(cache, ids, parts)).encode()
    held = cache.columns.held
    mask = torch.ones(ids.shape, dtype=torch.bool) if held is None else held
    head = _START.pack(_MAGIC, _VERSION, len(text)) + text + _bytes_of(ids) + bytes(mask.flatten().tolist())
    return head + hashlib.sha256(head).digest()


def _describe(cache, ids: torch.Tensor, parts: list[int]) -> dict:
    layers = [
        {
            "kv_heads": layer.heads_and_dim[0],
            "head_dim": layer.heads_and_dim[1],
            "stored": repr(layer.stored),
            "tokens": layer.store.tokens,
            **({"step_tokens": layer.step_tokens} if layer.sharing else {}),
        }
        for layer in cache.layers
    ]
    paged = cache.layers[0].store.paged
    return {"rows": ids.shape[0], "columns": ids.shape[1], "paged": paged, "layers": layers, "parts": parts}


def _is_description(said) -> bool:
    def counts(of: dict, *names: str) -> bool:
        return all(type(of.get(name)) is int and 0 < of[name] < 1 << 40 for name in names)

    return (
        isinstance(said, dict)
        and counts(said, "rows", "columns")
        and isinstance(said.get("paged"), bool)
        and isinstance(said.get("layers"), list)
        and all(isinstance(layer, dict) and counts(layer, "kv_heads", "head_dim", "tokens") for layer in said["layers"])
        and all(counts(layer, "step_tokens") for layer in said["layers"] if "step_tokens" in layer)
        and isinstance(said.get("parts"), list)
        and all(type(size) is int and size >= 0 for size in said["parts"])
        and len(said["parts"]) == said["rows"] * len(said["layers"])
    )


def _read_head(file) -> tuple[dict, torch.Tensor, torch.Tensor]:
    def read(count: int) -> bytes:
        given = file.read(count) if count <= size - file.tell() else b""
        if len(given) != count:
            raise OSError("the file ends early")
        return given

    size = os.fstat(file.fileno()).st_size
    start = read(_START.size)
    magic, version, length = _START.unpack(start)
    if magic != _MAGIC:
        raise OSError("this is no file that GyreCache.save() wrote")
    if version != _VERSION or length > _MAX_DESCRIPTION:
        raise OSError(f"the file is of version {version}, this is version {_VERSION}")
    text = read(length)
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not _is_description(said):
        raise OSError("the description cannot be read")
    cells = said["rows"] * said["columns"]
    ids, mask = read(8 * cells), read(cells)
    if read(32) != hashlib.sha256(start + text + ids + mask).digest():
        raise OSError("the description does not have its checksum")
    shape = (said["rows"], said["columns"])
    held = torch.tensor(list(mask), dtype=torch.bool).view(shape)
    return said, _ids_of(ids).view(shape), held


def _current(stored: str | None) -> str | None:
    """Files of version 0.1 describe layers in words that have changed since; the values have not."""
    return stored and stored.replace(" sinks=", " sink_tokens=").replace('"compat', '"mlx_native')


def _check_fits(path: pathlib.Path, cache, said: dict) -> None:
    if len(said["layers"]) != len(cache.layers):
        raise refused(f"load: {path} has {len(said['layers'])} layers, the cache has {len(cache.layers)}")
    for i, (layer, about) in enumerate(zip(cache.layers, said["layers"])):
        stored = _current(about.get("stored"))
        if repr(layer.stored) != stored:
            raise refused(f"load: {path} has layer {i} as {stored}, the cache has {layer.stored}")
    paged = cache.layers[0].paged or said["rows"] > 1
    if paged != said["paged"]:
        where = "in pages" if said["paged"] else "not in pages"
        raise refused(f"load: {path} is {where}: make the cache with paged={said['paged']}")
    cache.require(said["columns"])


def _check_prompt(path: pathlib.Path, stored: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> None:
    common = min(stored.shape[1], ids.shape[1])
    differ = ((stored[:, :common] != ids[:, :common]) & mask[:, :common]).nonzero()
    if len(differ):
        row, column = differ[differ[:, 1].argmin()].tolist()
        raise refused(
            f"load: the prompt is not the one of {path}: position {column} of row {row} is token {ids[row, column]}, "
            f"the file has {stored[row, column]}"
        )
    if common < stored.shape[1]:
        raise refused(f"load: the prompt ends at position {common}, {path} has {stored.shape[1]} tokens")


def _parts(file, sizes: list[int], folder: pathlib.Path):
    """Files with the parts, one at a time: each goes when the next one is asked for."""
    part = folder / "part"
    for size in sizes:
        left = size
        with open(part, "wb") as out:
            while left and (piece := file.read(min(left, 1 << 22))):
                out.write(piece)
                left -= len(piece)
        if left:
            raise OSError("the file ends early")
        yield part


def _ids(op: str, given: torch.Tensor | Sequence, rows: int) -> torch.Tensor:
    ids = torch.as_tensor(given, device="cpu")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[0] != rows:
        raise refused(f"{op}: token ids must be integers [{rows}, tokens], got {list(ids.shape)} of {ids.dtype}")
    return ids.long()


def _bytes_of(ids: torch.Tensor) -> bytes:
    values = array.array("q", ids.flatten().tolist())
    if sys.byteorder != "little":
        values.byteswap()
    return values.tobytes()


def _ids_of(data: bytes) -> torch.Tensor:
    values = array.array("q", data)
    if sys.byteorder != "little":
        values.byteswap()
    return torch.tensor(values.tolist(), dtype=torch.long)


def _io(message: str) -> gyre.IoError:
    return gyre.IoError(f"gyre.integrations.transformers: {message}")
