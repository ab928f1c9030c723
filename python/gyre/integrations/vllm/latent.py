"""Steps over latent pages (MLA): which rows go into which call. vLLM is not needed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .pages import LayerPages, Queue, Step

# Query heads times tokens of one call. On CUDA each row of a call has a state of 2 KB in scratch memory for every split of its keys.
MAX_ROWS = 1 << 16


class Part(NamedTuple):
    rows: slice  # of the Tokens that were cut into parts
    step: Step


class Tokens(NamedTuple):
    """Neighbouring requests of a step, as vLLM describes them."""

    first: int  # of these requests' tokens in the step
    count: int
    starts: torch.Tensor  # i32 [requests + 1]: where a request's tokens begin in the step
    slots: torch.Tensor  # of these tokens
    table: torch.Tensor
    max_query_length: int


def parts_of(
    queue: Queue,
    heads: int,
    tokens: Tokens,
    kv_lengths: torch.Tensor,
    max_kv_length: int,
    is_prefill: torch.Tensor | None = None,
    causal: bool = True,
) -> list[Part]:
    """One step for these tokens, or several of at most MAX_ROWS rows (query heads times tokens) each. The cut may fall inside a
    request. If attention is causal, a part then ends the request's keys with the request's last token in that part. A step that is
    not cut keeps the given tensors: a captured graph reads them at their addresses."""
    part_tokens, parts = max(MAX_ROWS // heads, 1), []
    ends = tokens.starts[1:]
    for begin in range(tokens.first, tokens.first + tokens.count, part_tokens):
        end = min(begin + part_tokens, tokens.first + tokens.count)
        starts, lengths, rows = tokens.starts, kv_lengths, slice(begin - tokens.first, end - tokens.first)
        if end - begin < tokens.count:
            starts = tokens.starts.clamp(begin, end)
            lengths = (kv_lengths - (ends - ends.clamp(max=end))).clamp(min=0) if causal else kv_lengths
        step = queue.step(
            slots=tokens.slots[rows],
            table=tokens.table,
            kv_lengths=lengths,
            cu_seqlens_q=starts - begin if begin > 0 else starts,
            is_prefill=is_prefill,
            max_query_length=min(tokens.max_query_length, end - begin),
            max_kv_length=max_kv_length,
        )
        parts.append(Part(rows, step))
    return parts


def absorb(q: torch.Tensor, up_k: torch.Tensor) -> torch.Tensor:
    """q [tokens, heads, coordinates + rotary] times K's up-projection [heads, coordinates, latent], with its rotary coordinates
    behind it."""
    own, latent = up_k.shape[1], up_k.shape[2]
    absorbed = q.new_empty(*q.shape[:2], latent + q.shape[2] - own)
    absorbed[..., :latent] = torch.bmm(q[..., :own].transpose(0, 1), up_k).transpose(0, 1)
    absorbed[..., latent:] = q[..., own:]
    return absorbed


def attend_context(
    pages: LayerPages,
    q: torch.Tensor,
    parts: list[Part],
    scale: float,
    up_k: torch.Tensor,
    up_v: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Attention of new tokens over what was stored before them, which all of them see. q as in absorb(); up_v: [heads, latent,
    coordinates of V]; out: [tokens, heads, coordinates of V], is written. Returns the log-sum-exp, f32 [heads, tokens]."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for rows, step in parts:
        absorbed = absorb(q[rows], up_k)
        latents = q.new_empty(*absorbed.shape[:2], up_v.shape[1])
        pages.attend(absorbed, latents, step, scale, causal=False, lse=lse[rows])
        torch.bmm(latents.transpose(0, 1), up_v, out=out[rows].transpose(0, 1))
    return lse.t().contiguous()
