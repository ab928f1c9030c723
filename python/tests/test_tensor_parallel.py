"""Tensor parallel Hugging Face models: two processes over gloo, each with its share of the KV heads in a GyreCache."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # transformers loads shards with it
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from hf_models import load, prompt, stored_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from gyre.integrations.transformers import GyreCache

RANKS = 2
GREEDY = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False)
# Sums over the ranks are rounded differently; now and then that moves a compressed coordinate to the next level.
MAX_ERROR = {("f32", "f32"): 1e-3, ("tq8", "tq4"): 0.25}


class Watched(GyreCache):
    """Notes how many KV heads it is given."""

    kv_heads = 0

    def update(self, key_states, *args, **kwargs):
        self.kv_heads = key_states.shape[1]
        return super().update(key_states, *args, **kwargs)


def cached(model, formats):
    return Watched(model.config, k=formats[0], v=formats[1], capacity=512)


def run(model, ids):
    """Greedy tokens, logits of the prompt, KV heads and bytes, for each pair of formats."""
    found = {}
    for formats in MAX_ERROR:
        cache = cached(model, formats)
        tokens = model.generate(ids, past_key_values=cache, **GREEDY)[0]
        with torch.no_grad():
            logits = model(ids, past_key_values=cached(model, formats)).logits[0].clone()
        found[formats] = (tokens, logits, cache.kv_heads, cache.nbytes)
    return found


def work(rank, folder, path, ids):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), GYRE_THREADS="1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="gyre",
        distributed_config=DistributedConfig(tp_size=RANKS, tp_plan="auto"),
    ).eval()
    torch.save(run(model, ids), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["tiny-d128", "small-swa-d256"])
def test_ranks_generate_what_one_process_does(name, tmp_path):
    path, ids = stored_model(name), prompt(200)
    alone = run(load(path, "gyre"), ids)
    torch.multiprocessing.spawn(work, (str(tmp_path), path, ids), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for formats, most in MAX_ERROR.items():
        tokens, logits, heads, nbytes = alone[formats]
        for rank in ranks:
            rank_tokens, rank_logits, rank_heads, rank_nbytes = rank[formats]
            assert (rank_logits - logits).abs().max() < most
            assert (rank_heads, heads) == (1, 2)
            assert nbytes / RANKS <= rank_nbytes < 1.05 * nbytes / RANKS  # each has its own bookkeeping
            assert torch.equal(rank_tokens, ranks[0][formats][0])
            if formats == ("f32", "f32"):
                assert torch.equal(rank_tokens, tokens)
