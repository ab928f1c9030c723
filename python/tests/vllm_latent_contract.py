"""Latent pages (MLA) as the vLLM plugin uses them, and references in double over the stored values. Used by test_vllm_latent.py and
vllm_latent_cuda.py; vLLM is not needed."""

import torch
from vllm_contract import Batch, make_cache

import gyre
from gyre.calibrate.feedback import rotated, triangular
from gyre.calibrate.file import Calibration, Part
from gyre.integrations.vllm.latent import Tokens, attend_context, parts_of
from gyre.integrations.vllm.pages import LayerPages

LATENT, ROTARY, OWN, V_DIM = 512, 64, 128, 128  # DeepSeek-V3's
SCALE = 1.3 * (OWN + ROTARY) ** -0.5  # models multiply it by a factor of their own
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}


def part_of(basis, weights, mean=None):
    """As gyre.calibrate makes one; basis None: feedback alone."""
    inverse = None if basis is None else torch.linalg.inv(basis)
    weights = weights if basis is None else inverse @ weights @ inverse
    held = (None if x is None else x.float()[None].contiguous() for x in (basis, inverse, mean, *triangular(rotated(weights))))
    return Part(*held)


def calibration_of(dims=(LATENT, ROTARY), transform=True, layers=1):
    """Transforms far from the identity, a mean, and feedback: of a latent, and of a rotary part with a factor for each pair."""
    g, made = torch.Generator().manual_seed(6), []
    symmetric = lambda orthogonal, values: orthogonal @ values.diag() @ orthogonal.T
    for _ in range(layers):
        orthogonal = torch.linalg.qr(torch.randn(dims[0], dims[0], generator=g, dtype=torch.double))[0]
        stretch, weights = (torch.rand(dims[0], generator=g, dtype=torch.double) * 2 + 0.3 for _ in range(2))
        pairs, pair_weights = (torch.rand(dims[1] // 2, generator=g, dtype=torch.double).repeat(2) * 2 + 0.3 for _ in range(2))
        mean = torch.randn(dims[0], generator=g, dtype=torch.double)
        latent = part_of(symmetric(orthogonal, stretch) if transform else None, symmetric(orthogonal, weights), mean if transform else None)
        made.append((latent, part_of(pairs.diag() if transform else None, pair_weights.diag())))
    return Calibration(made, "R" if transform else "F", "m", "id", 0, 100, [0.9, 1.0, 1.1])


def layer_of(queue, formats, blocks, page, device, dims=(LATENT, ROTARY), layer_calibration=None):
    cache = make_cache(formats, blocks, page, 1, dims[0], device, rotary_dim=dims[1]).squeeze(1)  # as vLLM binds it
    return LayerPages(queue, cache, formats, 1, *dims, page, layer_calibration, latent=True)


def batch_of(device, heads, page, requests, dims=(LATENT, ROTARY), **options):
    return Batch(device, heads, 1, dims[0], page, requests, rotary_dim=dims[1], **options)


def round_trip(role, format, rows, part=None, calibration=None):
    """What a cache of this format holds of rows [tokens, 1, coordinates], in double. part, calibration: of a compressed one."""
    if format in FLOATS or len(rows) == 0:
        return rows.to(FLOATS.get(format, rows.dtype)).double()
    cpu, kept = gyre.Device("cpu"), rows.cpu().contiguous()
    buffer = gyre.KvBuffer.allocate(cpu, format=format, role=role, kv_heads=1, capacity=-(-len(rows) // 8) * 8, head_dim=rows.shape[2])
    out, encoder = torch.empty(kept.shape, dtype=torch.float32), gyre.Encoder(cpu)
    gyre.kv_quantize(encoder, **{role: kept, f"{role}_cache": buffer, f"{role}_calibration": calibration})
    gyre.kv_dequantize(encoder, buffer, out)
    encoder.submit().wait()
    out = out.double()
    if part is not None and part.basis is not None:
        out = out @ part.inverse[0].double() + (0 if part.mean is None else part.mean[0].double())
    return out.to(rows.device)


def reference(batch, q, formats, stored=True, layer_calibration=None):
    """Latents [tokens, heads, latent] of absorbed queries, in double. The past is what the pages hold; the step's own tokens are, too,
    or are as they came."""
    begin, outs = 0, []
    how = [(None, None)] * 2
    if layer_calibration is not None:
        how = list(zip(layer_calibration.parts, layer_calibration.on(gyre.Device("cpu"))))
    for (queries, length), past in zip(batch.requests, batch.past):
        rows = slice(begin, begin + queries)
        begin += queries
        parts = []
        for role, format, old, new, own in zip("kv", (formats.k, formats.v), past, (batch.k[rows], batch.v[rows]), how):
            kept = round_trip(role, format, new, *own) if stored else new.double()
            parts.append(torch.cat((round_trip(role, format, old, *own), kept))[:, 0])
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
