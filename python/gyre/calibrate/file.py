"""A calibration in one file, *.gyrecal: safetensors inside.

Tensors, f32: layers.{i}.{k|v}.basis, .inverse, .factor [kv_heads, dim, dim], .mean, .diagonal [kv_heads, dim]. basis and inverse come
together or not at all, and only with them may a mean come. dim is head_dim; in a latent layer (MLA) k is the latent, with head_dim
coordinates, and v the rotary part, with v_head_dim.

The metadata has one entry, "gyrecal": JSON with the version, the fields of Calibration and the dims. It is one entry because safetensors
writes several in any order, and equal calibrations must be equal files. A file of layers that differ in heads or dims (Gemma 4) is of
version 3 and lists them. Layers that share another's cache are not there. Its "checksum" is the SHA-256 of everything else: the description
as JSON with sorted keys, then each tensor's name, dtype, shape and bytes in the order of the names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, field

import safetensors
import safetensors.torch
import torch

import gyre

from . import new_file
from .budget import BITS, Budget

ENTRY, VERSION = "gyrecal", 2
MIXED_VERSION = 3  # layers differ in heads or dims
UNCHECKED_VERSION = 1  # had no checksum; is refused
# The encoder multiplies errors by the factor, and rows by the basis. The floors of solve.py keep both far below this.
LARGEST = 1000.0
LARGEST_MEAN = 65504.0  # what 16-bit keys and values can be
# What weighs much is coded well at the expense of what weighs little: so often may a row's squared error grow. Feedback: 3 times in
# SmolLM2-135M, at most 8 with moments of all kinds that were tried; a basis: 3 times.
LARGEST_GROWTH = 50.0
MOST_GAINS = 8  # that a cache takes
FARTHEST = 4  # times the range that a calibration is for; nothing was measured beyond
_IDENTITY = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "layer_types sliding_window rope_parameters query_pre_attn_scalar attention_bias"
).split()
# Only models that have these fields are told apart by them.
_MORE_IDENTITY = (
    "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim num_kv_shared_layers attention_k_eq_v"
).split()


@dataclass
class Part:
    """Keys or values of one layer (MLA: its latent or its rotary part), f32. basis, inverse, factor: [kv_heads, dim, dim]; mean,
    diagonal: [kv_heads, dim]. basis and inverse are None if there is error feedback alone; the mean may be None with them, too."""

    basis: torch.Tensor | None
    inverse: torch.Tensor | None
    mean: torch.Tensor | None
    factor: torch.Tensor  # row i: what the error of coordinate i adds to each one behind it, 0 elsewhere
    diagonal: torch.Tensor


class CalibrationWarning(UserWarning):
    """A calibration that is used for more than it was made for, or made from little."""


def identity(config) -> str:
    """Names a model by what its config says about its shape and its rotary embedding."""
    config = config.get_text_config(decoder=True)
    per_layer = getattr(config, "per_layer_attributes", None) or ()  # layers differ in them (Gemma 4's head_dim)
    said = {name: getattr(config, name, None) for name in _IDENTITY if name not in per_layer}
    said.update({name: [getattr(own, name) for own in config.per_layer_config] for name in _IDENTITY if name in per_layer})
    said.update({name: getattr(config, name) for name in _MORE_IDENTITY if hasattr(config, name)})
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(eq=False)  # one is equal to itself alone: tensors have no ==
class Calibration:
    """layers: keys and values of each. capacity: positions that the keys' moments are for, 0: all there are. tokens: that they are
    from. sensitivities: of each layer's keys and values, the mean divergence with these alone in `sensitivity_format`."""

    layers: list[tuple[Part, Part]]
    recipe: str
    model: str
    identity: str
    capacity: int
    tokens: int
    gains: list[float]
    sensitivities: list[tuple[float, float]] = field(default_factory=list)
    sensitivity_format: str = ""
    budgets: list[Budget] = field(default_factory=list)

    @property
    def dims(self) -> list[tuple[int, int, int]]:
        """Of each layer KV heads, coordinates of keys and of values; in latent layers (MLA) those of the latent and of the rotary part."""
        return [(*k.factor.shape[:2], v.factor.shape[1]) for k, v in self.layers]

    def save(self, path: str | os.PathLike) -> None:
        """As a whole or not at all."""
        tensors = {
            f"layers.{i}.{role}.{name}": tensor
            for i, layer in enumerate(self.layers)
            for role, part in zip("kv", layer)
            for name, tensor in vars(part).items()
            if tensor is not None
        }
        said = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("layers", "budgets")}
        said.update(version=VERSION, layers=len(self.layers), budgets=[asdict(budget) for budget in self.budgets])
        if len(set(self.dims)) > 1:
            said.update(version=MIXED_VERSION, dims=self.dims)
        else:
            said["kv_heads"], said["head_dim"], v_head_dim = self.dims[0]
            if v_head_dim != said["head_dim"]:
                said["v_head_dim"] = v_head_dim
        said = json.loads(json.dumps(said))  # as it is read back: tuples become lists
        said["checksum"] = _checksum(said, tensors)
        new_file.replace("calibrate", path, safetensors.torch.save(tensors, {ENTRY: json.dumps(said)}))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Calibration:
        path = new_file.regular("calibration", path)
        try:
            with safetensors.safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, safetensors.SafetensorError) as error:
            raise gyre.IoError(f"calibration: {path}: {error}") from error
        try:
            said = _about(path, metadata, tensors)
        except RecursionError as error:  # so deep that it is read, but neither summed nor printed
            raise gyre.IoError(f"calibration: {path}: the description cannot be read") from error
        layers = [
            tuple(_part(path, tensors, f"layers.{i}.{role}", heads, dim) for role, dim in zip("kv", dims))
            for i, (heads, *dims) in enumerate(_dims(said))
        ]
        if tensors:
            raise gyre.IoError(f"calibration: {path}: there are other tensors: {sorted(tensors)[0]}")
        said["budgets"] = [Budget(**budget) for budget in said["budgets"]]
        return cls(layers, **said)

    def check(self, config, capacity: int | None = None) -> None:
        """Refuses another model and positions far outside the range; warns of those just outside."""
        if identity(config) != self.identity:
            kind = config.get_text_config(decoder=True).model_type
            raise gyre.InvalidArgument(
                f"calibration: it was made for {self.model}, whose config differs from that of this {kind} model"
            )
        if not self.capacity or capacity is None or capacity <= self.capacity:
            return
        if capacity > FARTHEST * self.capacity:
            raise gyre.InvalidArgument(
                f"calibration: it is for positions below {self.capacity}, a capacity of {capacity} is more than {FARTHEST} times "
                "that: calibrate with a larger --capacity"
            )
        self.warn_range(capacity)

    def warn_range(self, tokens: int) -> None:
        warnings.warn(
            f"calibration: it is for positions below {self.capacity}, the cache has room for {tokens}: keys beyond gain nothing or "
            "lose, calibrate with a larger --capacity",
            CalibrationWarning,
            stacklevel=4,
        )

    def budget(self, bits: float, by: str | None = None) -> Budget:
        """The formats that were found for this many bits."""
        for budget in self.budgets:
            if abs(budget.bits - bits) < 1e-9 and by in (None, budget.by):
                return budget
        known = ", ".join(f"{budget.bits:g} by {budget.by}" for budget in self.budgets) or "none"
        raise gyre.InvalidArgument(f"calibration: there are no formats for {bits:g} bits, there are for {known}")


def _checksum(said: dict, tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _about(path, metadata: dict, tensors: dict[str, torch.Tensor]) -> dict:
    if ENTRY not in metadata:
        raise gyre.IoError(f"calibration: {path}: this is no file that gyre.calibrate wrote")
    try:
        said = json.loads(metadata[ENTRY])
    except (ValueError, RecursionError):
        said = None
    version = said.get("version") if isinstance(said, dict) else None
    if version == UNCHECKED_VERSION:
        raise gyre.IoError(
            f"calibration: {path}: the file is of version {version}, which has no checksum: make it again with python -m gyre.calibrate"
        )
    if type(version) is int and version not in (VERSION, MIXED_VERSION):
        raise gyre.IoError(f"calibration: {path}: the file is of version {version}, this is version {VERSION}")
    known = type(version) is int
    if known and said.pop("checksum", None) != _checksum(said, tensors):
        raise gyre.IoError(f"calibration: {path}: the checksum differs: the file is damaged")
    if known:
        said.pop("version")
    counts = ["layers"] if version == MIXED_VERSION else ["layers", "kv_heads", "head_dim"]
    if known and "v_head_dim" in said:
        counts.append("v_head_dim")
    fields = {*Calibration.__dataclass_fields__, *counts, *(["dims"] if version == MIXED_VERSION else [])}
    if (
        not known
        or set(said) != fields
        or any(not _is_count(said[name]) for name in counts)
        or not _is_dims(said.get("dims"), said["layers"], version)
        or any(type(said[name]) is not int or not 0 <= said[name] < 1 << 63 for name in ("capacity", "tokens"))
        or not all(isinstance(said[name], list) for name in ("gains", "sensitivities", "budgets"))
        or any(not isinstance(said[name], str) for name in ("recipe", "model", "identity", "sensitivity_format"))
        or not said["gains"]
        or len(said["gains"]) > MOST_GAINS
        or not all(isinstance(gain, float) and 0.25 <= gain <= 4 for gain in said["gains"])
        or (said["sensitivities"] and not _is_numbers(said["sensitivities"], said["layers"], 2))
        or not all(_is_budget(budget, said["layers"]) for budget in said["budgets"])
    ):
        raise gyre.IoError(f"calibration: {path}: the description cannot be read")
    return said


def _is_count(given) -> bool:
    return type(given) is int and 0 < given < 1 << 16


def _is_dims(dims, layers: int, version: int) -> bool:
    """Of layers that differ; no others have a list."""
    if version != MIXED_VERSION:
        return dims is None
    return (
        isinstance(dims, list)
        and len(dims) == layers
        and all(isinstance(own, list) and len(own) == 3 and all(map(_is_count, own)) for own in dims)
    )


def _dims(said: dict) -> list[list[int]]:
    """Of each layer heads and dims, which are taken out of what the file says."""
    count = said.pop("layers")
    if "dims" in said:
        return said.pop("dims")
    heads, k = said.pop("kv_heads"), said.pop("head_dim")
    return [[heads, k, said.pop("v_head_dim", k)]] * count


def _is_numbers(rows, count: int, each: int) -> bool:
    return len(rows) == count and all(
        isinstance(row, list) and len(row) == each and all(isinstance(one, float) and math.isfinite(one) for one in row)
        for row in rows
    )


def _is_budget(budget, layers: int) -> bool:
    return (
        isinstance(budget, dict)
        and set(budget) == set(Budget.__dataclass_fields__)
        and all(type(budget[name]) in (int, float) and abs(budget[name]) < 1e9 for name in ("bits", "used", "predicted"))
        and budget["by"] in ("coordinate", "bytes")
        and all(isinstance(budget[name], list) and len(budget[name]) == layers for name in "kv")
        and all(isinstance(name, str) and name in BITS for name in budget["k"] + budget["v"])
    )


def _part(path, tensors: dict[str, torch.Tensor], prefix: str, heads: int, d: int) -> Part:
    found = {}
    for name in Part.__dataclass_fields__:
        tensor = tensors.pop(f"{prefix}.{name}", None)
        found[name] = tensor
        if tensor is None:
            continue
        shape = (heads, d) if name in ("mean", "diagonal") else (heads, d, d)
        if tensor.shape != shape or tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise gyre.IoError(f"calibration: {path}: {prefix}.{name} must be finite f32 {list(shape)}")
    missing = [name for name in ("factor", "diagonal") if found[name] is None]
    if (found["basis"] is None) != (found["inverse"] is None):
        missing.append("basis" if found["basis"] is None else "inverse")
    if found["mean"] is not None and found["basis"] is None:
        missing.append("basis")
    if missing:
        raise gyre.IoError(f"calibration: {path}: there is no {prefix}.{missing[0]}")
    part = Part(**found)
    problem = _problem(part)
    if problem:
        raise gyre.IoError(f"calibration: {path}: {prefix}.{problem}")
    return part


def _problem(part: Part) -> str:
    """What the encoder cannot work with, although it is finite; empty: nothing."""
    if not torch.equal(part.factor, part.factor.triu(1)):
        return "factor must be 0 on and below its diagonal"
    if not (part.diagonal > 0).all() or part.diagonal.max() > LARGEST:
        return f"diagonal must be above 0 and at most {LARGEST:g}"
    for name in ("basis", "inverse", "factor"):
        tensor = getattr(part, name)
        if tensor is not None and tensor.abs().max() > LARGEST:
            return f"{name} must be from {-LARGEST:g} to {LARGEST:g}, got {tensor.abs().max():g}"
    if part.mean is not None and part.mean.abs().max() > LARGEST_MEAN:
        return f"mean must be from {-LARGEST_MEAN:g} to {LARGEST_MEAN:g}, got {part.mean.abs().max():g}"
    if part.basis is not None:
        identity = torch.eye(part.basis.shape[-1])
        apart = (part.basis @ part.inverse - identity).abs().max()
        if apart > 1e-2:
            return f"inverse times basis is {apart:g} from the identity"
        if (part.basis - part.basis.transpose(-1, -2)).abs().max() > 1e-3 * part.basis.abs().max():
            return "basis must be symmetric"
    growth = {"factor": _feedback_growth(part.factor)}
    if part.basis is not None:
        growth["basis"] = (_mean_square(part.basis) * _mean_square(part.inverse)).max()
    for name, found in growth.items():
        if not found <= LARGEST_GROWTH:
            return f"{name} multiplies the squared error of rows by {found:g}, at most {LARGEST_GROWTH:g} makes sense"
    return ""


def _mean_square(matrix: torch.Tensor) -> torch.Tensor:
    """How often a matrix [..., d, d] multiplies the squares of rows whose coordinates are independent, on average."""
    return matrix.double().square().sum((-1, -2)) / matrix.shape[-1]


def _feedback_growth(factor: torch.Tensor) -> torch.Tensor:
    """The error e of a row whose codes are rounded by u: (1 + factor)^T e = u."""
    one = torch.eye(factor.shape[-1], dtype=torch.float64)
    unit = factor.double() + one
    return _mean_square(torch.linalg.solve_triangular(unit, one.expand(unit.shape), upper=True, unitriangular=True)).max()
