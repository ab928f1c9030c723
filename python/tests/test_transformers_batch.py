"""Batches on a GyreCache: padding, beams, several returned sequences, sequences that share what they begin with."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import BYTE_START, RANDOM, TEXT, load, padded, random_model, random_tokens, stored_model

import gyre
from gyre.integrations.transformers import GyreCache

FEW = dict(max_new_tokens=15, min_new_tokens=15, do_sample=False)
LENGTHS = [30, 7, 1, 19]


def exact(model, **options) -> GyreCache:
    return GyreCache(model.config, k="f32", v="f32", **options)


def random_rows() -> list[torch.Tensor]:
    return [random_tokens(60)[0, i : i + length] for i, length in enumerate(LENGTHS)]


@torch.no_grad()
def logits(model, ids, cache, mask=None) -> torch.Tensor:
    """With positions that do not count padding, as generate() makes them."""
    positions = None
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(ids, past_key_values=cache, use_cache=True, attention_mask=mask, position_ids=positions).logits


@pytest.mark.parametrize("k, v", [("f32", "f32"), ("tq8", "tq4")])
@pytest.mark.parametrize("name", ["tiny-d128", "small-swa-d256"])
def test_eight_padded_rows_are_eight_texts_alone(name, k, v):
    model = load(stored_model(name), "gyre")
    text = TEXT.read_bytes()
    # One is longer than the window of small-swa-d256 and a step of the cache, one than two pages.
    lengths = [610, 1, 40, 64, 65, 130, 17, 300]
    rows = [torch.tensor([BYTE_START, *text[50 * i : 50 * i + n - 1]]) for i, n in enumerate(lengths)]
    ids, mask = padded(rows)
    few = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False)
    cache = GyreCache(model.config, k=k, v=v)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **few)[:, ids.shape[1] :]
    assert cache.batch_size == 8 and cache.get_seq_length() == 610 + 29
    for row, given in zip(rows, together):
        alone = GyreCache(model.config, k=k, v=v)
        expected = model.generate(row[None], past_key_values=alone, **few)[0, len(row) :]
        assert given.tolist() == expected.tolist()


@pytest.mark.parametrize("options", [dict(), dict(step_tokens=4)])
@pytest.mark.parametrize("name", RANDOM)
def test_left_padding_is_that_of_stock_attention(name, options):
    ids, mask = padded(random_rows())
    expected = random_model(name, "eager").generate(ids, attention_mask=mask, **FEW)
    model = random_model(name, "gyre")
    cache = exact(model, **options)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **FEW), expected)
    in_chunks = dict(past_key_values=exact(model, **options), prefill_chunk_size=9)
    assert torch.equal(model.generate(ids, attention_mask=mask, **in_chunks, **FEW), expected)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3-window-13", "gpt-oss-sinks-window-6"])
def test_padding_on_both_sides_in_a_second_prompt(name, left):
    """Two prompts and three steps, rows of different lengths; each row has the logits that it has alone."""
    model = random_model(name, "gyre")
    firsts, seconds = random_rows(), [row.flip(0)[:9] for row in random_rows()[::-1]]
    ids, mask = padded(firsts, left=left)
    more, more_mask = padded(seconds, left=not left)
    last = random_tokens(3)
    cache = exact(model, step_tokens=8)
    parts = [logits(model, ids, cache, mask)]
    mask = torch.cat([mask, more_mask], 1)
    parts.append(logits(model, more, cache, mask))
    for i in range(3):
        mask = torch.cat([mask, torch.ones(4, 1, dtype=mask.dtype)], 1)
        parts.append(logits(model, last[:, i : i + 1].repeat(4, 1), cache, mask))
    given = torch.cat(parts, 1)
    for row, (first, second) in enumerate(zip(firsts, seconds)):
        alone = logits(model, torch.cat([first, second, last[0]])[None], exact(model))[0]
        torch.testing.assert_close(given[row][mask[row].bool()], alone, rtol=1e-4, atol=1e-4)


def test_padding_of_one_row():
    model = random_model("qwen3-window-13", "gyre")
    ids, mask = padded([random_tokens(12)[0]], columns=20)
    cache = exact(model)
    assert logits(model, ids, cache, mask)[0, 8:].allclose(logits(model, ids[:, 8:], exact(model)), atol=1e-5)
    assert cache.get_seq_length() == 20 and cache.layers[0].store.cache.length == 12


@pytest.mark.parametrize("k, v", [("f32", "f32"), ("tq8", "tq4")])
def test_pages_have_the_bits_of_a_cache(k, v):
    """In layers that see all keys."""
    model = random_model("llama", "gyre")
    ids = random_tokens(150)
    caches = [GyreCache(model.config, k=k, v=v, tail=0, sink_tokens=0, step_tokens=64, paged=paged) for paged in (False, True)]
    for part in ids.split([100, 1, 1, 9, 1, 38], 1):
        linear, paged = (logits(model, part, cache) for cache in caches)
        assert torch.equal(linear, paged)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device here")
@pytest.mark.parametrize("name", ["llama", "qwen3-window-13", "gpt-oss-sinks-window-6"])
def test_padding_and_beams_on_cuda(name):
    ids, mask = (x.cuda() for x in padded(random_rows()))
    stock, model = random_model(name, "eager").cuda(), random_model(name, "gyre").cuda()
    for options in (FEW, dict(num_beams=4, max_new_tokens=8, do_sample=False)):
        expected = stock.generate(ids, attention_mask=mask, use_cache=False, **options)
        cache = exact(model, step_tokens=8)
        assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=cache, **options), expected)
        assert all("cuda" in layer.store.shape.device.name for layer in cache.layers)


@pytest.mark.parametrize("name", ["llama", "qwen3-window-13", "gemma3-window-1", "gpt-oss-sinks-window-6"])
def test_beams(name):
    ids, mask = padded(random_rows())
    beams = dict(num_beams=4, num_return_sequences=2, max_new_tokens=8, do_sample=False, attention_mask=mask)
    # Without a cache: stock caches keep too much of a window of 1.
    expected = random_model(name, "eager").generate(ids, use_cache=False, **beams)
    model = random_model(name, "gyre")
    assert torch.equal(model.generate(ids, past_key_values=exact(model), **beams), expected)


def test_beams_share_pages():
    model = random_model("llama", "gyre", max_position_embeddings=2048)
    cache = exact(model)
    model.generate(random_tokens(400), past_key_values=cache, num_beams=4, max_new_tokens=4)
    assert cache.batch_size == 4
    for group in cache.describe():  # 6 full pages that all have and, where beams parted, one of their own each
        assert group.used <= 6 + 4 and group.shared >= 6


def test_several_returned_sequences():
    sample = dict(max_new_tokens=20, do_sample=True, num_return_sequences=5)
    ids = random_tokens(20)
    texts = []
    for attention in ("eager", "gyre"):
        model = random_model("gemma3-window-5", attention)
        torch.manual_seed(3)
        more = {"past_key_values": exact(model)} if attention == "gyre" else {}
        texts.append(model.generate(ids, **sample, **more))
    assert torch.equal(*texts) and len({tuple(row) for row in texts[0].tolist()}) == 5


@pytest.mark.parametrize("name", ["qwen3", "qwen3-window-13"])
def test_assisted_decoding_over_pages(name):
    ids = random_tokens(20)
    expected = random_model(name, "eager").generate(ids, **FEW)
    model, assistant = random_model(name, "gyre"), random_model("qwen3", "eager")
    cache = exact(model, paged=True)
    assert torch.equal(model.generate(ids, past_key_values=cache, assistant_model=assistant, **FEW), expected)
    assert torch.equal(
        model.generate(ids, past_key_values=exact(model, paged=True), prompt_lookup_num_tokens=4, **FEW), expected
    )


@pytest.mark.parametrize("k, v, more", [("f32", "f32", {}), ("tq8", "tq4", dict(tail=20, sink_tokens=3))])
def test_one_prompt_becomes_several_rows(k, v, more):
    model = random_model("qwen3-window-13", "gyre")
    make = lambda **options: GyreCache(model.config, k=k, v=v, **more, **options)
    prompt, rest = random_tokens(150), random_tokens(24).view(6, 4)
    cache = make(paged=True)
    of_prompt = logits(model, prompt, cache)
    cache.batch_repeat_interleave(6)
    assert cache.batch_size == 6
    given = [logits(model, rest[:, i : i + 1], cache) for i in range(3)]
    cache.batch_select_indices(torch.tensor([5, 2, 2]))
    given = torch.cat([part[[5, 2, 2]] for part in given] + [logits(model, rest[[5, 2, 2], 3:], cache)], 1)
    for row, source in enumerate([5, 2, 2]):
        # In pages, too: a cache without them sums the keys behind sink_tokens in other blocks, and what is then rounded to
        # levels makes much of a last bit.
        alone = make(paged=True)
        assert torch.equal(logits(model, prompt, alone), of_prompt)
        expected = torch.cat([logits(model, rest[source : source + 1, i : i + 1], alone) for i in range(4)], 1)
        torch.testing.assert_close(given[row : row + 1], expected, rtol=1e-3, atol=1e-3)
    assert (given[0] - given[1]).abs().max() > 0.1


def test_rows_keep_their_padding():
    model = random_model("qwen3-window-13", "gyre")
    rows, last = random_rows(), random_tokens(3)
    ids, mask = padded(rows)
    cache = exact(model)
    logits(model, ids, cache, mask)
    cache.batch_select_indices([3, 0, 1, 1, 2])
    mask = torch.cat([mask[[3, 0, 1, 1, 2]], torch.ones(5, 1, dtype=mask.dtype)], 1)
    given = logits(model, last[:, :1].repeat(5, 1), cache, mask)
    for row, source in enumerate([3, 0, 1, 1, 2]):
        alone = logits(model, torch.cat([rows[source], last[0, :1]])[None], exact(model))[0, -1]
        torch.testing.assert_close(given[row, 0], alone, rtol=1e-4, atol=1e-4)


def test_crop_reset_and_copies_of_a_batch():
    model = random_model("qwen3-window-13", "gyre")
    ids, mask = padded(random_rows())
    all_mask = torch.cat([mask, torch.ones(4, 5, dtype=mask.dtype)], 1)
    more = random_tokens(20).view(4, 5)
    make = lambda: GyreCache(model.config, k="tq8", v="tq4", tail=0, sink_tokens=0, step_tokens=16)
    fresh = make()
    logits(model, ids, fresh, mask)
    expected = logits(model, more, fresh, all_mask)
    cropped = make()
    logits(model, ids, cropped, mask)
    copied = copy.deepcopy(cropped)
    padded_more = mask.clone()  # of the next columns some are padding, which crop must not count as tokens
    logits(model, ids, cropped, torch.cat([mask, padded_more], 1))
    cropped.crop(torch.tensor(-ids.shape[1]))  # as transformers 5.17 does
    assert type(cropped.get_seq_length()) is int
    for cache in (cropped, copied):
        assert torch.equal(logits(model, more, cache, all_mask), expected)
        assert cache.get_seq_length() == 35 and cache.batch_size == 4
    cropped.reset()
    assert (cropped.get_seq_length(), copied.get_seq_length()) == (0, 35)
    logits(model, ids, cropped, mask)
    assert torch.equal(logits(model, more, cropped, all_mask), expected)


def test_copies_do_not_take_each_others_room():
    """Copies share a pool that has room for one of them."""
    model = random_model("qwen3-window-13", "gyre")
    ids = random_tokens(360).view(4, 90)
    first = exact(model, capacity=128, step_tokens=16)
    logits(model, ids, first)
    copies = [copy.deepcopy(first) for _ in range(6)]
    given = [logits(model, ids[:, :38], cache) for cache in (first, *copies)]
    for other in given[1:]:
        assert torch.equal(other, given[0])
    assert {cache.get_seq_length() for cache in copies} == {128}


def refuses(pattern: str):
    return pytest.raises(gyre.Error, match=pattern)


def test_masks_that_change_their_mind():
    model = random_model("qwen3-window-13", "gyre")
    ids, mask = padded(random_rows())
    cache = exact(model)
    logits(model, ids, cache, mask)
    step = torch.ones(4, 1, dtype=torch.long)
    other = torch.cat([mask, step], 1)
    other[1, 3] = 1
    with refuses("column 3 in row 1"):
        logits(model, step, cache, other)
    with refuses("column 0 in row 1"):
        logits(model, step, cache)
    full = exact(model)
    logits(model, ids, full)
    with refuses("hides column 0 in row 1, which holds a token"):
        logits(model, step, full, torch.cat([mask, step], 1))
    assert cache.get_seq_length() == full.get_seq_length() == 30
    logits(model, step, cache, torch.cat([mask, step], 1))
    assert cache.get_seq_length() == 31


def test_rows_that_are_not_there():
    model = random_model("qwen3-window-13", "gyre")
    cache = exact(model)
    with refuses("empty"):
        cache.batch_repeat_interleave(2)
    logits(model, random_tokens(8).view(2, 4), cache)
    for rows in ([0, 2], [-1], []):
        with refuses("from 0 to 1"):
            cache.reorder_cache(torch.tensor(rows))
    with refuses("batch of 2, got 3"):
        logits(model, random_tokens(3).view(3, 1), cache)
    assert cache.get_seq_length() == 4
    one = exact(model)
    logits(model, random_tokens(4), one)
    one.reorder_cache(torch.tensor([0]))
    with refuses("paged=True"):
        one.batch_repeat_interleave(2)
