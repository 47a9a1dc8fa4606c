"""What runs in a step, and what a text that gave its blocks back must run again."""

from dataclasses import replace

import pytest
import torch

from anybit.engine import masks, model_runner
from anybit.engine.block_manager import BlockManager
from anybit.engine.graphs import Rows, StepGraphs
from anybit.engine.llm import LLM
from anybit.engine.pace import Pace
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import SamplingParams, Sequence
from anybit.engine.structured import Structured
from tests.engine.conftest import PICO

BLOCK = 4


def text(name: str, tokens: int, limit: int = 400) -> Sequence:
    prompt = [ord(name[0]) * 400 + i for i in range(tokens)]
    return Sequence(name, 0, prompt, SamplingParams(), limit)


def run(scheduler: Scheduler) -> dict[str, int]:
    """Run a step: how many tokens of each text."""
    scheduled = scheduler.schedule()
    for s in scheduled:
        scheduler.done(s)
        if s.samples:
            s.seq.append(7)
    return {s.seq.request: s.tokens for s in scheduled}


def test_the_longest_unused_blocks_are_forgotten_first() -> None:
    manager = BlockManager(4, 2)
    for seq in (held := [text("a", 4), text("b", 4)]):
        assert manager.grow(seq, 4)
        manager.computed(seq, 4)
    assert not manager.grow(text("c", 1), 1)
    for seq in held:
        manager.release(seq)
    assert manager.grow(text("c", 1), 1)  # takes the end of the first text
    for seq in (again := [text("a", 5), text("b", 5)]):
        manager.match(seq)
    assert [seq.computed for seq in again] == [2, 4]


@pytest.mark.parametrize("blocks", [20, 31])
def test_preemption_loses_no_more_than_the_blocks_that_were_missing(blocks: int) -> None:
    scheduler = Scheduler(BlockManager(blocks, BLOCK), 4, 64)
    old, new = text("old", 30), text("new", 30)
    for seq in (old, new):
        scheduler.add(seq)
    while not scheduler.preemptions:
        run(scheduler)
    assert scheduler.waiting[0] is new
    written = len(new.tokens)
    taken = 0  # blocks that the old text has got since
    while scheduler.running == [old] and taken < 3:
        before = len(old.blocks)
        run(scheduler)
        taken += len(old.blocks) - before
    scheduler.remove(old)
    again = run(scheduler)["new"]
    assert 0 < again <= (taken + 2) * BLOCK
    assert new.generated == written + 1 - 30


def test_tokens_of_answers_may_take_two_of_a_step() -> None:
    scheduler = Scheduler(BlockManager(60, BLOCK), 4, 20, each=2)
    for name in ("a", "b", "c"):
        scheduler.add(text(name, 6))
    assert run(scheduler) == {"a": 6, "b": 6, "c": 6}
    scheduler.add(text("d", 25))
    assert run(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 14}
    # Each that runs writes, and a block of a prompt is read.
    scheduler.pace = Pace({4: 0.0}, 1.0, least=BLOCK, each=2)
    assert run(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 4}
    scheduler.pace = Pace({14: 0.0}, 1.0, least=BLOCK, each=2)
    assert run(scheduler) == {"a": 1, "b": 1, "c": 1, "d": 7}
    scheduler = Scheduler(BlockManager(60, BLOCK), 4, 7, each=2)
    for name in ("a", "b"):
        scheduler.add(text(name, 6))
    assert run(scheduler) == {"a": 6}  # one token is left, and its sequence would take two
    assert run(scheduler) == {"a": 1, "b": 5}


@pytest.mark.parametrize("length", [16, 100, 4096])
def test_steps_are_timed_with_prompts_of_their_length(length: int) -> None:
    runner = LLM(PICO, length=64, max_running=4).engine.runner
    runner.model.length = length
    graphs = StepGraphs(
        runner.model, runner.states, 16, 4, -(-length // 16), prompts=(16, 64, 512), drafts=True
    )  # fmt: skip
    assert graphs.prompts is not None
    for size in graphs.prompts.sizes:
        step = graphs._prompts_of(size, graphs.prompts)
        assert graphs.can_read(step)
        graphs.prompts.fill(size, step)
        assert max(s.tokens for s in step) == min(size, length)
        assert sum(s.tokens for s in step) >= size - 1
        assert all(0 <= b < len(runner.states[0].k) for s in step for b in s.seq.blocks)
    runs = []
    graphs._run = lambda scheduled, rows, tokens: runs.append(rows)
    one, two = (Scheduled(text("a", 3), 2, 1, True, draft) for draft in ((), (5,)))
    for scheduled in ([one], [two], [two, one]):  # kernels for drafts pay from two of each text on
        graphs.logits(scheduled)
    assert runs == [graphs.written, graphs.drafted, graphs.written]


def test_rows_know_whose_drafts_they_are() -> None:
    rows = Rows([8], 8, 0, 3, BLOCK, torch.device("cpu"), drafts=True)
    one, other = text("a", 7), text("b", 3)
    one.blocks, other.blocks = [2, 5, 1], [4]
    rows.fill(8, [Scheduled(one, 6, 1, True, (8, 9)), Scheduled(other, 2, 1, True)])
    batch = rows.batch(8)[1]
    assert batch.owners is not None
    assert batch.owners.tolist() == [0, 0, 0, 3, 4, 5, 6, 7]
    assert batch.contexts.tolist() == [7, 8, 9, 3, 0, 0, 0, 0]
    assert batch.tables[:3].tolist() == [one.blocks] * 3
    rows.fill(8, [Scheduled(other, 2, 1, True)])
    assert batch.owners.tolist() == [*range(8)]
    assert Rows([8], 8, 0, 3, BLOCK, torch.device("cpu")).batch(8)[1].owners is None


def held_back(count: int, grammars: bool = True) -> list[SamplingParams]:
    """What is sampled by the tokens before: penalties, early ends, and every other a grammar."""
    grammar = Structured(regex="[a-z ]{5,30}")
    return [
        SamplingParams(
            seed=i, max_tokens=20 + i, repetition_penalty=1.2, presence_penalty=0.3, min_tokens=4,
            logprobs=1, structured=grammar if grammars and i % 2 else None,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("grammars", [False, True])
def test_penalties_and_grammars_hold_no_step_back(
    grammars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the next step's model runs while the host does its part."""
    monkeypatch.setattr(masks, "USUAL", 60.0)  # also on a busy machine
    llm = LLM(PICO, dtype="float32")
    prompts, params = [[5 + i, 6, 7] for i in range(8)], held_back(8, grammars)
    want = llm.generate(prompts, params)
    runner, launch, ahead = llm.engine.runner, llm.engine.runner.launch, []

    def counted(scheduled: list, previous: object) -> object:
        ahead.append(previous is not None)
        flight = launch(scheduled, previous)
        assert flight.choose is None or grammars  # only they wait for the tokens before
        return flight

    runner.overlaps, runner.launch = True, counted
    got = llm.generate(prompts, params)
    assert [[c.tokens for c in o.completions] for o in got] == [
        [c.tokens for c in o.completions] for o in want
    ]
    assert [o.completions[0].finish for o in got] == [o.completions[0].finish for o in want]
    assert sum(ahead) >= len(ahead) - 1
    assert len(ahead) > 20
    assert not llm.engine.busy


def test_tokens_are_told_before_the_next_step_has_ended() -> None:
    llm, events = LLM(PICO, dtype="float32"), list[object]()
    runner, launch = llm.engine.runner, llm.engine.runner.launch
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (want,) = llm.generate([[5, 6]], params)

    def seen(scheduled: list, previous: object) -> object:
        flight = launch(scheduled, previous)
        return replace(flight, wait=lambda: (events.append("waits"), flight.wait())[1])

    runner.overlaps, runner.launch = True, seen
    llm.engine.tell = lambda deltas: events.extend(delta.tokens[0] for delta in deltas)
    llm.engine.add("a", [5, 6], params)
    while llm.engine.busy:
        events += [delta.tokens[0] for delta in llm.engine.step()]
    first, second, third, last = want.completions[0].tokens
    assert events[:6] == ["waits", first, "waits", second, "waits", third]
    assert [e for e in events if e != "waits"] == [first, second, third, last]


def test_what_fails_to_be_sampled_takes_no_neighbour_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(PICO, dtype="float32")
    llm.engine.runner.overlaps = True
    prompts, params, sample = [[5], [66], [7]], held_back(3), model_runner.sample
    want = llm.generate(prompts, params)

    def fail(logits: object, rows: list, *more: object) -> object:
        if any(row.seq.tokens[0] == 66 and row.at == 5 for row in rows):
            raise RuntimeError("out of luck")
        return sample(logits, rows, *more)

    monkeypatch.setattr(model_runner, "sample", fail)
    got = llm.generate(prompts, params)
    assert [o.completions[0].finish for o in got][1] == "error"
    assert got[1].completions[0].error == "RuntimeError: out of luck"
    for i in (0, 2):
        assert got[i].completions[0].tokens == want[i].completions[0].tokens
    blocks = llm.engine.scheduler.blocks
    assert len(blocks.free) == blocks.count
