"""An answer of a deterministic engine has the same bits whatever else runs."""

import random

import pytest
import torch

from anybit.engine.block_manager import BlockManager
from anybit.engine.llm import LLM
from anybit.engine.sequence import SamplingParams, Sequence
from anybit.engine.steady import SteadyScheduler
from tests import tiny

LENGTHS = (1, 5, 16, 33, 64, 65, 130, 7, 128, 3)


def texts() -> list[list[int]]:
    """Prompts of lengths around a chunk's, some of which begin alike."""
    draw = random.Random(0)
    same = [draw.randrange(5, 4000) for _ in range(max(LENGTHS))]
    return [
        same[:n] if i % 3 == 0 else [draw.randrange(5, 4000) for _ in range(n)]
        for i, n in enumerate(LENGTHS)
    ]


def params(i: int) -> SamplingParams:
    if i % 2:
        return SamplingParams(temperature=0.8, seed=i, max_tokens=12, logprobs=3)
    return SamplingParams(temperature=0, max_tokens=6 + i, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module", params=["bf16", "int4:group=64"])
def llm(request: pytest.FixtureRequest) -> LLM:
    spec = None if request.param == "bf16" else request.param
    return LLM(
        tiny.short_pico(), spec, max_running=8, max_tokens=64, block_size=16, kv_bytes=1 << 23,
        deterministic=True,
    )  # fmt: skip


def results(llm: LLM, order: list[int]) -> dict[int, list[tuple[int, float]]]:
    """Tokens and log probabilities, by the number of the prompt."""
    prompts = texts()
    out = llm.generate([prompts[i] for i in order], [params(i) for i in order])
    found = {}
    for i, output in zip(order, out, strict=True):
        logprobs = output.completions[0].logprobs
        assert logprobs
        found[i] = [(t, p.logprob) for t, p in zip(output.tokens, logprobs, strict=True)]
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_same_bits_alone_and_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """Also where a step is started before the last one's tokens are known."""
    monkeypatch.setattr(llm.engine.runner, "overlaps", overlaps)
    want: dict[int, list[tuple[int, float]]] = {}
    for i in range(len(LENGTHS)):
        want |= results(llm, [i])
    for seed in range(3):
        order = list(range(len(LENGTHS))) * 2
        random.Random(seed).shuffle(order)
        assert results(llm, order) == want
    assert llm.engine.scheduler.preemptions == 0
    assert llm.engine.scheduler.prefix_hits > 0


def test_cached_prefixes_are_whole_chunks() -> None:
    blocks = BlockManager(32, 4)
    first, second = (make(list(range(23)), limit=30) for _ in range(2))
    blocks.grow(first, 23)
    blocks.computed(first, 23)
    blocks.match(second, 8)
    assert (second.computed, len(second.blocks)) == (16, 4)
    blocks.release(first)
    blocks.release(second)
    assert len(blocks.free) == 32


def test_a_text_waits_for_all_its_blocks() -> None:
    scheduler = SteadyScheduler(BlockManager(8, 4, False), 8, 8, rows=2)
    seqs = [make([1, 2, 3], limit=20), make([4, 5, 6], limit=20), make([7], limit=4)]
    for seq in seqs:
        scheduler.add(seq)
    assert [s.seq for s in scheduler.schedule()] == seqs[:1]
    assert list(scheduler.waiting) == seqs[1:]  # first come, first served
    scheduler.remove(seqs[0])
    assert [s.seq for s in scheduler.schedule()] == [seqs[1]]


def test_a_step_ahead_is_of_others_or_a_token_further() -> None:
    scheduler = SteadyScheduler(BlockManager(64, 4, False), 8, 8, rows=2)
    seqs = [make([1, 2, 3], limit=20) for _ in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    running = scheduler.schedule()
    for step in range(12):
        following = scheduler.ahead(running)
        same = {id(s.seq) for s in running} & {id(s.seq) for s in following}
        assert following
        assert not same
        for s in running:
            s.seq.append(step)
            scheduler.done(s)
        running = following
    scheduler.remove(seqs[0])
    pair = scheduler.schedule()
    assert [s.seq for s in scheduler.ahead(pair)] == [s.seq for s in pair]
    assert [s.first for s in scheduler.ahead(pair)] == [s.first + 1 for s in pair]


def make(tokens: list[int], limit: int) -> Sequence:
    return Sequence("r", 0, tokens, SamplingParams(), limit)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts a CPU's rows")
def test_texts_are_written_in_steps_of_one_shape(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    assert isinstance(scheduler, SteadyScheduler)
    runner = llm.engine.runner
    assert scheduler.rows == runner.rows == 4  # type: ignore[attr-defined]
    assert runner.graphs.sizes == [4]  # type: ignore[attr-defined]


def test_prompts_are_scored_whole(llm: LLM) -> None:
    prompt = texts()[LENGTHS.index(130)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    for _ in range(2):  # the second time its prefix is known
        (output,) = llm.generate([prompt], params)
        assert len(output.completions[0].prompt_logprobs or []) == len(prompt)
