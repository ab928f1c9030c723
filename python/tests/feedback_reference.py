"""Shaped compression written down a second time, in torch: what the library's encoder does to a row, without its speed."""

import torch

from gyre.calibrate.feedback import rotation

MAGNITUDES = {"tq2": (36, 120), "tq3": (10, 31, 55, 88), "tq4": (5, 15, 25, 37, 49, 63, 81, 107)}
STEP = {"tq2": 0.01258624817301284, "tq3": 0.0244461383835827, "tq4": 0.025559356256893873}  # standard deviations per unit of level
ODD = {"tq5": 32, "tq6": 64}


def levels(name: str) -> torch.Tensor:
    if name in MAGNITUDES:
        positive = torch.tensor(MAGNITUDES[name], dtype=torch.float32)
        return torch.cat([-positive.flip(0), positive])
    if name in ODD:
        return torch.arange(1 - ODD[name], ODD[name], 2, dtype=torch.float32)
    return torch.arange(-127, 128, dtype=torch.float32)


def nearest(t: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return table[torch.bucketize(t, (table[1:] + table[:-1]) / 2)]


def encode(name: str, z: torch.Tensor, factor: torch.Tensor | None, gains) -> tuple[torch.Tensor, torch.Tensor]:
    """Levels [gains, rows, d] of rotated rows z [rows, d], and the unit r [gains, rows] of each."""
    table = levels(name)
    c = torch.tensor(gains, dtype=z.dtype)[:, None]
    if name in STEP:
        unit = z.square().mean(1).sqrt() * STEP[name] / c
    else:
        unit = z.abs().amax(1) / (ODD[name] if name in ODD else 127) / c
    x = z / unit.clamp(min=1e-30)[..., None]
    if factor is None:
        return nearest(x, table), unit
    out, carried = torch.empty_like(x), torch.zeros_like(x)
    for i in range(z.shape[1]):
        out[..., i] = nearest(x[..., i] + carried[..., i], table)
        error = x[..., i] - out[..., i]
        carried[..., i + 1 :] += error[..., None] * factor[i, i + 1 :]
    return out, unit


def restored(name: str, x: torch.Tensor, part, head: int, key: bool, gains=(0.9, 1.0, 1.1), feedback=True) -> torch.Tensor:
    """Quantizes rows x [rows, d] of one head and reads them back. part: gyre.calibrate's, or None."""
    d = x.shape[1]
    rotation_matrix = rotation(d).float()
    basis = inverse = torch.eye(d)
    if part is not None and part.basis is not None:
        basis, inverse = part.basis[head], part.inverse[head]
    mean = 0 if part is None or part.mean is None else part.mean[head]
    y = x - mean
    z = y @ basis @ rotation_matrix.T
    upper = torch.eye(d)
    if part is not None:
        upper = (part.factor[head] + torch.eye(d)) * part.diagonal[head]
    out, _ = encode(name, z, part.factor[head] if part is not None and feedback else None, gains)
    p, q = z @ upper, out @ upper
    a, b, c = (p * p).sum(-1), (p * q).sum(-1), (q * q).sum(-1)
    best = (a - b * b / c).argmin(0)
    pick = lambda t: t[best, torch.arange(len(x))]
    l, b = pick(out), pick(b)
    if key:
        scale = y.square().sum(-1) / (l * (y @ inverse @ rotation_matrix.T)).sum(-1)
    else:
        scale = a / b
    return (scale[:, None] * l) @ rotation_matrix @ inverse + mean
