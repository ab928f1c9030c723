"""The triangular factor of weights, which the encoder's error feedback uses, in the library's own rotation."""

from __future__ import annotations

from dataclasses import replace

import torch

import gyre

from .file import Part


def rotated(matrix: torch.Tensor) -> torch.Tensor:
    """R M R^T of symmetric matrices [..., d, d], by the library's own rotation."""
    rotation_matrix = rotation(matrix.shape[-1])
    return rotation_matrix @ matrix @ rotation_matrix.T


def rotation(head_dim: int) -> torch.Tensor:
    rows = torch.eye(head_dim, dtype=torch.float32)  # engines have another default dtype
    encoder = gyre.Encoder("cpu")
    gyre.hadamard(encoder, rows, rows, signs="native")
    encoder.submit().wait()
    columns = rows.T.double()  # R e_j in f32; entries are 0 or +-1 / sqrt(size of the block)
    return columns.sign() / columns.square().reciprocal().round().sqrt()


def triangular(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """factor and diagonal of W' = T T^T, T upper triangular; f64 [..., d, d]."""
    # The Cholesky factor of the matrix flipped in both axes, flipped back.
    upper = torch.linalg.cholesky(((weights + weights.transpose(-1, -2)) / 2).flip(-1, -2)).flip(-1, -2)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    return (upper / diagonal[..., None, :]).triu(1), diagonal


def reordered(own: Part, order: torch.Tensor) -> Part:
    """`own` for rows that have its coordinates in another order: coordinate i of such a row is coordinate order[i] of `own`."""
    dim = own.factor.shape[-1]
    upper = (own.factor.double() + torch.eye(dim, dtype=torch.float64)) * own.diagonal.double()[..., None, :]
    back = rotation(dim).T
    weights = back @ (upper @ upper.transpose(-1, -2)) @ back.T
    factor, diagonal = triangular(rotated(weights[..., order[:, None], order]))
    moved = replace(own, factor=factor.float().contiguous(), diagonal=diagonal.float().contiguous())
    if own.basis is None:
        return moved
    by_both = lambda matrix: matrix[..., order[:, None], order].contiguous()
    mean = None if own.mean is None else own.mean[..., order].contiguous()
    return replace(moved, basis=by_both(own.basis), inverse=by_both(own.inverse), mean=mean)


def untouched(dim: int, transform: bool) -> Part:
    """A part that changes nothing of 16-bit rows, which take no feedback. transform: the layer's other part has one."""
    f32 = {"dtype": torch.float32}
    one = torch.eye(dim, **f32)[None] if transform else None
    return Part(one, one, None, torch.zeros(1, dim, dim, **f32), torch.ones(1, dim, **f32))
