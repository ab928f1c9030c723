"""What each of the processes of test_sharded.py does: every case, into a file of its rank."""

import dataclasses
import os
import pathlib
import warnings

import numpy as np
import torch
import torch.distributed as dist

import gyre
from gyre.sharded import ShardedCache

RANKS = 4


@dataclasses.dataclass
class Case:
    prompt: int  # tokens before the first query
    steps: list[int]  # tokens of each step
    k: str = "tq8"
    v: str = "tq4"
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    block: int = 16
    splits: int = 1
    soft_cap: float = 0.0
    has_sinks: bool = False
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.steps)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(5)
        shapes = ((self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.v_head_dim))
        return tuple(
            torch.randn((self.tokens, *shape), generator=random).to(getattr(torch, self.dtype)) for shape in shapes
        )

    def sink_logits(self) -> torch.Tensor | None:
        return torch.linspace(-2, 3, self.heads) if self.has_sinks else None


ONE_BY_ONE = [1] * 40
CASES = {
    "tq8-tq4": Case(131, ONE_BY_ONE),
    "tq4, splits": Case(131, ONE_BY_ONE, k="tq4", splits=16),
    "f16": Case(131, ONE_BY_ONE, k="f16", v="f16", heads=4, kv_heads=4),
    "f16 keys, splits": Case(77, ONE_BY_ONE, k="f16", heads=6, kv_heads=1, splits=3, dtype="float16"),
    "from nothing": Case(0, [1] * 70),  # ranks without keys, then all have some
    "from nothing, splits": Case(0, [1] * 20, splits=16, has_sinks=True),
    "blocks of 5": Case(13, ONE_BY_ONE, block=5),
    "value heads of 128": Case(50, ONE_BY_ONE, v_head_dim=128, soft_cap=5.0, has_sinks=True, dtype="bfloat16"),
    "blocks at once": Case(48, [16, 16, 7, 9, 1], splits=2),
    "one block has all": Case(100, [1, 4], block=512, k="tq8", v="tq8"),
}


def run_case(case: Case) -> dict[str, np.ndarray]:
    q, k, v = case.inputs()
    cache = ShardedCache(
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        capacity=case.tokens,
        k=case.k,
        v=case.v,
        block=case.block,
        splits=case.splits,
    )
    cache.append(k[: case.prompt], v[: case.prompt])
    outs, lses, keys, written, at = [], [], [], [], case.prompt
    for tokens in case.steps:
        part = slice(at, at := at + tokens)
        cache.append(k[part], v[part])
        lse = torch.zeros((tokens, case.heads))
        before = written_bytes()
        outs.append(cache.attend(q[part], soft_cap=case.soft_cap, sink_logits=case.sink_logits(), lse=lse))
        written.append(written_bytes() - before)
        lses.append(lse)
        keys.append([cache.keys(rank) for rank in range(RANKS)])
    return dict(out=torch.cat(outs).float().numpy(), lse=torch.cat(lses).numpy(), keys=keys, written=written)


def written_bytes() -> int:
    """By system calls of this process: gloo's sockets while a collective runs."""
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def refusal(call) -> str:
    try:
        call()
    except gyre.InvalidArgument as error:
        return str(error)
    return "nothing was refused"


def refusals(rank: int) -> list[str]:
    differs = refusal(lambda: ShardedCache(kv_heads=2, head_dim=64, capacity=100, block=16 if rank < 3 else 32))
    cache = ShardedCache(kv_heads=2, head_dim=64, capacity=100, block=16)
    tokens = torch.zeros(17, 2, 64)
    cache.append(tokens, tokens)
    return [differs, refusal(lambda: cache.attend(tokens[:2])), refusal(lambda: cache.append(tokens.int(), tokens))]


def work(rank: int, folder: str) -> None:
    os.environ["GYRE_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # written_bytes() would count what torch prints
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {f"{name}/{key}": value for name, case in CASES.items() for key, value in run_case(case).items()}
    results["refusals"] = refusals(rank)
    np.savez(f"{folder}/{rank}.npz", **results)
    dist.destroy_process_group()
