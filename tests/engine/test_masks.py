"""Masks of grammars: their bits, side by side as one by one, and those that take long."""

import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from anybit.engine import masks, structured
from anybit.engine.llm import LLM
from anybit.engine.masks import begin, fill
from anybit.engine.scheduler import Scheduled
from anybit.engine.sequence import SamplingParams, Sequence
from anybit.engine.structured import Compiled, Grammars, Matcher, Structured
from tests.engine.conftest import PICO

KINDS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}},
    {"regex": "[a-z ]{90}"},
    {"json": True},
    {"grammar": "start: " + " | ".join(f'"d{i}"' for i in range(5000))},  # ends in an error
]


def test_masks_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def every(steps: list[int], bits: torch.Tensor) -> Callable[[], None]:
        for step, row in zip(steps, bits, strict=True):
            on = torch.arange(32 * len(row)) % step == 0
            row.copy_((on.view(-1, 32).long() << torch.arange(32)).sum(1).to(torch.int32))
        return lambda: None

    monkeypatch.setattr(masks, "fill", every)
    logits = torch.randn(4, 70)
    got = begin(logits, [None, 1, 3, 31])(logits)  # type: ignore[list-item]
    assert torch.equal(got[:2], logits[:2])
    for row, step in ((2, 3), (3, 31)):
        keep = torch.arange(70) % step == 0
        assert torch.equal(got[row][keep], logits[row][keep])
        assert (got[row][~keep] == float("-inf")).all()


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[Matcher]:
    """Texts in four grammars, some of which think; a grammar is compiled for every two of them."""
    for name, value in {"THREADS": 3, "LANES": 3, "TEXTS": 2, "QUICK": math.inf}.items():
        monkeypatch.setattr(structured, name, value)
    monkeypatch.setattr(masks, "THREADS", 3)
    masks.threads.cache_clear()
    grammars = Grammars(AutoTokenizer.from_pretrained(PICO), 4096, frozenset([0]))
    asked = [Structured(**kind) for kind in KINDS]
    asked += [Structured(**kind, think=(5, 6), thinking=True) for kind in KINDS]
    return [grammars.matcher(asked[i % 8]) for i in range(24)]


def walk(matchers: list[Matcher], steps: int) -> Iterator[list[torch.Tensor]]:
    """Masks of steps that fill all of them, and then take a random token that each allows."""
    rng, running = random.Random(3), list(matchers)
    for _ in range(steps):
        bits = torch.full((len(matchers), 128), 0x5A5A5A5A, dtype=torch.int32)
        fill(running, bits[: len(running)])()
        yield list(bits[: len(running)])
        for matcher, row in zip(list(running), bits, strict=False):
            if not matcher.error:
                allowed = masks.unpacked(row[None])[0].nonzero().flatten()
                close = matcher.thinking and rng.random() < 0.3
                matcher.take(6 if close else int(allowed[rng.randrange(len(allowed))]))
            if matcher.error or matcher.ended:
                running.remove(matcher)


def test_masks_side_by_side_are_those_beside_the_steps(
    many: list[Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot go on ends alone."""
    for matcher in many:
        matcher.found.slow = 0
    alone = [matcher.copy() for matcher in many]
    monkeypatch.setattr(structured, "MASK", math.inf)
    found = [torch.stack(masks) for masks in walk(many, 40)]
    for matcher in alone:
        matcher.found.slow = 10_000
    want = [torch.stack(masks) for masks in walk(alone, 40)]
    assert [m.error for m in many] == [m.error for m in alone]
    for i, matcher in enumerate(many):
        assert bool(matcher.error) == (matcher.found is many[3].found)
        assert len(matcher.found.lanes) == (3 if matcher.found.again else 1), i
    right = [torch.equal(a, b) for a, b in zip(found, want, strict=True)]
    assert all(right)
    assert len(right) == 40


def test_what_takes_long_is_found_among_others(
    many: list[Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By turns; then its masks are computed beside the steps, and only its own."""
    slow, real = many[0].found, Compiled.computed
    for matcher in many:
        matcher.found.slow, matcher.found.fresh = 0, False

    def computed(self: Compiled, seconds: float) -> None:
        real(self, 0.06 if self is slow else 0.0)

    monkeypatch.setattr(Compiled, "computed", computed)
    for _ in walk(many, 30):
        pass
    assert [m.found.slow for m in many] == [
        structured.BESIDE if m.found is slow else 0 for m in many
    ]


def test_a_mask_that_is_late_is_that_of_a_later_step(
    many: list[Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits a moment only, and others have theirs."""
    go, real, slow = threading.Event(), Matcher.fill, many[0]
    slow.found.slow, many[1].found.slow = 1, 0
    monkeypatch.setattr(masks, "PATIENCE", 0.0)

    def fill_later(self: Matcher, bits: torch.Tensor) -> None:
        assert self is not slow or go.wait(60)
        real(self, bits)

    want = torch.zeros(2, 128, dtype=torch.int32)
    fill([slow.copy(), many[1].copy()], want)()
    slow.found.slow = 1
    monkeypatch.setattr(Matcher, "fill", fill_later)
    got = torch.zeros(2, 128, dtype=torch.int32)
    slow.punctual = many[1].punctual = False
    ready = fill([slow, many[1]], got)
    masks.threads(os.getpid())[0].submit(int).result()
    assert ready() == [0]
    assert slow.waits
    assert many[1].mask is None
    go.set()
    slow.punctual = True
    assert fill([slow], got[:1])() == []
    assert torch.equal(got, want)
    assert slow.mask is None


def test_the_first_mask_of_a_grammar_may_take_long() -> None:
    found = Compiled("", 0)  # type: ignore[arg-type]
    assert found.slow == 1
    found.computed(0.1)
    assert found.slow == 0
    found.computed(0.1)
    assert found.slow == structured.BESIDE
    for _ in range(structured.BESIDE):
        assert found.slow
        found.computed(1e-4)
    assert not found.slow


def test_a_late_mask_within_a_draft_ends_what_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was chosen behind it is of another text; the last token that counts runs once more."""
    engine, accepted = LLM(PICO).engine, list[int]()
    seq = Sequence("r", 0, [1, 2, 3, 4], SamplingParams(max_tokens=9), 20)
    late = SimpleNamespace(matcher=SimpleNamespace(mask="late", error=""))
    known = SimpleNamespace(matcher=None)
    monkeypatch.setattr(engine.scheduler, "done", lambda s, count: accepted.append(count))
    step = Scheduled(seq, 3, 1, True, draft=(100, 101))
    engine._take(step, [(known, 100, None), (late, -1, None), (known, 202, None)])
    assert seq.tokens == [1, 2, 3, 4, 100]
    assert accepted == [0]
