"""States that other texts begin with, and texts whose tokens are taken back."""

import random
from dataclasses import replace
from typing import Any

import pytest

from anybit.engine.llm import LLM
from tests.engine.conftest import prompts
from tests.engine.test_engine import assert_no_block_is_held, assert_same, mixed_params
from tests.engine.test_recurrent import GREEDY, MIXED, Checkpoint, aborted, assert_nothing_is_held
from tests.engine.test_speculation import Told, alone, drafting, speculating
from tests.needs import pairs


@pytest.mark.parametrize(
    ("name", "option"), pairs(MIXED, [{}, {"max_tokens": 5}, {"deterministic": True}])
)
def test_prefixes_go_on_from_kept_states(
    checkpoint: Checkpoint, name: str, option: dict[str, Any]
) -> None:
    first, *rest = prompts(5, longest=60)
    system = (first * 20)[:23]
    turn = [*system, *rest[0], 5, 6, 7]
    plain = LLM(checkpoint(name), block_size=4, prefix_caching=False)
    llm = LLM(checkpoint(name), block_size=4, **option)
    cached = []
    answer = plain.generate(turn, GREEDY)[0].tokens
    others = [[*system, 2, 3, 4, *rest[i]] for i in (1, 2, 3)]
    for prompt in (turn, turn, [*turn, *answer, *rest[1]], *others):
        before = llm.engine.scheduler.prefix_hits
        (output,) = llm.generate(prompt, GREEDY)
        assert output.tokens == plain.generate(prompt, GREEDY)[0].tokens
        cached.append(llm.engine.scheduler.prefix_hits - before)
        assert_nothing_is_held(llm)
    last = (len(turn) - 1) // 4 * 4
    # The second text with a beginning finds where the first one has left it.
    want = [0, last, last, 0, 20, 24]
    assert cached == ([0] * 6 if "deterministic" in option else want)


@pytest.mark.parametrize("name", MIXED)
def test_few_kept_states_serve_many_texts(checkpoint: Checkpoint, name: str) -> None:
    """Rows are taken from prefixes, also in the step that begins there; texts are aborted."""
    rng = random.Random(3)
    bases = prompts(6, longest=30)
    many = [(rng.choice(bases) * 9)[: rng.randint(5, 50)] + rng.choice(bases) for _ in range(40)]
    plain = LLM(checkpoint(name), prefix_caching=False)
    want = [output.tokens for output in plain.generate(many, GREEDY)]
    llm = LLM(checkpoint(name), block_size=2, max_running=3, max_tokens=40)
    blocks, engine = llm.engine.scheduler.blocks, llm.engine
    del blocks.kept.free[2:]
    got = dict[str, list[int]]()
    for i, prompt in enumerate(many):
        engine.add(str(i), prompt, GREEDY)
    for victim in aborted(engine, rng, 0.1, got):
        engine.add(victim, many[int(victim)], GREEDY)
    assert [got[str(i)] for i in range(len(many))] == want
    assert engine.scheduler.prefix_hits > 25  # fewer where steps start ahead
    assert len(blocks.kept.free) + len(blocks.kept.known) == 2
    assert_no_block_is_held(engine)


@pytest.mark.parametrize(
    ("name", "how"),
    pairs(MIXED, [({}, True), ({"max_tokens": 7, "block_size": 4, "draft_tokens": 1}, False)]),
)
def test_wrong_guesses_leave_no_trace_in_states(
    checkpoint: Checkpoint, name: str, how: tuple[dict[str, Any], bool]
) -> None:
    """In steps with prompts and without, with prefixes that are found, after preemptions."""
    option, overlaps = how
    want = alone(checkpoint, name)
    llm = LLM(checkpoint(name), draft="ngram", **option)
    speculating(llm, Told(want), option.get("draft_tokens", 4))
    llm.engine.runner.overlaps = overlaps
    for _ in range(2):
        got = llm.generate(prompts(10), mixed_params(10))
        assert_same(got, want)
        assert_nothing_is_held(llm)
    stats = llm.engine.stats
    assert not llm.engine.speculation.failed
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    llm = LLM(checkpoint(name), draft="ngram", block_size=4, length=80)
    speculating(llm, Told(want))
    for block in list(llm.engine.scheduler.blocks.free)[30:]:  # as if others held them
        del llm.engine.scheduler.blocks.free[block]
    assert_same(llm.generate(prompts(10), mixed_params(10)), want)
    assert llm.engine.scheduler.preemptions > 0


def test_a_text_with_guesses_goes_on_from_a_kept_state(checkpoint: Checkpoint) -> None:
    """It lacked room, and all of it but for its last token is known when it comes back."""
    greedy, prompt = replace(GREEDY, ignore_eos=True), [5, 6, 7]
    want = LLM(checkpoint("lfm2"), prefix_caching=False).generate([prompt], greedy)
    text = prompt + want[0].tokens
    llm = LLM(checkpoint("lfm2"), block_size=4, draft="ngram")
    llm.generate([text[:9]], replace(greedy, max_tokens=1))  # keeps the states behind 8 tokens
    engine, scheduler = llm.engine, llm.engine.scheduler
    engine.runner.overlaps = False  # a text gives its blocks back where no step of it runs
    engine.speculation, got = None, []
    engine.add("", prompt, greedy)
    while engine.busy:
        got += [token for delta in engine.step() for token in delta.tokens]
        if len(got) == 6 and not scheduler.preemptions:
            scheduler._preempt()
            scheduler.blocks.rows.reverse()  # as if another text had taken its row
            speculating(llm, Told(want))
    assert got == want[0].tokens
    assert not engine.speculation.failed


@pytest.mark.parametrize(
    ("name", "draft"),
    [*((name, name) for name in MIXED), ("llama", "lfm2"), ("falcon_h1", "llama")],
)
def test_models_with_states_draft(checkpoint: Checkpoint, name: str, draft: str) -> None:
    small: dict[str, Any] = {"max_tokens": 9, "block_size": 4, "max_running": 3}
    want = alone(checkpoint, name)
    llm = LLM(checkpoint(name), draft=checkpoint(draft), **small)
    drafting(llm)
    for _ in range(2):
        assert_same(llm.generate(prompts(10), mixed_params(10)), want)
    stats, drafter = llm.engine.stats, llm.engine.speculation.drafter
    assert not llm.engine.speculation.failed
    assert stats.accepted_tokens > 0
    if name == draft:  # its states are those of the text, or it would guess wrong
        assert stats.accepted_tokens > 0.97 * stats.draft_tokens
    assert drafter.blocks.holders == [0] * drafter.blocks.count
    assert not drafter.blocks.recurrent or sorted(drafter.blocks.rows)[0] == 1
    assert_no_block_is_held(llm.engine)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "mamba2", "qwen3_5"])
def test_steps_with_drafts_are_recorded(checkpoint: Checkpoint, name: str) -> None:
    want = alone(checkpoint, name)
    llm = speculating(LLM(checkpoint(name), draft="ngram"), Told(want))
    assert_same(llm.generate(prompts(10)[:2], mixed_params(10)[:2]), want[:2])
    graphs = llm.engine.runner.graphs
    assert graphs.captures > 0
    refused = [getattr(graph, "refused", None) for graph, _ in graphs.graphs.values()]
    assert not any(refused), refused
