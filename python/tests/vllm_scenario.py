"""What the scenarios of vllm_engine.py are made of: engines with Gyre's attention, and the comparison of tokens."""

import json

from vllm_reference import TOKENS, prompts

TINY, SWA = "tiny-d128", "small-swa-d256"
# Where an answer may part from transformers': the two best logits were this close. Sums are rounded in another order,
# and a compressed key or value may then be rounded to the next level.
TIE = 0.05
SCENARIOS = {}


# K and V of a scenario whose cache is calibrated begin with this: the formats are those behind it.
CALIBRATED = "calibrated "


# Scenarios that do not compare tokens: they have nothing to say about another model.
ONE_MODEL = {"refusals", "layer_features", "layer_refusals"}


class Skipped(Exception):
    pass


def scenario(model=TINY, k="tq8", v="tq4", environment=None, calibrated=False):
    def add(function):
        SCENARIOS[function.__name__] = (function, model, CALIBRATED * calibrated + k, v, environment or {})
        return function

    return add


def cache_memory(folder):
    """Bytes for two of the longest requests in f32, at least."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"] * config.get("head_dim", 128)
    return max(64 << 20, 2 * 2048 * config["num_hidden_layers"] * 2 * 4 * heads)


class Run:
    """One engine with Gyre's attention, in this process."""

    def __init__(self, folder, k, v, layers=None, **options):
        from vllm import LLM

        formats = {"k": k.removeprefix(CALIBRATED), "v": v, **({"layers": layers} if layers else {})}
        if k.startswith(CALIBRATED):
            formats["calibration"] = str(calibration_of(folder))
        usual = dict(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=2048,
            kv_cache_memory_bytes=cache_memory(folder),
            enforce_eager=True,
            max_num_seqs=16,
            attention_backend="CUSTOM",
            additional_config={"gyre": formats},
            disable_log_stats=False,
        )
        self.prompts = prompts(folder)
        self.llm = LLM(**{**usual, **options})

    def answers(self, asked=None):
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        outs = self.llm.generate([{"prompt_token_ids": p} for p in asked or self.prompts], sampling, use_tqdm=False)
        self.cached = sum(out.num_cached_tokens or 0 for out in outs)
        return [list(out.outputs[0].token_ids) for out in outs]

    def metric(self, name):
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)


def calibration_of(folder):
    return folder.with_suffix(".gyrecal")


def want(condition, message):
    if not condition:
        raise AssertionError(message)


def compare(answers, reference, tie=TIE):
    """How many are equal, and where the others part; parting anywhere but at a tie is an error."""
    equal, ties = 0, []
    for i, (got, wanted) in enumerate(zip(answers, reference, strict=True)):
        tokens = wanted["tokens"][: len(got)]
        if got == tokens:
            equal += 1
            continue
        at = next(t for t in range(len(tokens)) if got[t] != tokens[t])
        want(wanted["margins"][at] < tie, f"prompt {i} parts at token {at}, margin {wanted['margins'][at]:.3f}")
        ties.append(f"prompt {i} parts at token {at}, a tie of {wanted['margins'][at]:.3f}")
    return f"{equal} of {len(answers)} equal to transformers" + "".join(f"; {tie}" for tie in ties)
