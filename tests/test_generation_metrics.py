"""Functions that parse, prompts from the standard library, greedy texts."""

import ast
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from anybit.evaluate.corpus import held_out_text
from anybit.evaluate.generation import (
    continuations,
    function_prompts,
    greedy_prompts,
    parses,
    repeated,
    rouge_l,
    same_tokens,
)
from tests import tiny

HEAD = "def f(x):"


@pytest.mark.parametrize(
    ("completion", "good"),
    [
        ("\n    return x\n\nprint(", True),  # what follows the function does not count
        (" return x\nprint(", True),
        ("\n    return (x\n\ndef g():\n", False),
        ("\n    y = x\n    retu", True),  # the last line was cut off by the limit
        ("\n    y = 1\n    if x:\n        y", True),  # nor does a block that was only opened
        ("\n    return x", False),  # nothing whole was written
        ("\nreturn x\n", False),
        ("", False),
        ("\n    y = '\0'\n    z = 1\n", False),
    ],
)
def test_parses(completion: str, good: bool) -> None:
    assert parses(HEAD, completion) is good


def test_prompts_are_heads_of_functions_and_their_own_bodies_parse() -> None:
    modules = held_out_text()
    prompts = function_prompts(modules, 40)
    assert len(prompts) == 40
    sources = dict(modules)
    for prompt in prompts:
        assert prompt.head.lstrip().startswith("def ")
        module = next(s for s in sources.values() if prompt.before + prompt.head in s)
        rest = module.split(prompt.before + prompt.head, 1)[1]
        assert parses(prompt.head, rest), prompt.head
        with pytest.raises(SyntaxError):
            ast.parse(prompt.head + "\n    )")


def test_rouge_l_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1 of the longest common subsequence of words, without stemming."""
    assert rouge_l("the cat sat", "the cat sat down") == pytest.approx(6 / 7)
    assert rouge_l("sat the cat", "the cat sat") == pytest.approx(2 / 3)
    assert rouge_l("Cats sat", "the cat sat") == pytest.approx(2 * (1 / 2) * (1 / 3) / (5 / 6))
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match="pip install rouge-score"):
        rouge_l("a", "a")


def test_prompts_are_whole_pieces_of_documents_evenly_spaced() -> None:
    documents = [torch.arange(1000, 1000 + 64 * 40 + 63), torch.arange(50), torch.arange(64)]
    prompts, count = greedy_prompts(documents, None, 128)
    got = torch.stack(prompts)
    assert (*got.shape, count) == (16, 64, 64)
    assert got[:, 0].tolist() == [*(1000 + 64 * (n * 40 // 15) for n in range(15)), 0]
    assert (got.diff(dim=1) == 1).all()
    assert greedy_prompts(documents, None, 127)[0] == []  # no room for what is written
    assert greedy_prompts([torch.arange(63)], None, 512)[0] == []


def test_prompts_of_conversations_are_what_comes_before_the_first_answer() -> None:
    documents = [torch.arange(9), torch.arange(10, 15), torch.arange(20, 26), torch.arange(40)]
    counted = [torch.zeros(len(ids), dtype=torch.bool) for ids in documents]
    counted[0][3:5] = counted[0][7:] = counted[1][0] = counted[3][30:] = True
    prompts, count = greedy_prompts(documents, counted, 256 + 29)
    # Without an answer, with nothing before it, and without room: none.
    assert [ids.tolist() for ids in prompts] == [[0, 1, 2]]
    assert count == 256
    assert len(greedy_prompts(documents, counted, 256 + 30)[0]) == 2


def test_tokens_before_the_first_difference_and_repetition_of_known_texts() -> None:
    texts = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, -1, -1, -1], [1, 1, 1, 1, 1, 1]])
    others = torch.tensor([[1, 2, 0, 4, 5, 6], [7, 8, 9, -1, -1, -1], [1, 1, 1, 1, -1, -1]])
    assert same_tokens(texts, others).tolist() == [2, 6, 4]
    # Three 4-grams, of which none, and two of three, occurred before; no 4-gram at all.
    assert repeated(texts).tolist() == pytest.approx([0, 0, 2 / 3])
    cycle = torch.tensor([1, 2, 3] * 5)[None]  # twelve 4-grams, three of them new
    assert repeated(torch.cat((cycle, torch.full((1, 9), -1)), 1)).item() == 9 / 12


def test_continuations_are_greedy_and_end_where_the_model_ends() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.short_pico(), dtype=torch.float32).eval()
    prompts = torch.randint(5, 200, (3, 64), generator=torch.Generator().manual_seed(0))
    model.generation_config.eos_token_id = None
    got = continuations(model, [*prompts], 64)
    with torch.inference_mode():
        logits = model(torch.cat((prompts, got), 1)).logits[:, 63:-1]
    assert (logits.gather(2, got[..., None])[..., 0] >= logits.amax(2) - 1e-3).all()
    model.generation_config.update(repetition_penalty=1.8, do_sample=True, top_k=5)
    assert torch.equal(continuations(model, [*prompts], 64), got)
    shorter = continuations(model, [prompts[0], prompts[1, 40:]], 20)  # beside a longer one
    assert torch.equal(shorter[0], got[0, :20])
    assert torch.equal(shorter[1], continuations(model, [prompts[1, 40:]], 20)[0])
    assert continuations(model, [], 5).shape == (0, 5)
    end = int(got[0, 9])  # ends each text that has it
    model.generation_config.eos_token_id = [end]
    ended = continuations(model, [*prompts], 64)
    for text, whole in zip(ended.tolist(), got.tolist(), strict=True):
        stop = whole.index(end) + 1 if end in whole else 64
        assert text == whole[:stop] + [-1] * (64 - stop)
