"""What the vLLM plugin does with latent pages (MLA) on a GPU, without vLLM: pages, tables and slots as vLLM 0.32 makes them, on torch's
stream, eager and captured in torch's CUDA graph, against a reference in double over the stored values.

    python python/tests/vllm_latent_cuda.py          needs torch with CUDA, and gyre; --cpu runs the eager part without a GPU
"""

import argparse
import sys

import torch
from vllm_contract_cuda import DEVICE, Ordinary, captured, check, failures
from vllm_latent_contract import LATENT, ROTARY, SCALE, Projections, batch_of, calibration_of, decode, error_of, layer_of, prefill, reference

from gyre.integrations.vllm import latent
from gyre.integrations.vllm.calibration import latent_calibration
from gyre.integrations.vllm.config import Formats
from gyre.integrations.vllm.pages import Queue, Workload

PAIRS = [("f16", "f16"), ("bf16", "bf16"), ("tq8", "tq8"), ("tq4", "tq8"), ("tq4", "bf16")]
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-5}  # mean square errors, of the mean square


class Latent(Ordinary):
    scale = SCALE

    def __init__(self, heads):
        self.heads = heads

    def batch(self, page, requests, *padding, **options):
        names = dict(zip(("padded_requests", "padded_tokens"), padding))
        return batch_of(DEVICE, self.heads, page, requests, **names, **options)

    def layer(self, queue, formats, blocks, page):
        return layer_of(queue, formats, blocks, page, DEVICE)

    def out(self, batch):
        return torch.zeros(*batch.q.shape[:2], LATENT, dtype=batch.q.dtype, device=batch.device)

    def error(self, out, batch, formats):
        return error_of(out[: batch.tokens], reference(batch, batch.q, formats))

    def bound(self, formats, dtype):
        return BOUNDS[dtype]


def stored(queue, formats, batch, layer_calibration=None):
    layer = layer_of(queue, formats, batch.blocks, batch.page_tokens, batch.device, layer_calibration=layer_calibration)
    batch.write_past(layer)
    if batch.device.type == "cuda":
        torch.cuda.synchronize()
    batch.spoil(layer, 0)
    return layer


def eager(queue, device):
    """Ragged steps: decodes, drafts, chunks of prompts, first chunks; padding of requests and tokens; stale table entries; in one call
    and in parts; absorbed over all that is stored, and as prompts over what lies before their new tokens."""
    requests, first = [(1, 26), (1, 900), (5, 777), (64, 300), (1, 65), (13, 13), (1, 1)], 3
    most = latent.MAX_ROWS
    for k, v in PAIRS:
        formats = Formats(k, v)
        for dtype in BOUNDS:
            for heads, page, rows in [(16, 64, most), (128, 16, most), (16, 128, 16 * 20)]:
                latent.MAX_ROWS = rows
                name = f"eager {k}/{v} {str(dtype)[6:]} {heads} heads, page {page}, {'one call' if rows == most else 'parts'}"
                batch = batch_of(device, heads, page, requests, padded_requests=2, padded_tokens=3, seed=page, dtype=dtype)
                out, _ = decode(stored(queue, formats, batch), batch)
                check(name, error_of(out[: batch.tokens], reference(batch, batch.q, formats)), BOUNDS[dtype])
                check(name + ": rows of no request", 0.0 if (out[batch.tokens :] == 7).all() else 1.0, 0)
                batch = batch_of(device, heads, page, requests, padded_tokens=3, seed=page, dtype=dtype)
                projections = Projections(batch)
                out, _ = prefill(stored(queue, formats, batch), batch, projections, first)
                expected = projections.expand(reference(batch, projections.absorbed(), formats, stored=False))
                # Absorbed queries and latents are rounded to the dtype on the way.
                check(name + ", prompts", error_of(out, expected[7:]), 3 * BOUNDS[dtype])
    latent.MAX_ROWS = most


def calibrated(queue, device):
    """Ragged steps and chunks of prompts over calibrated latents."""
    requests, first = [(1, 26), (1, 400), (5, 177), (64, 300), (13, 13)], 3
    for k, v, transform in (("tq4", "tq8", True), ("tq4", "bf16", True), ("tq8", "tq8", False)):
        formats = Formats(k, v)
        own = latent_calibration(calibration_of(transform=transform), 0, formats, (LATENT, ROTARY), True)
        for dtype, bound in BOUNDS.items():
            name = f"calibrated {k}/{v} {str(dtype)[6:]}, {'transform' if transform else 'feedback alone'}"
            batch = batch_of(device, 16, 64, requests, padded_tokens=3, seed=3, dtype=dtype)
            out, _ = decode(stored(queue, formats, batch, own), batch)
            check(name, error_of(out[: batch.tokens], reference(batch, batch.q, formats, layer_calibration=own)), bound)
            projections = Projections(batch)
            out, _ = prefill(stored(queue, formats, batch, own), batch, projections, first)
            expected = projections.expand(reference(batch, projections.absorbed(), formats, stored=False, layer_calibration=own))
            check(name + ", prompts", error_of(out, expected[7:]), 3 * bound)


def prepared(queue):
    """The largest steps are prepared; steps within them allocate nothing."""
    shape = dict(heads=16, kv_heads=1, head_dim=LATENT, v_head_dim=ROTARY, page_tokens=64, latent=True)
    queue.prepare(Workload(Formats("tq4", "tq8"), window=0, dtype=torch.bfloat16, tokens=512, sequences=8, max_kv_length=4096, drafts=3, **shape))
    before = queue.device.memory().system_allocations
    batch = batch_of(DEVICE, 16, 64, [(4, 4000), (200, 900), (1, 77)], seed=9, dtype=torch.bfloat16)
    layer = layer_of(queue, Formats("tq4", "tq8"), batch.blocks, 64, DEVICE)
    batch.write_past(layer)
    out, _ = decode(layer, batch)
    torch.cuda.synchronize()
    check("prepared: allocations", queue.device.memory().system_allocations - before, 0)
    check("prepared", error_of(out, reference(batch, batch.q, Formats("tq4", "tq8"))), BOUNDS[torch.bfloat16])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true", help="the eager part, on the CPU")
    device = torch.device("cpu") if parser.parse_args().cpu else DEVICE
    if device == DEVICE and not torch.cuda.is_available():
        print("skipped: torch has no CUDA device here")
        return 0
    queue = Queue(device)
    with torch.no_grad():
        eager(queue, device)
        calibrated(queue, device)
        if device == DEVICE:
            print(torch.__version__, torch.cuda.get_device_name(0))
            for k, v in PAIRS:
                captured(queue, Formats(k, v), 1, torch.bfloat16, kind=Latent(16))
            for heads, queries in ((16, 5), (128, 1), (128, 4), (16, 1)):  # larger steps use the scratch memory in between
                captured(queue, Formats("tq4", "tq8"), queries, torch.bfloat16, kind=Latent(heads))
            prepared(Queue(device))
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
