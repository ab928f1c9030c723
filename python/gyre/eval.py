"""What a compressed KV cache costs a real model: python -m gyre.eval MODEL_DIR TEXT

Every format predicts the same text, one token at a time or in steps of several, through its own cache, side by side with
an f16 cache. Printed are how well the text was predicted, how far the predictions are from those of the f16 cache, and
the memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import gyre
from gyre.integrations.transformers import GyreCache

REFERENCE = "f16"
FORMATS = ("f16", "tq8", "tq6", "tq4", "tq8/tq4", "tq3", "tq2")
BYTE_START = 256  # of byte-level models: ids below are bytes


@dataclass(frozen=True)
class Setting:
    """One row: how keys and values are stored."""

    k: str
    v: str
    tail: int = 0
    sinks: int = 0

    @property
    def name(self) -> str:
        return self.k if self.k == self.v else f"{self.k}/{self.v}"


@dataclass
class Row:
    format: str
    tail: int
    bits: float  # per token
    perplexity: float
    kld_mean: float
    kld_999: float
    kld_max: float
    same_top1: float
    bytes_per_token: float


def settings(formats: list[str], tail: int = 0, sinks: int = 0) -> list[Setting]:
    """Every format ("tq4", or "tq8/tq4" for keys / values) once, and again with a tail where it is compressed."""
    rows = []
    for name in formats:
        k, separator, v = name.partition("/")
        v = v if separator else k
        gyre.KvLayer(k, v)  # refuses what is no format, before a model is loaded
        if {k, v} <= {"f32", "f16", "bf16"}:
            rows.append(Setting(k, v))
            continue
        rows.append(Setting(k, v, 0, sinks))
        if tail:
            rows.append(Setting(k, v, tail, sinks))
    return list(dict.fromkeys(rows))


def read_windows(model_dir: str, text: bytes, context: int, windows: int) -> tuple[list[torch.Tensor], str]:
    """Texts of `context` tokens to predict, one after the other, each with a token before it; and what a token is."""
    if not os.path.isdir(model_dir):  # otherwise the name of a model on the network
        raise gyre.InvalidArgument(f"eval: the model must be a folder, {model_dir} is none")
    config = AutoConfig.from_pretrained(model_dir).get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) or context
    if context > positions:
        raise gyre.InvalidArgument(f"eval: the model was made for {positions} positions, a context of {context} is more")
    if not any(os.path.exists(os.path.join(model_dir, name)) for name in ("tokenizer.json", "tokenizer_config.json")):
        if config.vocab_size <= BYTE_START or config.vocab_size > 2 * BYTE_START:
            raise gyre.InvalidArgument(
                f"eval: {model_dir} has no tokenizer and {config.vocab_size} tokens: not a byte-level model"
            )
        ids, start, unit = list(text), BYTE_START, "byte"
    else:
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        try:
            ids = tokenizer(text.decode("utf-8"), add_special_tokens=False)["input_ids"]
        except UnicodeDecodeError as error:
            raise gyre.InvalidArgument(f"eval: the text is not UTF-8: {error}") from None
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise gyre.InvalidArgument(f"eval: the tokenizer of {model_dir} has no token that starts or ends a text")
        unit = "token"
    if windows * context > len(ids):
        needed = windows * context
        raise gyre.InvalidArgument(
            f"eval: {windows} windows of {context} need {needed} {unit}s, the text has {len(ids)}"
        )
    return [torch.tensor([start, *ids[i * context : (i + 1) * context]]) for i in range(windows)], unit


class Statistics:
    """Of one row: what is kept per position is small, whatever the vocabulary."""

    def __init__(self):
        self.nats: list[float] = []
        self.kld: list[float] = []
        self.same: list[bool] = []

    def add(self, log_p: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """log_p, reference: [tokens, vocabulary]."""
        self.nats.extend((-log_p.gather(-1, targets[:, None])[:, 0]).tolist())
        self.kld.extend((reference.exp() * (reference - log_p)).sum(-1).clamp(min=0.0).tolist())
        self.same.extend((log_p.argmax(-1) == reference.argmax(-1)).tolist())

    def row(self, setting: Setting, bytes_per_token: float) -> Row:
        nats = math.fsum(self.nats) / len(self.nats)
        kld = torch.tensor(self.kld, dtype=torch.float64)
        return Row(
            setting.name,
            setting.tail,
            nats / math.log(2),
            math.exp(nats),
            kld.mean().item(),
            kld.quantile(0.999).item(),
            kld.max().item(),
            sum(self.same) / len(self.same),
            bytes_per_token,
        )


def evaluate(
    model,
    texts: list[torch.Tensor],
    wanted: list[Setting],
    device: gyre.Device | None = None,
    progress: bool = True,
    step: int = 1,
) -> list[Row]:
    """One row per setting, in order. texts: token ids, the first of each is not predicted. device: of the caches; by
    default where the model is. step: tokens that pass through model and cache at a time."""
    reference = Setting(REFERENCE, REFERENCE)
    every = [reference] + [setting for setting in wanted if setting != reference]
    statistics = {setting: Statistics() for setting in every}
    size = {}
    tokens = sum(len(text) - 1 for text in texts) * len(every)
    with torch.inference_mode(), tqdm(total=tokens, unit="token", file=sys.stderr, disable=not progress) as bar:
        for text in texts:
            ids = text.to(model.device)
            capacity = len(text) - 1
            caches = {
                s: GyreCache(
                    model.config,
                    k=s.k,
                    v=s.v,
                    tail=s.tail,
                    sinks=s.sinks,
                    capacity=capacity,
                    step_tokens=step,
                    device=device,
                )
                for s in every
            }
            for begin in range(0, capacity, step):
                end = min(begin + step, capacity)
                expected = None
                for setting, cache in caches.items():
                    logits = model(ids[None, begin:end], past_key_values=cache, use_cache=True).logits[0]
                    log_p = logits.double().log_softmax(-1)
                    expected = log_p if expected is None else expected
                    statistics[setting].add(log_p, expected, ids[begin + 1 : end + 1])
                bar.update(len(every) * (end - begin))
            size = {setting: cache.nbytes / cache.get_seq_length() for setting, cache in caches.items()}
    return [statistics[setting].row(setting, size[setting]) for setting in wanted]


def table(rows: list[Row], unit: str) -> str:
    predicted = "bits per byte" if unit == "byte" else "perplexity"
    lines = [
        f"| K/V | tail | {predicted} | KLD mean | KLD 99.9 % | same top 1 | cache bytes per token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        value = row.bits if unit == "byte" else row.perplexity
        lines.append(
            f"| {row.format} | {row.tail} | {value:.4f} | {row.kld_mean:.2e} | {row.kld_999:.2e} | "
            f"{100 * row.same_top1:.2f} % | {row.bytes_per_token:.0f} |"
        )
    return "\n".join(lines)


def check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # the latter: PyTorch was built without CUDA
        raise gyre.InvalidArgument(f"eval: no device {name}: {str(error).splitlines()[0]}") from None


def check_chart(path: str) -> None:
    """What would make plot() fail is said before hours of work, not after."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise gyre.Unsupported("eval: a chart needs matplotlib, which is not installed") from None
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = os.path.splitext(path)[1][1:].lower()
    if suffix not in known:
        raise gyre.InvalidArgument(f"eval: a chart must end in one of {', '.join(known)}; got {path}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise gyre.InvalidArgument(f"eval: there is no folder {folder} for the chart")


def plot(rows: list[Row], title: str, path: str) -> None:
    """Divergence over memory, one point per row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for tail in sorted({row.tail for row in rows}):
        points = sorted(
            (row.bytes_per_token, row.kld_mean, row.format) for row in rows if row.tail == tail and row.kld_mean
        )
        if not points:
            continue
        axes.plot(*zip(*[point[:2] for point in points]), "o", label=f"tail {tail}" if tail else "no tail")
        for x, y, name in points:
            axes.annotate(name, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=9)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(yscale="log", xlabel="cache bytes per token", ylabel=f"mean KL divergence from {REFERENCE}", title=title)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)


def at_least(least: int):
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gyre.eval", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a Hugging Face causal language model")
    parser.add_argument("text", help="file to predict")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(FORMATS),
        metavar="K[/V]",
        help="formats of keys and values (default: %(default)s)",
    )
    parser.add_argument("--context", type=at_least(1), default=4096, help="tokens predicted per window (default: %(default)s)")
    parser.add_argument("--windows", type=at_least(1), default=1, help="windows, from the start of the text (default: 1)")
    parser.add_argument(
        "--tail",
        type=at_least(0),
        default=128,
        help="compressed formats also run with so many of the newest tokens in 16 bits (default: 128)",
    )
    parser.add_argument(
        "--step",
        type=at_least(1),
        default=1,
        help="tokens at a time: 1 decodes, more is what a prompt does (default: 1)",
    )
    parser.add_argument("--sinks", type=at_least(0), default=0, help="the first tokens that stay in 16 bits (default: 0)")
    parser.add_argument("--device", default="cpu", help="of the model and the cache (default: cpu)")
    parser.add_argument(
        "--threads",
        type=at_least(0),
        default=0,
        help="CPU threads; for small models 1 is faster (default: as torch and Gyre choose)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16"),
        help="of the model (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--plot", metavar="FILE", help="write a chart (needs matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    try:
        wanted = settings(options.formats, options.tail, options.sinks)
        check_device(options.device)
        if options.plot:
            check_chart(options.plot)
        with open(options.text, "rb") as file:
            texts, unit = read_windows(options.model, file.read(), options.context, options.windows)
        device = None
        if options.threads:
            torch.set_num_threads(options.threads)
            device = gyre.Device("cpu", threads=options.threads) if options.device == "cpu" else None
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="gyre"
        )
        model = model.to(options.device).eval()
        rows = evaluate(model, texts, wanted, device, not options.quiet, options.step)
    except (gyre.Error, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    about = {
        "model": os.path.basename(os.path.normpath(options.model)),
        "text": os.path.basename(options.text),
        "unit": unit,
        "windows": len(texts),
        "context": options.context,
        "step": options.step,
        "positions": sum(len(text) - 1 for text in texts),
        "dtype": options.dtype,
        "device": options.device,
        "reference": REFERENCE,
    }
    title = (
        f"{about['model']}: {about['windows']} x {about['context']} {unit}s of {about['text']}, "
        f"{'decoded one by one' if options.step == 1 else f'in steps of {options.step}'}, {about['positions']} positions"
    )
    if options.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"{title}; KL divergence from {REFERENCE}\n\n{table(rows, unit)}")
    if options.plot:
        plot(rows, title, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
