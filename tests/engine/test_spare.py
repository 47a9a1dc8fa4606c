"""A server on a CPU is ready before any step is recorded; requests record, and idle moments do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams
from tests.engine.conftest import prompts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the engine takes the GPU")
Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def ready(checkpoint: Checkpoint) -> LLM:
    llm = LLM(checkpoint("llama"), dtype="float32", max_running=4, block_size=4)
    llm.engine.prepared()
    return llm


def after(looks: int) -> Callable[[], bool]:
    """Says that a request waits once it was asked so often."""
    left = iter(range(looks))
    return lambda: next(left, None) is None


def tokens(llm: LLM) -> list[list[int]]:
    llm.engine.scheduler.blocks.forget()
    return [output.tokens for output in llm.generate(prompts(3), GREEDY, show_progress=False)]


def test_ready_before_any_recording(checkpoint: Checkpoint) -> None:
    llm = ready(checkpoint)
    graphs = llm.engine.runner.graphs
    assert graphs.captures == 0
    want = tokens(llm)
    assert 0 < graphs.captures < len(list(graphs.unrecorded())) + graphs.captures
    llm.engine.idle(lambda: False)
    assert not list(graphs.unrecorded())
    assert llm.engine.spare is None
    recorded = graphs.captures
    assert tokens(llm) == want
    assert graphs.captures == recorded
    assert tokens(LLM(checkpoint("llama"), dtype="float32", max_running=4, block_size=4)) == want


def test_a_step_that_is_recorded_runs_the_model_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = ready(checkpoint)
    model, runs = llm.engine.runner.model, [0]
    forward = model.forward

    def counted(*args: object) -> torch.Tensor:
        runs[0] += 1
        return forward(*args)

    monkeypatch.setattr(model, "forward", counted)
    llm.generate(prompts(1), replace(GREEDY, max_tokens=2), show_progress=False)
    assert runs == [2]  # the prompt, and the second token
    llm.engine.scheduler.blocks.forget()
    llm.generate(prompts(1), replace(GREEDY, max_tokens=2), show_progress=False)
    assert runs == [2]


def test_a_request_ends_a_recording_at_its_next_operator(checkpoint: Checkpoint) -> None:
    """Wherever it comes, what was begun leaves nothing behind, and is done later."""
    llm = ready(checkpoint)
    graphs, engine = llm.engine.runner.graphs, llm.engine
    engine.idle(after(0))
    assert graphs.captures == 0
    looks = counting(after(3))
    engine.idle(looks)
    assert looks.asked == 4  # nothing ran once it was said
    assert graphs.captures == 0
    seen = set()
    for count in range(1, 400, 40):
        engine.idle(after(count))
        seen.add(graphs.captures)
    assert len(seen) > 1
    want = tokens(ready(checkpoint))
    assert tokens(llm) == want
    engine.idle(lambda: False)
    assert tokens(llm) == want


class counting:
    def __init__(self, wanted: Callable[[], bool]):
        self.wanted, self.asked = wanted, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.wanted()


def test_those_used_most_come_first(checkpoint: Checkpoint) -> None:
    llm = ready(checkpoint)
    graphs = llm.engine.runner.graphs

    def until(done: Callable[[], object]) -> None:
        llm.engine.idle(lambda: bool(done()))

    until(lambda: 1 in graphs.written.graphs)
    assert list(graphs.written.graphs) == [1]
    until(lambda: graphs.prompts.graphs)
    assert set(graphs.written.graphs) == set(graphs.sizes)
    assert list(graphs.prompts.graphs) == [graphs.prompts.sizes[0]]


def test_recording_leaves_what_prompts_have_left(checkpoint: Checkpoint) -> None:
    """Blocks that later prompts find again are not written."""
    llm = ready(checkpoint)
    llm.generate(prompts(3), GREEDY, show_progress=False)
    before = [state.k.clone() for state in llm.engine.runner.states]
    llm.engine.idle(lambda: False)
    for old, state in zip(before, llm.engine.runner.states, strict=True):
        assert torch.equal(old, state.k)


def test_pace_learns_from_steps_that_were_replayed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = ready(checkpoint)
    pace, graphs = llm.engine.scheduler.pace, llm.engine.runner.graphs
    assert pace.guessed
    ratio = pace.seconds[32] / pace.plain[1]
    graphs.captures += 1
    pace.timed(1, [], 5.0)  # it was recorded meanwhile
    assert pace.guessed
    pace.timed(1, [], 0.25)
    assert not pace.guessed
    assert pace.plain[1] == 0.25
    assert pace.seconds[32] == pytest.approx(0.25 * ratio)
