"""Batches with the tensors that vLLM 0.32 makes, and a reference in double. Used by test_vllm_pages.py, vllm_contract_cuda.py and,
for latent pages, vllm_latent_contract.py; vLLM is not needed."""

import torch

PAD = -1  # the slot of a padding token


def make_cache(formats, blocks, page_tokens, kv_heads, head_dim, device, rotary_dim=0):
    """As vLLM lays a layer's pages out: uint8 [blocks, 1, tokens, bytes of a token], apart by a stride of its own. With a rotary_dim
    head_dim is that of a latent."""
    token_bytes = formats.token_bytes(kv_heads, head_dim, rotary_dim or head_dim, latent=rotary_dim > 0)
    whole = torch.zeros(blocks, 2, page_tokens, token_bytes, dtype=torch.uint8, device=device)  # of two layers
    return whole[:, :1]


class Batch:
    """One step: `requests` is (queries, length) of each. K and V of the past are kept for the reference. With a rotary_dim K is a latent
    of head_dim, V the rotary part, and q has the coordinates of both."""

    def __init__(
        self,
        device,
        heads,
        kv_heads,
        head_dim,
        page_tokens,
        requests,
        padded_requests=0,
        padded_tokens=0,
        seed=0,
        dtype=torch.float32,
        width=64,
        rotary_dim=0,
    ):
        g = torch.Generator().manual_seed(seed)
        self.device, self.page_tokens, self.requests = device, page_tokens, requests
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.tokens = sum(queries for queries, _ in requests)
        rows = self.tokens + padded_tokens

        def normal(*shape):
            return torch.randn(*shape, generator=g).to(dtype)

        # q, k and v are slices of one projection: the token stride is that of all three.
        q_dim, v_dim = head_dim + rotary_dim, rotary_dim or head_dim
        sizes = [heads * q_dim, kv_heads * head_dim, kv_heads * v_dim]
        q, k, v = normal(rows, sum(sizes)).to(device).split(sizes, dim=1)
        self.q = q.contiguous().view(rows, heads, q_dim)  # rotary embedding made a new one
        self.k, self.v = k.contiguous().view(rows, kv_heads, head_dim), v.view(rows, kv_heads, v_dim)
        self.past = [tuple(normal(n - t, kv_heads, dim).to(device) for dim in (head_dim, v_dim)) for t, n in requests]

        pages = [-(-length // page_tokens) for _, length in requests]
        order = torch.randperm(sum(pages), generator=g) + 1  # block 0 is the null block
        self.blocks = sum(pages) + 1
        count = len(requests) + padded_requests
        table = torch.zeros(count, width + 16, dtype=torch.int32)  # rows of a larger table
        table[:, :width] = 0
        begin, slots = 0, []
        for r, (queries, length) in enumerate(requests):
            table[r, : pages[r]] = order[begin : begin + pages[r]].int()
            table[r, pages[r] : width] = 10**6 if r % 2 else 0  # stale entries
            begin += pages[r]
            slots += [self._slot(table[r], p) for p in range(length - queries, length)]
        self.host_table = table
        self.table = table.to(device)[:, :width]
        self.slots = torch.tensor(slots + [PAD] * padded_tokens, dtype=torch.int64, device=device)
        kv_lengths = [length for _, length in requests] + [0] * padded_requests
        self.kv_lengths = torch.tensor(kv_lengths, dtype=torch.int32, device=device)
        starts = [0]
        for queries, _ in requests + [(0, 0)] * padded_requests:
            starts.append(starts[-1] + queries)
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device=device)
        self.max_query_length = max(queries for queries, _ in requests)
        self.max_kv_length = min(max(kv_lengths), width * page_tokens)

    def _slot(self, row, position):
        return int(row[position // self.page_tokens]) * self.page_tokens + position % self.page_tokens

    def step_arguments(self, **changed):
        arguments = dict(
            slots=self.slots,
            table=self.table,
            kv_lengths=self.kv_lengths,
            cu_seqlens_q=self.cu_seqlens_q,
            is_prefill=None,
            max_query_length=self.max_query_length,
            max_kv_length=self.max_kv_length,
        )
        return {**arguments, **changed}

    def write_past(self, layer):
        """What earlier steps stored."""
        for r, (k, v) in enumerate(self.past):
            if len(k) == 0:
                continue
            slots = torch.tensor([self._slot(self.host_table[r], p) for p in range(len(k))], device=self.device)
            layer.write(k, v, layer.queue.wrap(slots))

    def spoil(self, layer, window):
        """Pages below every query's window belong to somebody else by now: all bits set, NaN in every format."""
        memory = torch.from_dlpack(layer.pages.memory)
        memory[0] = 255  # the null block
        if window == 0:
            return
        for r, (queries, length) in enumerate(self.requests):
            for page in range(max(length - queries + 1 - window, 0) // self.page_tokens):
                memory[int(self.host_table[r, page])] = 255


def reference(batch, scale, window=0, soft_cap=0.0, sink_logits=None, alibi_slopes=None):
    """softmax(scale * q k^T) v of each request, in double: [tokens, heads, head_dim]."""
    group, begin, outs = batch.heads // batch.kv_heads, 0, []
    for (queries, length), (past_k, past_v) in zip(batch.requests, batch.past):
        rows = slice(begin, begin + queries)
        begin += queries
        k = torch.cat((past_k, batch.k[rows])).double().repeat_interleave(group, 1)
        v = torch.cat((past_v, batch.v[rows])).double().repeat_interleave(group, 1)
        logits = torch.einsum("thd,jhd->htj", batch.q[rows].double(), k) * scale
        if soft_cap:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        at = torch.arange(length - queries, length, device=batch.device)[:, None]
        key = torch.arange(length, device=batch.device)[None]
        if alibi_slopes is not None:
            logits = logits + alibi_slopes.double()[:, None, None] * (key - at)
        hidden = key > at
        if window:
            hidden |= key <= at - window
        logits = logits.masked_fill(hidden, float("-inf"))
        if sink_logits is not None:
            column = sink_logits.double()[:, None, None].expand(-1, queries, 1)
            weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        outs.append(torch.einsum("htj,jhd->thd", weights, v))
    return torch.cat(outs)
