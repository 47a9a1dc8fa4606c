"""Drafts by a smaller model: any model, any cache, and what it cannot be."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import anybit
from anybit.engine.draft_model import DraftModel
from anybit.engine.llm import LLM
from anybit.engine.loader import load
from anybit.engine.models.llama import Llama
from anybit.engine.sequence import SamplingParams
from anybit.engine.structured import Structured
from anybit.errors import InvalidInput
from tests.engine.conftest import ARCHITECTURES, PICO, prompts
from tests.engine.test_engine import assert_no_block_is_held, assert_same, mixed_params
from tests.engine.test_speculation import (
    REPETITIVE,
    Checkpoint,
    alone,
    assert_taken,
    drafting,
    pico,
    same,
)  # fmt: skip

__all__ = ["pico"]


def assert_no_draft_is_held(llm: LLM) -> None:
    drafter = llm.engine.speculation.drafter  # type: ignore[union-attr]
    assert isinstance(drafter, DraftModel)
    assert not drafter.texts
    assert drafter.blocks.holders == [0] * drafter.blocks.count


@pytest.mark.parametrize(
    ("draft", "options", "same"),
    [
        ("llama", {}, True),
        ("llama", {"max_tokens": 9, "block_size": 4}, True),
        ("llama", {"kv_cache": "int8", "block_size": 4, "kv_bytes": 40 * 4 * 2 * 160}, True),
        ("qwen2", {}, False),
    ],
)
def test_a_draft_models_guesses_change_no_token(
    checkpoint: Checkpoint, draft: str, options: dict, same: bool
) -> None:
    """The model itself guesses right, also when sampled, and after prompts in chunks."""
    kind = {"kv_cache": options["kv_cache"]} if "kv_cache" in options else {}
    want = alone(checkpoint, "llama", **kind)
    llm = drafting(LLM(checkpoint("llama"), draft=checkpoint(draft), **options))
    assert_same(llm.generate(prompts(10), mixed_params(10)), want)
    stats = llm.engine.stats
    assert stats.accepted_tokens > 0
    assert (stats.accepted_tokens > 0.97 * stats.draft_tokens) == same
    assert_no_block_is_held(llm.engine)
    assert_no_draft_is_held(llm)
    again = llm.generate(prompts(10), mixed_params(10))  # with what both caches know
    assert_same(again, want)
    assert (stats.accepted_tokens > 0.97 * stats.draft_tokens) == same


@pytest.mark.parametrize("kind", ["llama", "starcoder2"])
def test_a_model_of_any_kind_drafts(
    checkpoint: Checkpoint, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantized one, which the engine or transformers' modules run."""
    monkeypatch.setitem(ARCHITECTURES, "starcoder2", ("starcoder2", {"sliding_window": 12}))
    directory = checkpoint(kind)
    model = AutoModelForCausalLM.from_pretrained(directory)
    anybit.save(anybit.quantize_(model, "int4:group=32"), tmp_path / "few")
    want = LLM(directory).generate(prompts(8), mixed_params(8))
    llm = drafting(LLM(directory, draft=tmp_path / "few"))
    assert_same(llm.generate(prompts(8), mixed_params(8)), want)
    assert_taken(llm.engine)


def test_a_draft_follows_grammar_and_penalties(pico: LLM) -> None:
    few = load(PICO, pico.device, torch.float32, "int4:group=64", None)
    llm = drafting(LLM(PICO, dtype="float32", kv_bytes=1 << 24, draft=few, draft_tokens=3))
    for params in (
        SamplingParams(temperature=0, max_tokens=15, repetition_penalty=1.2),
        SamplingParams(seed=1, max_tokens=20, structured=Structured(json=True)),
    ):
        assert same(llm.generate(REPETITIVE, params), pico.generate(REPETITIVE, params))
    assert_taken(llm.engine)


def test_a_guess_ends_where_the_text_does(checkpoint: Checkpoint) -> None:
    """No further token is asked for."""
    whole = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    plain = LLM(checkpoint("llama"))
    stop = plain.generate([[5, 7, 9]], whole)[0].tokens[12]
    params = replace(whole, stop_token_ids=[stop])
    llm = drafting(LLM(checkpoint("llama"), draft=checkpoint("llama")))
    assert same(llm.generate([[5, 7, 9]], params), plain.generate([[5, 7, 9]], params))
    assert_no_draft_is_held(llm)


def test_a_smaller_vocabulary_guesses_what_it_has(checkpoint: Checkpoint) -> None:
    many = prompts(10, vocabulary=50)
    want = LLM(checkpoint("llama")).generate(many, mixed_params(10))
    loaded = load(
        checkpoint("llama"),
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        torch.float32,
        None,
        None,
    )
    model = loaded.model
    assert isinstance(model, Llama)
    model.words = torch.nn.Embedding.from_pretrained(model.embed_tokens[:50])
    model.lm_head.weight = model.lm_head.weight[:50]
    llm = drafting(LLM(checkpoint("llama"), draft=loaded))
    assert_same(llm.generate(many, mixed_params(10)), want)
    assert_taken(llm.engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "ngram", "draft_tokens": 0}, "draft_tokens=0; give 1 or more"),
        ({"draft": PICO, "deterministic": True}, "deterministic and draft exclude each other"),
        ({"draft": PICO}, "pico' has other tokens than the model .4096 and 96.; give one"),
        ({"draft": "auto"}, "'auto' is neither ngram nor mtp, nor the directory of a model"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    checkpoint: Checkpoint, options: dict, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        LLM(checkpoint("llama"), **options)
