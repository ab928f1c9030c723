"""Sequence-sharded decode: a context larger than one device, over torch.distributed (NCCL, gloo).

    torch.distributed.init_process_group("nccl")
    cache = ShardedCache(kv_heads=8, head_dim=128, capacity=4_000_000, device="cuda")   # one for each layer
    cache.append(k, v)          # every rank calls it with the new tokens, and stores its own
    out = cache.attend(q)       # the same on every rank

Blocks of tokens go round the ranks, so that all have as many keys, give or take a block. Every rank attends over its
keys, the states are gathered, 4 * heads * (v_head_dim + 2) bytes a rank and token, and every rank merges all of them in
the order of the ranks: the bits are those of one process that holds all keys and cuts them in the same way.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

import gyre

__all__ = ["ShardedCache"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _refused(message: str) -> gyre.InvalidArgument:
    return gyre.InvalidArgument(f"gyre.sharded: {message}")


class ShardedCache:
    """The keys and values of one layer, over the ranks of a group. Ranks make the same calls in the same order.

    capacity: tokens of all ranks together; each rank takes the memory of its part.
    k, v: how keys and values are stored: "f32", "f16", "bf16", "tq8" ... "tq2".
    block: this many consecutive tokens have one owner. Queries of one attend() must lie in one block.
    splits: a rank's keys are cut into this many splits, which are computed in parallel and merged before anything is sent.
    group: the ranks; by default all.
    device: where this rank's tensors are, a torch.device or its name.
    """

    def __init__(
        self,
        *,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        v_head_dim: int | None = None,
        k: str = "tq8",
        v: str = "tq4",
        block: int = 512,
        splits: int = 16,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ):
        numbers = dict(kv_heads=kv_heads, head_dim=head_dim, capacity=capacity, block=block, splits=splits)
        for name, value in numbers.items():
            if value <= 0:
                raise _refused(f"{name} must be positive, got {value}")
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.v_head_dim = v_head_dim or head_dim
        _check_same(dict(numbers, v_head_dim=self.v_head_dim, k=k, v=v), self.ranks, group)
        self.capacity, self.block, self.splits = capacity, block, splits
        self.length = 0  # tokens, of all ranks together
        self.torch_device = _with_index(torch.device(device))
        self._device = gyre.Device(str(self.torch_device))
        self._encoder = gyre.Encoder(self._device)
        share = -(-capacity // (block * self.ranks)) * block
        shape = dict(kv_heads=kv_heads, capacity=share)
        self._k = gyre.KvBuffer.allocate(self._device, format=k, role="k", head_dim=head_dim, **shape)
        self._v = gyre.KvBuffer.allocate(self._device, format=v, role="v", head_dim=self.v_head_dim, **shape)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank stores."""
        return self._k.nbytes + self._v.nbytes

    def owner(self, position: int) -> int:
        """The rank that stores the token at this position."""
        return position // self.block % self.ranks

    def keys(self, rank: int) -> int:
        """Tokens that a rank holds."""
        rounds, rest = divmod(self.length, self.block * self.ranks)
        return rounds * self.block + min(max(rest - rank * self.block, 0), self.block)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """New tokens: k [tokens, kv_heads, head_dim] and v, all of them on every rank."""
        tokens = self._check_tokens(k, v)
        new_k, new_v = self._wrap(k), self._wrap(v)
        begin = 0
        while begin < tokens:
            position = self.length + begin
            count = min(tokens - begin, self.block - position % self.block)
            if self.owner(position) == self.rank:
                slot = position // (self.block * self.ranks) * self.block + position % self.block
                self._store(new_k, new_v, position=slot, source_begin=begin, tokens=count)
            begin += count
        self._run()
        self.length += tokens

    def attend(
        self,
        q: torch.Tensor,
        *,
        scale: float | None = None,
        soft_cap: float = 0.0,
        sink_logits: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, head_dim], the newest tokens, over all keys up to their own: [tokens, heads, v_head_dim].

        scale: of the dot product; 1 / sqrt(head_dim) if not given. sink_logits: f32 [heads], one more logit per head, whose
        value is 0. lse: f32 [tokens, heads], written.
        """
        tokens, heads = self._check_queries(q)
        scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
        state = self._attend_here(q, scale, soft_cap)
        states = torch.empty((self.ranks, *state.shape[1:]), dtype=state.dtype, device=state.device)
        dist.all_gather_into_tensor(states, state, group=self.group)
        out = torch.empty((tokens, heads, self.v_head_dim), dtype=q.dtype, device=q.device)
        self._merge(states, out, lse, sink_logits)
        return out

    def rollback(self, tokens: int) -> None:
        """Drops the newest."""
        if not 0 <= tokens <= self.length:
            raise _refused(f"rollback of {tokens} tokens, but there are {self.length}")
        self.length -= tokens

    def _attend_here(self, q: torch.Tensor, scale: float, soft_cap: float) -> torch.Tensor:
        """The state of this rank's keys, [1, tokens, heads, v_head_dim + 2]."""
        tokens, heads, _ = q.shape
        shape = gyre.attention_partial_shape(self.splits, q.shape, self.v_head_dim)
        partial = torch.empty(shape, dtype=torch.float32, device=q.device)
        gyre.attention_partial(
            self._encoder,
            self._wrap(q),
            self._k,
            self._v,
            self._wrap(partial),
            length=self.keys(self.rank),
            scale=scale,
            soft_cap=soft_cap,
            # Others have none of the queries' own keys: all that they have is older.
            causal=self.owner(self.length - 1) == self.rank,
        )
        if self.splits == 1:
            self._run()
            return partial
        out = torch.empty((tokens, heads, self.v_head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
        self._merge(partial, out, lse, None)
        # A softmax that is already divided by its sum: the sum of exp(logit - lse) is 1, and 0 where there is no key.
        total = (lse != -math.inf).float()
        return torch.cat([out, lse.unsqueeze(-1), total.unsqueeze(-1)], dim=-1).unsqueeze(0)

    def _merge(
        self, states: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, sink_logits: torch.Tensor | None
    ) -> None:
        lse, sink_logits = (None if tensor is None else self._wrap(tensor) for tensor in (lse, sink_logits))
        gyre.attention_merge(self._encoder, self._wrap(states), self._wrap(out), lse=lse, sink_logits=sink_logits)
        self._run()

    def _store(self, k: gyre.Tensor, v: gyre.Tensor, **where: int) -> None:
        for role, new, buffer in (("k", k, self._k), ("v", v, self._v)):
            if buffer.scales is None:
                gyre.kv_copy(self._encoder, new, buffer.codes.permute([1, 0, 2]), **where)
            else:
                gyre.kv_quantize(self._encoder, **{role: new, f"{role}_cache": buffer}, **where)

    def _check_tokens(self, k: torch.Tensor, v: torch.Tensor) -> int:
        for name, given, buffer in (("k", k, self._k), ("v", v, self._v)):
            inner = (buffer.kv_heads, buffer.head_dim)
            if given.dim() != 3 or given.shape[1:] != inner or given.shape[0] != k.shape[0]:
                raise _refused(f"{name} must be [tokens, {inner[0]}, {inner[1]}], got {list(given.shape)}")
            # Only a token's owner stores it, but all ranks must refuse it.
            if given.dtype not in _DTYPES or given.stride(2) != 1:
                raise _refused(
                    f"{name} must be float32, float16 or bfloat16 with contiguous head_dim, got {given.dtype} with "
                    f"strides {list(given.stride())}"
                )
        if self.length + k.shape[0] > self.capacity:
            raise _refused(f"there is room for {self.capacity} tokens, {self.length} are there, got {k.shape[0]}")
        return k.shape[0]

    def _check_queries(self, q: torch.Tensor) -> tuple[int, int]:
        if q.dim() != 3 or not 0 < q.shape[0] <= self.length:
            raise _refused(f"q must be [tokens, heads, head_dim], of 1 to {self.length} tokens, got {list(q.shape)}")
        first = self.length - q.shape[0]
        if self.ranks > 1 and first // self.block != (self.length - 1) // self.block:
            raise _refused(
                f"the queries must lie in one block of {self.block} tokens, got {first} to {self.length - 1}: append "
                "and attend block by block"
            )
        return q.shape[0], q.shape[1]

    def _wrap(self, tensor: torch.Tensor) -> gyre.Tensor:
        return gyre.from_dlpack(tensor.detach(), self._device, ordered=False)

    def _run(self) -> None:
        """Where torch's work runs: at once on the CPU, on the current stream on a GPU, which the gather follows."""
        if self.torch_device.type == "cpu":
            self._encoder.submit().wait()
        else:
            self._encoder.submit_on(torch.cuda.current_stream(self.torch_device).cuda_stream)


def _with_index(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise _refused(f"the device must be a CPU or a CUDA device, got {device}")
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _check_same(local: dict, ranks: int, group: dist.ProcessGroup | None) -> None:
    """Ranks that were made differently would wait for each other, or merge what does not belong together."""
    everyones: list = [None] * ranks
    dist.all_gather_object(everyones, local, group=group)
    for rank, theirs in enumerate(everyones):
        for name, value in theirs.items():
            if value != everyones[0][name]:
                raise _refused(f"{name} must be the same on all ranks, rank 0 has {everyones[0][name]}, {rank} {value}")
