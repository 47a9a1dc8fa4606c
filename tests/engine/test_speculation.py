"""Speculative decoding: the same tokens as without, whatever is guessed, and only where it pays."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.engine.block_manager import BlockManager
from anybit.engine.engine import Engine
from anybit.engine.llm import LLM, Output
from anybit.engine.lookup import Lookup
from anybit.engine.model_runner import Flight
from anybit.engine.sampler import rows_of, sample
from anybit.engine.scheduler import Scheduled, Scheduler
from anybit.engine.sequence import Row, SamplingParams, Sequence
from anybit.engine.speculation import AHEAD, PLAIN, STALE, Costs, Drafter, Record, Speculation
from anybit.engine.structured import Structured
from tests.engine.conftest import ARCHITECTURES, PICO, prompts
from tests.engine.test_engine import assert_no_block_is_held, assert_same, mixed_params, tokens

Checkpoint = Callable[[str], Path]


class Free(Costs):
    """Whatever can be drafted pays."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = 0

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        pass

    def depths(self, chances: list[float], reach: list[int]) -> list[int]:
        return reach


class Told:
    """Guesses what others have written of the same prompts, with mistakes."""

    def __init__(self, outputs: list[Output], wrong: float = 0.2):
        self.outputs, self.random, self.wrong = outputs, random.Random(0), wrong

    def reach(self, rows: list[Row], most: int) -> list[int]:
        return [self.random.randrange(most + 1) for _ in rows]

    def draft(self, rows: list[Row], counts: list[int]) -> list[list[int]]:
        return [self._draft(row, count) for row, count in zip(rows, counts, strict=True)]

    def _draft(self, row: Row, count: int) -> list[int]:
        (output,) = [o for o in self.outputs if o.prompt == row.seq.prompt]
        right = output.completions[row.seq.index].tokens[row.at : row.at + count]
        return [2 if self.random.random() < self.wrong else token for token in right]

    def read(self, rows: list[Row], counts: list[int]) -> list[int]:
        return counts

    def forget(self, seq: Sequence) -> None:
        pass


def speculating(llm: LLM, drafter: Drafter, most: int = 4) -> LLM:
    """The model with drafts wherever they are possible."""
    llm.engine.speculation = Speculation(drafter, most)
    llm.engine.speculation.costs = Free()
    return llm


def assert_taken(engine: Engine) -> None:
    """Some drafted tokens were taken and some were not, in fewer steps than tokens."""
    stats = engine.stats
    assert engine.speculation is not None
    assert not engine.speculation.failed
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.drafts < stats.draft_tokens


def same(got: list[Output], want: list[Output]) -> bool:
    """Whether all is equal but for the counts of drafts."""
    texts = [replace(c, accepted=0, rejected=0) for output in got for c in output.completions]
    return texts == [c for output in want for c in output.completions]


MANY: dict[str, list[Output]] = {}


def alone(checkpoint: Checkpoint, name: str, **options: Any) -> list[Output]:
    """What the texts are without drafts."""
    key = f"{name} {options}"
    if key not in MANY:
        llm = LLM(checkpoint(name), **options)
        MANY[key] = llm.generate(prompts(10), mixed_params(10))
    return MANY[key]


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({}, False),
        ({"max_tokens": 7, "block_size": 4}, False),
        ({"max_running": 3, "prefix_caching": False}, False),
        ({"block_size": 4, "kv_bytes": 30 * 4 * 512, "length": 80}, True),
        ({"block_size": 1, "max_tokens": 11, "kv_bytes": 120 * 512, "length": 80}, True),
    ],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_guesses_change_no_token(
    checkpoint: Checkpoint, options: dict, preempts: bool, overlaps: bool
) -> None:
    """Chunks, preemption, shared prefixes, small blocks, steps started ahead; with windows."""
    want = alone(checkpoint, "qwen2")
    llm = speculating(LLM(checkpoint("qwen2"), **options), Told(want))
    llm.engine.runner.overlaps = overlaps
    got = llm.generate(prompts(10), mixed_params(10))
    assert_same(got, want)
    assert_taken(llm.engine)
    assert (llm.engine.scheduler.preemptions > 0) == preempts
    assert_no_block_is_held(llm.engine)
    assert tokens(llm.generate(prompts(10), mixed_params(10))) == tokens(got)  # cached prefixes


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_cache": "int8"}),
        ("qwen2", {"kv_cache": "int8", "block_size": 4}),
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("deepseek_v3", {}),
        ("starcoder2", {"block_size": 4}),
    ],
)
def test_every_kind_of_cache_takes_drafts(
    checkpoint: Checkpoint, name: str, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that are written again, windows, sinks, soft caps, latents, models of transformers."""
    monkeypatch.setitem(ARCHITECTURES, "starcoder2", ("starcoder2", {"sliding_window": 12}))
    want = alone(checkpoint, name, **options)
    llm = speculating(LLM(checkpoint(name), **options), Told(want))
    assert_same(llm.generate(prompts(10), mixed_params(10)), want)
    assert_taken(llm.engine)
    assert_no_block_is_held(llm.engine)


def test_log_probabilities_and_streams_are_those_of_the_tokens(checkpoint: Checkpoint) -> None:
    params = SamplingParams(seed=5, max_tokens=25, logprobs=2, n=2, ignore_eos=True)
    want = LLM(checkpoint("llama")).generate([[3, 4, 5]], params)
    llm = speculating(LLM(checkpoint("llama")), Told(want))
    deltas, engine = [], llm.engine
    engine.add("r", [3, 4, 5], params)
    while engine.busy:
        deltas += engine.step()
    for i, completion in enumerate(want[0].completions):
        own = [d for d in deltas if d.index == i]
        assert [token for d in own for token in d.tokens] == completion.tokens
        got = [p for d in own for p in d.logprobs]
        assert [p.token for p in got] == completion.tokens
        assert [p.logprob for p in got] == pytest.approx(
            [p.logprob for p in completion.logprobs], abs=1e-4
        )
        assert [d.finish for d in own] == [None] * (len(own) - 1) + ["length"]
    ends = [d for d in deltas if d.finish]
    assert sum(d.accepted for d in ends) == engine.stats.accepted_tokens > 0
    assert sum(d.rejected for d in ends) == (
        engine.stats.draft_tokens - engine.stats.accepted_tokens
    )


def test_ends_are_where_they_were(checkpoint: Checkpoint) -> None:
    """The end token, a stop token, min_tokens and the limit, inside a draft."""
    whole = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    plain = LLM(checkpoint("llama"), length=48)
    want = plain.generate([[5, 7, 9]], whole)
    stop = want[0].tokens[10]
    llm = speculating(LLM(checkpoint("llama"), length=48), Told(want, wrong=0))
    for params in (
        whole,
        replace(whole, stop_token_ids=[stop]),
        *(replace(whole, max_tokens=n) for n in range(1, 8)),
        replace(whole, stop_token_ids=[stop], min_tokens=20, max_tokens=30),
    ):
        assert same(llm.generate([[5, 7, 9]], params), plain.generate([[5, 7, 9]], params))
    plain.engine.eos = llm.engine.eos = frozenset([stop])
    ends = replace(whole, ignore_eos=False)
    assert same(llm.generate([[5, 7, 9]], ends), plain.generate([[5, 7, 9]], ends))
    assert_no_block_is_held(llm.engine)


REPETITIVE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul("


@pytest.fixture(scope="module")
def pico() -> LLM:
    return LLM(PICO, dtype="float32", kv_bytes=1 << 24)


@pytest.fixture(scope="module")
def looking() -> LLM:
    return speculating(LLM(PICO, dtype="float32", kv_bytes=1 << 24, draft="ngram"), Lookup())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=80, stop=["+ b", "return a +"], min_tokens=30),
        SamplingParams(seed=1, temperature=0.7, max_tokens=50, n=2),
        SamplingParams(seed=1, top_k=9, max_tokens=50, presence_penalty=0.1, logit_bias={300: 2}),
        SamplingParams(seed=2, top_p=0.8, repetition_penalty=1.05, max_tokens=60),
        SamplingParams(seed=2, max_tokens=60, structured=Structured(regex="(a, b){9}")),
        SamplingParams(
            temperature=0,
            max_tokens=90,
            structured=Structured(
                json={"type": "array", "minItems": 9, "items": {"const": "once more"}}
            ),
        ),
    ],
)
def test_look_up_changes_no_text(pico: LLM, looking: LLM, params: SamplingParams) -> None:
    """Stop strings, penalties, biases and grammars see the tokens one by one."""
    before = looking.engine.stats.drafts
    got = looking.generate(REPETITIVE, params)
    assert same(got, pico.generate(REPETITIVE, params))
    # Where steps start ahead, a sampled text may repeat itself in steps that look for no guess.
    if params.temperature == 0 or params.structured or not looking.engine.runner.overlaps:
        assert looking.engine.stats.drafts > before
    completions = [c for output in got for c in output.completions]
    assert all(c.accepted <= len(c.tokens) for c in completions)
    assert_no_block_is_held(looking.engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_random_aborts_leak_no_block(checkpoint: Checkpoint, overlaps: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [[i, i + 1, 7] for i in range(2, 22)]
    want = LLM(checkpoint("llama")).generate(asked, params)
    llm = LLM(checkpoint("llama"), block_size=2, kv_bytes=36 * 2 * 512, length=40, max_running=12)
    engine, rng = speculating(llm, Told(want)).engine, random.Random(0)
    engine.runner.overlaps = overlaps
    got: dict[str, list[int]] = {}
    ended: Counter[str] = Counter()
    added = 0
    while added < 200 or engine.busy:
        for _ in range(rng.randrange(8) if added < 200 else 0):
            engine.add(str(added), asked[added % 20], replace(params, max_tokens=1 + added % 12))
            added += 1
        deltas = engine.step()
        if engine.requests and rng.random() < 0.4:
            deltas += engine.abort(rng.choice(list(engine.requests)))
        for delta in deltas:
            got.setdefault(delta.request, []).extend(delta.tokens)
            ended[delta.finish or ""] += 1
    for name, found in got.items():
        right = want[int(name) % 20].tokens
        assert found == right[: len(found)]
    assert ended["abort"] + ended["length"] == added
    assert min(ended["abort"], ended["length"], engine.scheduler.preemptions) > 0
    assert_taken(engine)
    assert_no_block_is_held(engine)


CHAIN = torch.tensor([[4.0, 1, 2, 1], [1, 1, 1, 1], [0, 5, 3, 2], [6, 0, 1, 3]])


class Chain:
    """A model of four tokens, of which each depends on the one before."""

    overlaps = reads_prompts = repeats = False

    def launch(self, scheduled: list[Scheduled], previous: Flight | None = None) -> Flight:
        rows = rows_of(scheduled)
        logits = CHAIN.log()[[[*row.seq.tokens, *row.draft][-1] for row in rows]]
        return Flight(scheduled, rows, *sample(logits, rows))


class Guess(Told):
    """Guesses at random, and counts which tokens are taken after which."""

    def __init__(self) -> None:
        super().__init__([])
        self.guesses: list[tuple[Sequence, int, int]] = []

    def reach(self, rows: list[Row], most: int) -> list[int]:
        return [most] * len(rows)

    def _draft(self, row: Row, count: int) -> list[int]:
        draft = [self.random.randrange(4) for _ in range(count)]
        if count:
            self.guesses.append((row.seq, len(row.seq.tokens), draft[0]))
        return draft


def test_texts_follow_the_models_distribution() -> None:
    """And a guess is taken as often as its probability says. Five standard deviations."""
    blocks, guess = BlockManager(512, 16, prefix_caching=False), Guess()
    scheduler = Scheduler(blocks, 256, 4096)
    engine = Engine(Chain(), scheduler, 16, frozenset(), 4)  # type: ignore[arg-type]
    engine.speculation = Speculation(guess, 2)
    engine.speculation.costs = Free()
    texts: Counter[tuple[int, ...]] = Counter()
    params = SamplingParams(n=64, max_tokens=4, temperature=0.5)  # as many as drafts are for
    count = 60 * params.n
    for i in range(count // params.n):
        engine.add(str(i), [0], replace(params, seed=i))
        seqs = list(engine.requests[str(i)])
        while engine.busy:
            engine.step()
        for seq in seqs:
            texts[tuple(seq.tokens[len(seq.prompt) :])] += 1
    chances = (CHAIN.log() / params.temperature).softmax(-1).double()
    for text in [(a, b, c) for a in range(4) for b in range(4) for c in range(4)]:
        want = float(chances[0, text[0]] * chances[text[0], text[1]] * chances[text[1], text[2]])
        found = sum(n for t, n in texts.items() if t[:3] == text)
        assert abs(found / count - want) <= 5 * (want * (1 - want) / count) ** 0.5
    seen: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    for seq, at, token in guess.guesses:
        pair = seq.tokens[at - 1], token
        seen[pair] += 1
        taken[pair] += seq.tokens[at] == token
    assert len(seen) == 16
    for (before, token), n in seen.items():
        want = float(chances[before, token])
        assert abs(taken[before, token] / n - want) <= 5 * (want * (1 - want) / n) ** 0.5


def drafting(llm: LLM) -> LLM:
    """The model with drafts of its own drafter wherever they are possible."""
    speculation = llm.engine.speculation
    assert speculation is not None
    return speculating(llm, speculation.drafter, speculation.most)


def measured(base: float, token: float, draft: float | None = None, texts: int = 1) -> Costs:
    """Costs of a machine on which a step takes base + token * tokens seconds."""
    costs = Costs()
    for count in [*range(texts, 5 * texts + 1)] * 9:
        costs.add(count, base + token * count, count > texts)
    for _ in range(3 if draft is not None else 0):
        costs.add_draft(draft)
    return costs


def test_times_of_steps_are_learnt_and_tried_again() -> None:
    costs = Costs()
    assert costs.depths([0.8], [4]) == [4]
    for count in (1, 5):
        costs.add(count, 60.0, count > 1)  # compiles
        assert not costs.times
    for _ in range(20):
        costs.add(1, 2e-3, drafted=False)
        costs.add(5, 8e-3, drafted=True)
    assert costs.depths([0.8], [4]) == [3]  # three are not known, four are known to be slow
    costs.add(1, 1.0, drafted=False)  # a pause of the machine
    assert costs.times[1][0] < 3e-3
    for count in (2, 3, 4) * 2:
        costs.add(count, 8e-3, drafted=True)
    for _ in range(20):
        costs.add(1, 2e-3, drafted=False)
    assert costs.depths([0.8], [4]) == [0]
    for _ in range(STALE):
        costs.add(1, 2e-3, drafted=False)
    assert costs.depths([0.8], [4]) == [4]  # it may have become faster
    costs.add(200, 1.0, drafted=False)
    costs.add(193, 1.0, drafted=False)  # runs like 200
    assert 208 in costs.times


@pytest.mark.parametrize(
    ("base", "token", "draft", "chances", "want"),
    [
        (1.0, 0.0, None, [0.9, 0.1], [4, 4]),  # tokens cost nothing
        (1.0, 0.1, None, [0.9, 0.05], [4, 0]),  # not for each text
        (0.0, 1.0, None, [0.95], [0]),  # each token takes as long as a step
        (1.0, 0.0, 2.0, [0.9], [0]),  # a guess takes longer than a step
        (1.0, 0.0, 0.2, [0.99], [4]),
        (1.0, 0.0, 0.2, [0.5], [1]),  # 1.5 tokens in 1.2 steps' time; a second one adds 0.25
        (1.0, 0.4, 0.0, [0.5] * 16, [0] * 16),  # a large batch
    ],
)
def test_drafts_are_as_long_as_pays(
    base: float, token: float, draft: float | None, chances: list[float], want: list[int]
) -> None:
    costs = measured(base, token, draft, len(chances))
    assert costs.depths(chances, [4] * len(chances)) == want


class Slow(Costs):
    """A machine on which every token in a step takes a fifth as long as the rest of the step."""

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        super().add(tokens, 1 + 0.2 * tokens, drafted)

    def add_draft(self, seconds: float) -> None:
        pass


def test_what_does_not_pay_is_hardly_drafted(checkpoint: Checkpoint) -> None:
    """Wrong guesses stop; a plain step is run now and then; texts that rest run ahead."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    want = LLM(checkpoint("llama")).generate([[5, 6, 7]], params)
    llm = LLM(checkpoint("llama"), draft="ngram")
    engine = llm.engine
    for wrong in (1.0, 0.0):
        drafter = Told(want, wrong)
        drafter.reach = lambda rows, most: [most] * len(rows)  # type: ignore[method-assign]
        speculation = engine.speculation = Speculation(drafter, 4)
        speculation.costs = Slow()
        before = replace(engine.stats)
        assert tokens(llm.generate([[5, 6, 7]], params)) == tokens(want)
        drafted = engine.stats.draft_tokens - before.draft_tokens
        steps = engine.stats.steps - before.steps
        assert drafted > 0
        assert (drafted < 30, steps > 55) == ((True, True) if wrong else (False, False))
        assert speculation.costs.plain < PLAIN
    seq = Sequence("r", 0, [0], params, 100)
    step = [Scheduled(seq, 0, 1, True)]
    assert not speculation.rests(step)
    speculation.records[seq] = Record(right=0.0, judged=50.0)
    for count in [2, 3, 4] * 2:
        speculation.costs.add(count, 0.0, True)
    looks = [speculation.rests(step) for _ in range(2 * AHEAD)]
    assert looks == [True] * AHEAD + [False] + [True] * (AHEAD - 1)
    speculation.records[seq] = Record()
    assert not speculation.rests(step * 64)
    assert speculation.rests(step * 65)
    speculation.records[seq] = Record(found=0.05)  # there was nothing to guess
    assert speculation.rests(step)


def test_look_up_finds_what_followed_last() -> None:
    lookup = Lookup()

    def found(text: list[int], most: int = 4) -> list[int]:
        seq.tokens = text
        (reach,) = lookup.reach([Row(seq, 0)], most)
        (guess,) = lookup.draft([Row(seq, 0)], [reach])
        assert reach == len(guess)
        return guess

    seq = Sequence("r", 0, [0], SamplingParams(), 100)
    assert found([1, 2, 3]) == []
    assert found([1, 2, 3, 4, 5, 6]) == []
    assert found([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]
    assert found([1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 1, 2, 3]) == [7, 1, 2, 3]
    assert found([1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 1, 2, 3], 1) == [7]
    assert found([1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 1, 2, 3, 8, 8, 8, 8]) == [8, 8, 8, 8]
    lookup.forget(seq)
    assert not lookup.places
    assert not lookup.guesses


def test_prompts_are_read_beside_drafts(checkpoint: Checkpoint) -> None:
    """Embeddings and scores of prompts that share a step with drafted texts."""
    many = prompts(8)
    asked = (
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=0, embed=True),
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1),
    )
    each = [asked[(i - 1) % 3] for i in range(8)]
    llm = LLM(checkpoint("llama"), block_size=4, max_running=3, prefix_caching=False)
    want = llm.generate(many, each)
    got = speculating(llm, Told(want)).generate(many, each)
    assert_taken(llm.engine)
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens
        one, other = a.completions[0], b.completions[0]
        assert (one.embedding is None) == (other.embedding is None)
        if one.embedding is not None:
            torch.testing.assert_close(torch.tensor(one.embedding), torch.tensor(other.embedding))
        scores = [[p and p.logprob for p in x.prompt_logprobs or []] for x in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_no_step_starts_ahead_of_one_with_drafts(checkpoint: Checkpoint) -> None:
    engine = LLM(checkpoint("llama")).engine
    engine.add("a", [5, 6, 7], SamplingParams(max_tokens=9, temperature=0))
    (scheduled,) = engine.scheduler.schedule()
    assert engine.scheduler.ahead([scheduled])
    assert not engine.scheduler.ahead([replace(scheduled, draft=(5,))])
