"""How much of prompts steps read beside texts, by times that are given."""

import math

import pytest

from anybit.engine.block_manager import BlockManager
from anybit.engine.pace import FACTOR, REST, Budget, Pace, pairs
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import SamplingParams, Sequence

SIZES = (2, 4, 8, 16, 32)
TOKEN, FIRST, PAIR, EXTRA = 0.1, 1.0, 0.0005, 1.0


def took(tokens: int, before: int, slow: float = 1.0) -> float:
    """Seconds of a step with a text and so many tokens of a prompt, on a machine that we made up.

    A step of a size takes as long with fewer tokens.
    """
    size = next((s for s in SIZES if s > tokens), tokens + 1)
    return slow * (FIRST + (size - 1) * TOKEN + PAIR * pairs(tokens, before, EXTRA))


def pace(limit: float | None = None) -> Pace:
    seconds = {size: FIRST + (size - 1) * TOKEN for size in SIZES}
    return Pace(seconds, limit, {1: FIRST, 2: FIRST, 4: FIRST}, PAIR, EXTRA)


def text(name: str, prompt: int, params: SamplingParams | None = None) -> Sequence:
    params = params or SamplingParams(max_tokens=10000, ignore_eos=True)
    return Sequence(name, 0, list(range(prompt)), params, 100000)


def run(scheduler: Scheduler, slow: float = 1.0) -> list[Scheduled]:
    """Run a step as an engine does; what it read of a prompt. Texts never wait."""
    step = scheduler.schedule()
    read = [s for s in step if not s.writes]
    assert len(read) <= 1
    assert any(s.writes for s in step)
    seconds = took(read[0].tokens, read[0].first, slow) if read else slow * FIRST
    scheduler.timed(step, seconds)
    for s in step:
        if s.samples:
            s.seq.append(0)
        scheduler.done(s)
    return read


def beside(own: Pace | None, prompt: int, texts: int = 1) -> tuple[Scheduler, Sequence]:
    """Texts that are being written, and a prompt that has just come."""
    scheduler = Scheduler(BlockManager(4000, 16), 64, 2048)
    for i in range(texts):
        scheduler.add(text(f"text {i}", 5 + i))
    run_all = scheduler.schedule()
    for s in run_all:
        s.seq.append(0)
        scheduler.done(s)
    scheduler.pace = own
    late = text("late", prompt)
    scheduler.add(late)
    return scheduler, late


def test_no_step_takes_longer_than_said_where_one_token_fits() -> None:
    scheduler, late = beside(pace(), 100)
    read = rests = 0
    while not late.generated:
        step = run(scheduler)
        rests += not step
        for s in step:
            assert took(s.tokens, s.first) <= FACTOR * FIRST + 1e-9
            assert s.tokens == min(3, 100 - s.first)
            read += s.tokens
    assert read == 100
    assert 0 < rests <= 100 // REST


def test_a_long_prompt_is_not_starved() -> None:
    """Where even one token takes too long, a prompt takes at most 6 times as long as it could."""
    scheduler, late = beside(pace(), 6000)
    spent = 0.0
    while not late.generated:
        spent += sum(took(s.tokens, s.first) for s in run(scheduler))
    fastest = sum((took(31, at) - FIRST) for at in range(0, 6000, 31))
    assert fastest < spent < 6.5 * fastest


@pytest.mark.parametrize("slow", [0.5, 3.0])
def test_a_machine_that_became_slower_is_followed(slow: float) -> None:
    """What counts is how long steps take beside each other, not how long they took at the start."""
    scheduler, late = beside(pace(), 100000 - 10)
    sizes = []
    for _ in range(20 * REST):
        sizes.append(sum(s.tokens for s in run(scheduler, slow)))
        late.computed = min(late.computed, 20)  # as at its beginning
    assert set(sizes[-REST:]) >= {3, 0}
    assert max(sizes[-REST:]) <= 7


def test_a_limit_of_milliseconds_is_kept() -> None:
    scheduler, late = beside(pace(limit=3.0), 300)
    sizes = set()
    while not late.generated:
        for s in run(scheduler):
            assert took(s.tokens, s.first) <= 3.0
            sizes.add(s.tokens)
    assert max(sizes) == 15  # a text and 15 tokens are a step of 16


def test_sizes_of_a_gpu_keep_a_prompt_going() -> None:
    """Times of whole steps, which are not followed; 16 tokens at least, whatever they take."""
    own = Pace({16: 0.001, 64: 0.01, 256: 0.03}, 0.02, least=16)
    assert own.room(1, 0) == Budget(64, 1)
    assert own.room(40, 5000) == Budget(64, 40)
    assert own.room(100, 0) == Budget(256, 100)
    assert own.room(400, 0) == Budget(416, 400)


@pytest.mark.parametrize("params", [SamplingParams(adapter="a"), SamplingParams(prompt_logprobs=0)])
def test_steps_that_nobody_timed_read_more(params: SamplingParams) -> None:
    scheduler, _ = beside(pace(), 1)
    scheduler.waiting.clear()
    late = text("late", 500, params)
    scheduler.add(late)
    assert [s.tokens for s in run(scheduler, 50)] == [32]
    assert scheduler.pace is not None
    assert scheduler.pace.factor == 1
    scheduler.remove(late)
    scheduler.add(text("as before", 500))
    assert max(s.tokens for s in run(scheduler)) <= 7


def test_a_text_that_gave_its_blocks_back_waits_for_no_other() -> None:
    scheduler, _ = beside(pace(), 1)
    scheduler.waiting.clear()
    assert scheduler.pace is not None
    scheduler.pace.rest = REST
    scheduler.blocks.release(scheduler.running[0])
    assert [s.tokens for s in scheduler.schedule()] == [6]


def test_more_texts_than_were_timed() -> None:
    scheduler, _ = beside(pace(), 500, texts=6)
    assert [s.tokens for s in scheduler.schedule()] == [1] * 6 + [32]


def test_prompts_share_what_a_step_has_left() -> None:
    """Each takes what is read before it; the rest is the next one's, texts' tokens aside."""
    room = Budget(16, 2, 1, pairs=600.0, extra=2.0, least=1)
    old = text("old", 400)
    old.computed = 100
    assert room.take(old) == 3  # (3 + 2) * 100 + 3 * 3 / 2
    new = text("new", 40)
    assert room.take(new) == 11
    assert room.tokens == 2
    writing = text("writing", 3)
    writing.append(0)
    writing.computed = 3
    assert room.take(writing) == room.take(writing) == 1
    assert room.take(new) == room.tokens == 0
    least = Budget(8, 0, 1, pairs=0.0, extra=2.0, least=1)
    assert [least.take(old), least.take(old)] == [1, 0]
    assert math.isinf(Budget(5).pairs)
