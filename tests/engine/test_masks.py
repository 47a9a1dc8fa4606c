"""Masks of grammars: their bits, side by side as one by one, and those that take long."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from transformers import AutoTokenizer

from anybit.engine import masks, structured
from anybit.engine.masks import begin, fill
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


def test_masks_side_by_side_are_those_of_one_by_one(
    many: list[Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what cannot go on ends alone."""
    for matcher in many:
        matcher.found.last = 0.0
    alone = [matcher.copy() for matcher in many]
    monkeypatch.setattr(masks, "MASK", math.inf)
    found = [torch.stack(masks) for masks in walk(many, 40)]
    monkeypatch.setattr(masks, "MASK", -1.0)
    monkeypatch.setattr(structured, "SECONDS", math.inf)
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
    """By turns; then all its masks are timed, until it is refused, and only its own."""
    slow, clock, current = many[0].found, itertools.count(0, 0.06), 0.0
    for matcher in many:
        matcher.found.last = 0.0

    def now() -> float:
        nonlocal current
        current = next(clock) if slow_now else current
        return current

    slow_now, real = False, Matcher.fill

    def timed(self: Matcher, bits: torch.Tensor, share: float) -> None:
        nonlocal slow_now
        slow_now = self.found is slow
        real(self, bits, share)
        slow_now = False

    monkeypatch.setattr(Matcher, "fill", timed)
    monkeypatch.setattr(time, "thread_time", now)
    refused = next(i for i, _ in enumerate(walk(many, 60)) if slow.error)
    assert refused < 40
    assert "takes 60 ms" in slow.error
    for _ in walk([m for m in many if not (m.error or m.ended or m.thinking)], 2):
        pass
    assert sum(bool(m.error) for m in many if m.found is slow) > 2
    assert not any(m.found.error for m in many if m.found is not slow)


@pytest.mark.parametrize("grammars", [1, 16])
def test_masks_of_all_texts_share_the_time_of_a_step(grammars: int) -> None:
    """16 texts of 8 ms each hold a step up for 128: refused, of one grammar or of many."""
    debts: WeakKeyDictionary[Compiled, float] = WeakKeyDictionary()
    slow = [Compiled("", 0, debts=debts) for _ in range(grammars)]
    quick = Compiled("", 0, debts=debts)
    waited, harmonic = 0.0, sum(1 / i for i in range(1, grammars + 1))
    for _ in range(1000):
        running = [slow[i % grammars] for i in range(16) if not slow[i % grammars].error]
        for found in [*running, *[quick] * 48]:
            found.computed(8e-3 if found is not quick else 4e-3, 1 / (len(running) + 48))
        waited += max(len(running) * 8e-3 - structured.MASK, 0)
    assert not quick.error
    assert all(found.error for found in slow)
    # Each refusal frees the mean of what is owed; and a step ends before any is found.
    assert waited < harmonic * structured.SECONDS + 16 * 8e-3


def test_quick_masks_earn_nothing_that_slow_ones_may_spend() -> None:
    """A grammar whose masks are quick for long may hold others up no longer than another."""
    found = Compiled("", 0)
    for _ in range(10_000):
        found.computed(1e-4)
    for _ in range(3):
        found.computed(0.4, 1 / 16)
    assert "takes 400 ms" in found.error


def test_the_first_mask_of_a_grammar_owes_nothing() -> None:
    debts: WeakKeyDictionary[Compiled, float] = WeakKeyDictionary()
    many = [Compiled("", 0, debts=debts) for _ in range(32)]
    for found in many:
        found.computed(0.1, 1 / 32)
        for _ in range(100):
            found.computed(1e-4, 1 / 32)
    assert not any(found.error for found in many)
