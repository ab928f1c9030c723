"""Greedy answers and retrieval, as scripts/quality.py asks for them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tqdm")

from hf_models import BYTE_START, TEXT, load, stored_model

from gyre.eval import Setting, greedy, retrieval


@pytest.fixture(scope="module")
def model():
    return load(stored_model("tiny-d128"), "gyre")


def prompt(begin: int, count: int) -> torch.Tensor:
    return torch.tensor([BYTE_START, *TEXT.read_bytes()[begin : begin + count]])


def test_answers_are_those_of_generate_and_f16_keeps_them(model):
    prompts = [prompt(0, 200), prompt(3000, 40), prompt(5000, 300)]
    found = greedy.answers(model, prompts, 12)
    plain = load(stored_model("tiny-d128"), "sdpa")
    for ids, answer in zip(prompts, found):
        assert torch.equal(plain.generate(ids[None], max_new_tokens=12, do_sample=False)[0, len(ids) :], answer)
    assert greedy.equal_tokens(model, prompts, found, Setting("f16", "f16")) == [12, 12, 12]
    wrong = [torch.cat([answer[:5], (answer[5:6] + 1) % 256, answer[6:]]) for answer in found]
    assert greedy.equal_tokens(model, prompts, wrong, Setting("f16", "f16")) == [5, 5, 5]
    coarse = [greedy.equal_tokens(model, prompts, found, Setting("tq2", "tq2", tail)) for tail in (0, 512)]
    assert sum(coarse[0]) < sum(coarse[1]) == 36  # the tail holds all of it


class Bytes:
    def __call__(self, text, add_special_tokens):
        return {"input_ids": list(text.encode())}


def test_haystacks_hold_what_is_asked(model):
    stacks = retrieval.haystacks(Bytes(), BYTE_START, TEXT.read_text(errors="replace"), 2, names=4, digits=3, tokens=700)
    for stack in stacks:
        text = bytes(stack.text[1:].tolist()).decode()
        assert stack.text[0] == BYTE_START and 690 < len(stack.text) < 900 and len(stack.questions) == 4
        for question, answer in stack.questions:
            asked, told = (bytes(part.tolist()).decode() for part in (question, answer))
            assert asked.split("A: ")[1] + told in text
    assert stacks[0].text.tolist() != stacks[1].text.tolist()
    found = retrieval.retrieve(model, stacks[0], Setting("f16", "f16"))
    assert len(found.exact) == 4 and len(found.parts) == sum(len(answer) for _, answer in stacks[0].questions)
    again = retrieval.retrieve(model, stacks[0], Setting("tq8", "tq4", 128, 1))
    assert len(again.parts) == len(found.parts)


def test_a_question_is_answered_if_all_of_it_is(model):
    """In a text that repeats itself, the model predicts the byte that came before."""
    line = b"The code is 123. " * 20
    stack = retrieval.Haystack(torch.tensor([BYTE_START, *line]), [(torch.tensor(list(b"The code is")), torch.tensor(list(b" 123.")))] * 2)
    stack.questions[1] = stack.questions[1][0], torch.tensor(list(b" 124."))
    found = retrieval.retrieve(model, stack, Setting("f16", "f16"))
    assert found.exact == [True, False] and found.parts[:5] == [True] * 5 and found.parts[7] is True and found.parts[8] is False
