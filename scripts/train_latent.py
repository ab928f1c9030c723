#!/usr/bin/env python3
"""Trains a small byte-level model with latent attention (transformers' DeepseekV3, no experts), for quality to be measured on.

usage: scripts/train_latent.py --out FOLDER [--minutes 5]

The text is what the machine has: Python sources, headers and documentation under sys.prefix and /usr. Two sets of whole files are
held out and written beside the model: eval.txt to predict, calibration.txt to calibrate with. Token id = byte; 256 starts a text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

SUFFIXES = {".py", ".rst", ".md", ".txt", ".h"}
HELD_OUT = 200_000  # bytes of each held-out text
START = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of the model (default: $OUT)")
    parser.add_argument("--minutes", type=float, default=5, help="training time (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10**9, help="stop after this many steps, whatever the time")
    parser.add_argument("--batch", type=int, default=16, help="windows per step (default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="bytes per window (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--corpus", type=float, default=200, help="megabytes of text at most (default: %(default)s)")
    parser.add_argument("--root", nargs="+", default=[sys.prefix, sys.base_prefix, "/usr"], help="where to look for text")
    options = parser.parse_args()
    if options.out is None:
        parser.error("--out is required where $OUT is not set")
    return options


def text_files(roots: list[str]) -> list[str]:
    """Every text file below the roots once, in an order that mixes the folders and depends on the names alone."""
    found = set()
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
            found.update(os.path.realpath(os.path.join(folder, name)) for name in names if Path(name).suffix in SUFFIXES)
    return sorted(found, key=lambda path: hashlib.sha256(path.encode()).digest())


def gather(roots: list[str], limit: float) -> list[bytes]:
    """Texts of 2 to 64 kB that are mostly letters (no tables of numbers), each content once."""
    texts, seen, total = [], set(), 0
    for path in text_files(roots):
        try:
            if not 2000 <= os.path.getsize(path) <= 64_000:
                continue
            text = Path(path).read_bytes()
            text.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text).digest()
        letters = len(text) - len(text.translate(None, b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))
        if digest in seen or 2 * letters < len(text):
            continue
        seen.add(digest)
        texts.append(text)
        total += len(text)
        if total >= limit:
            break
    return texts


def hold_out(texts: list[bytes]) -> bytes:
    """Removes files from the list until they are a held-out text."""
    held = bytearray()
    while len(held) < HELD_OUT and texts:
        held += texts.pop(0)
    return bytes(held[:HELD_OUT])


def make_model(options: argparse.Namespace) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=264,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        first_k_dense_replace=options.layers,  # no experts
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        kv_lora_rank=128,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=64,
        max_position_embeddings=options.context,
        bos_token_id=START,
        eos_token_id=START,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config)


def windows(data: torch.Tensor, offsets: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, which begin with START, and the bytes that they predict."""
    targets = data[offsets[:, None] + torch.arange(context, device=data.device)].long()
    inputs = torch.cat([torch.full_like(targets[:, :1], START), targets[:, :-1]], 1)
    return inputs, targets


def loss_of(model: DeepseekV3ForCausalLM, data: torch.Tensor, offsets: torch.Tensor, context: int) -> torch.Tensor:
    inputs, targets = windows(data, offsets, context)
    with torch.autocast(data.device.type, torch.bfloat16):
        logits = model(inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def train(model: DeepseekV3ForCausalLM, data: torch.Tensor, options: argparse.Namespace) -> int:
    """AdamW, warmed up and then decayed to 0 over the time that there is. Returns the steps taken."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=data.is_cuda)
    random = torch.Generator().manual_seed(0)
    begin, step, printed = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - begin) / (60 * options.minutes)) < 1 and step < options.steps:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 200) * (1 - done)
        offsets = torch.randint(len(data) - options.context, (options.batch,), generator=random).to(data.device)
        loss = loss_of(model, data, offsets, options.context)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 1 or time.monotonic() - printed > 10:
            printed = time.monotonic()
            print(f"step {step}, {printed - begin:.0f} s: {loss.item() / math.log(2):.3f} bits per byte", flush=True)
    return step


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = gather(options.root, options.corpus * 1e6)
    held = {name: hold_out(texts) for name in ("eval.txt", "calibration.txt")}
    data = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).to(device)
    model = make_model(options).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(texts)} files, {len(data) / 1e6:.1f} MB of text; {parameters / 1e6:.2f} million parameters; {device}", flush=True)
    steps = train(model, data, options)
    model.to(torch.bfloat16).eval()
    unseen = torch.frombuffer(bytearray(held["eval.txt"]), dtype=torch.uint8).to(device)
    offsets = torch.arange(0, min(len(unseen) - options.context, 32 * options.context), options.context, device=device)
    with torch.no_grad():
        losses = [loss_of(model, unseen, offset[None], options.context).item() for offset in offsets]
    bits = sum(losses) / len(losses) / math.log(2)
    options.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(options.out)
    for name, text in held.items():
        (options.out / name).write_bytes(text)
    facts = {
        "held_out_bits_per_byte": bits,
        "steps": steps,
        "tokens": steps * options.batch * options.context,
        "parameters": parameters,
        "text_bytes": len(data),
    }
    (options.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{steps} steps, {bits:.3f} bits per byte of held-out text; {options.out}", flush=True)


if __name__ == "__main__":
    main()
