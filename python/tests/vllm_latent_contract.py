"""Latent pages (MLA) as the vLLM plugin uses them, and references in double over the stored values. Used by test_vllm_latent.py and
vllm_latent_cuda.py; vLLM is not needed."""

import torch
from vllm_contract import Batch, make_cache

import gyre
from gyre.integrations.vllm.latent import Tokens, attend_context, parts_of
from gyre.integrations.vllm.pages import LayerPages

LATENT, ROTARY, OWN, V_DIM = 512, 64, 128, 128  # DeepSeek-V3's
SCALE = 1.3 * (OWN + ROTARY) ** -0.5  # models multiply it by a factor of their own
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


def layer_of(queue, formats, blocks, page, device, dims=(LATENT, ROTARY)):
    cache = make_cache(formats, blocks, page, 1, dims[0], device, rotary_dim=dims[1]).squeeze(1)  # as vLLM binds it
    return LayerPages(queue, cache, formats, 1, *dims, page, latent=True)


def batch_of(device, heads, page, requests, dims=(LATENT, ROTARY), **options):
    return Batch(device, heads, 1, dims[0], page, requests, rotary_dim=dims[1], **options)


def round_trip(format, rows):
    """What a cache of this format holds of rows [tokens, 1, coordinates], in double."""
    if format in FLOATS or len(rows) == 0:
        return rows.to(FLOATS.get(format, rows.dtype)).double()
    cpu, kept = gyre.Device("cpu"), rows.cpu().contiguous()
    buffer = gyre.KvBuffer.allocate(cpu, format=format, role="k", kv_heads=1, capacity=-(-len(rows) // 8) * 8, head_dim=rows.shape[2])
    out, encoder = torch.empty(kept.shape, dtype=torch.float32), gyre.Encoder(cpu)
    gyre.kv_quantize(encoder, k=kept, k_cache=buffer)
    gyre.kv_dequantize(encoder, buffer, out)
    encoder.submit().wait()
    return out.to(rows.device).double()


def reference(batch, q, formats, stored=True):
    """Latents [tokens, heads, latent] of absorbed queries, in double. The past is what the pages hold; the step's own tokens are, too,
    or are as they came."""
    begin, outs = 0, []
    for (queries, length), past in zip(batch.requests, batch.past):
        rows = slice(begin, begin + queries)
        begin += queries
        parts = []
        for format, old, new in zip((formats.k, formats.v), past, (batch.k[rows], batch.v[rows])):
            parts.append(torch.cat((round_trip(format, old), round_trip(format, new) if stored else new.double()))[:, 0])
        latent, rotary = parts
        logits = torch.einsum("thd,jd->htj", q[rows].double(), torch.cat((latent, rotary), 1)) * SCALE
        at = torch.arange(length - queries, length, device=q.device)[:, None]
        logits = logits.masked_fill(torch.arange(length, device=q.device)[None] > at, float("-inf"))
        outs.append(torch.einsum("htj,jd->thd", logits.softmax(-1), latent))
    return torch.cat(outs)


def error_of(out, expected):
    """The mean square error, of the mean square."""
    return ((out.double() - expected).square().mean() / expected.square().mean()).nan_to_num(float("inf")).item()


def tokens_of(batch, first=0):
    """The requests from `first` on."""
    begin = sum(queries for queries, _ in batch.requests[:first])
    slots, table = batch.slots[begin:], batch.table[first:]
    return Tokens(begin, len(slots), batch.cu_seqlens_q[first:], slots, table, batch.max_query_length)


def decode(layer, batch, is_prefill=None):
    """Every request of the batch over all that is stored, its own tokens included."""
    parts = parts_of(layer.queue, batch.heads, tokens_of(batch), batch.kv_lengths, batch.max_kv_length, is_prefill)
    out = torch.full((*batch.q.shape[:2], batch.head_dim), 7.0, dtype=batch.q.dtype, device=batch.device)
    layer.write(batch.k, batch.v, layer.queue.slots(batch.slots))
    for rows, step in parts:
        layer.attend(batch.q[rows], out[rows], step, SCALE)
    return out, len(parts)


class Projections:
    """Queries before they are absorbed, and the up-projections."""

    def __init__(self, batch, seed=5):
        g = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=g).to(batch.q.dtype).to(batch.device)

        self.q = normal(len(batch.q), batch.heads, OWN + ROTARY)
        self.up_k, self.up_v = normal(batch.heads, OWN, LATENT) / OWN**0.5, normal(batch.heads, LATENT, V_DIM) / LATENT**0.5

    def absorbed(self):
        q, up_k = self.q.double(), self.up_k.double()
        return torch.cat((torch.einsum("thp,hpl->thl", q[..., :OWN], up_k), q[..., OWN:]), -1)

    def expand(self, latents):
        return torch.einsum("thl,hlv->thv", latents, self.up_v.double())


def new_tokens(batch, projections, first):
    """What vLLM's prefill kernels return: the new tokens of the requests from `first` on among themselves, as they came, and the
    log-sum-exp [heads, tokens]."""
    q, outs, states = projections.absorbed(), [], []
    begin = sum(queries for queries, _ in batch.requests[:first])
    for queries, _ in batch.requests[first:]:
        rows = slice(begin, begin + queries)
        begin += queries
        latent, rotary = batch.k[rows, 0].double(), batch.v[rows, 0].double()
        logits = torch.einsum("thd,jd->htj", q[rows], torch.cat((latent, rotary), 1)) * SCALE
        logits = logits.masked_fill(torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        outs.append(torch.einsum("htj,jd->thd", logits.softmax(-1), latent))
        states.append(logits.logsumexp(-1))
    return projections.expand(torch.cat(outs)), torch.cat(states, 1)


def prefill(layer, batch, projections, first):
    """The requests from `first` on as prompts' chunks: new tokens as they came, what lies before them as it is stored."""
    layer.write(batch.k, batch.v, layer.queue.slots(batch.slots))
    stored = batch.kv_lengths[first:] - (batch.cu_seqlens_q[first + 1 :] - batch.cu_seqlens_q[first:-1])
    tokens = tokens_of(batch, first)
    tokens = tokens._replace(count=batch.tokens - tokens.first, slots=tokens.slots[: batch.tokens - tokens.first])
    parts = parts_of(layer.queue, batch.heads, tokens, stored, int(stored.max()), causal=False)
    q = projections.q[tokens.first : batch.tokens]
    out = q.new_empty(*q.shape[:2], V_DIM)
    lse = attend_context(layer, q, parts, SCALE, projections.up_k, projections.up_v, out)
    suffix, suffix_lse = new_tokens(batch, projections, first)
    weight = (lse.double() - torch.logaddexp(lse.double(), suffix_lse)).exp().t()[..., None]
    return out.double() * weight + suffix * (1 - weight), len(parts)
