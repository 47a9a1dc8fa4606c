"""Penalties, biases and bans by their definitions, at a cost that does not grow with the text."""

import gc
import math
import random

import pytest
import torch

from anybit.engine import penalties
from anybit.engine.llm import LLM
from anybit.engine.penalties import penalize
from anybit.engine.sampler import INVALID, choose
from anybit.engine.sequence import Row, SamplingParams, Sequence
from tests.engine.conftest import PICO

V = 40


def sequence(params: SamplingParams, prompt: list[int]) -> Sequence:
    return Sequence("r", 0, prompt, params, 10_000, frozenset([1]))


def defined(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """A row of logits (V,) after everything, token by token in fp64."""
    params, out = row.seq.params, logits.double().clone()
    written = [*row.seq.tokens[len(row.seq.prompt) :], *row.draft]
    for token in range(len(out)):
        if token in (*row.seq.prompt, *written):
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        if token in written:
            out[token] -= params.presence_penalty + params.frequency_penalty * written.count(token)
        out[token] += params.logit_bias.get(token, 0)
        if row.at < params.min_tokens and token in (*row.seq.eos, *params.stop_token_ids):
            out[token] = -math.inf
    return out


KINDS = [
    {},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -1.3},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.3, "frequency_penalty": 0.2, "presence_penalty": -1.0},
    {"logit_bias": {3: 2.0, 39: -5.0}, "min_tokens": 30, "stop_token_ids": [7, 3]},
    {"repetition_penalty": 1.1, "logit_bias": {5: 1.0}, "min_tokens": 4},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_follow_their_definitions(dtype: torch.dtype) -> None:
    """Over texts that grow by one token a step or several, with drafts, in changing company."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    seqs = [
        sequence(SamplingParams(max_tokens=None, **kind), [rng.randrange(V) for _ in range(9)])
        for kind in KINDS * 2
    ]
    for _ in range(60):
        rows: list[Row] = []
        for seq in rng.sample(seqs, rng.randrange(1, len(seqs))):
            rows.append(Row(seq, seq.generated))
            for _ in range(rng.choice([0, 0, 3])):
                rows.append(rows[-1].after(rng.randrange(V)))
        logits = torch.randn(len(rows), V, generator=generator).to(dtype)
        before = logits.clone()
        got = penalize(logits, rows)
        assert torch.equal(logits, before)
        want = torch.stack([defined(x, row) for x, row in zip(logits, rows, strict=True)])
        assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-6)
        for seq in seqs:
            for _ in range(rng.choice([0, 1, 1, 4])):
                seq.append(rng.randrange(V))


@pytest.mark.parametrize("several", [False, True])
def test_the_last_token_may_be_on_the_device_alone(several: bool) -> None:
    """As in steps that are started ahead. Some of these fail, and their tokens are others then."""
    rng = random.Random(1)
    kinds = [kind for kind in KINDS if several or "repetition_penalty" in kind]
    prompts = [[rng.randrange(V) for _ in range(9)] for _ in kinds]
    seqs, known = (
        [
            sequence(SamplingParams(max_tokens=None, **kind), prompt)
            for kind, prompt in zip(kinds, prompts, strict=True)
        ]
        for _ in range(2)
    )
    for step in range(40):
        logits = torch.randn(len(seqs), V)
        last = [rng.randrange(V) for _ in seqs]
        given = torch.tensor(last, dtype=torch.int32)
        got = penalize(logits, [Row(seq, seq.generated + 1) for seq in seqs], given)
        if step % 5 < 4:
            for seq, other, token in zip(seqs, known, last, strict=True):
                seq.append(token)
                other.append(token)
            assert torch.equal(got, penalize(logits, [Row(s, s.generated) for s in known]))
        else:  # what was given has never been
            again = penalize(logits, [Row(seq, seq.generated) for seq in seqs])
            assert torch.equal(again, penalize(logits, [Row(s, s.generated) for s in known]))


def test_a_step_copies_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 5,000 tokens as after five."""
    copied, numbers = [0], penalties.numbers

    def counted(values: list, device: torch.device) -> torch.Tensor:
        out = numbers(values, device)
        copied[-1] += out.numel()
        return out

    monkeypatch.setattr(penalties, "numbers", counted)
    kind = {"presence_penalty": 0.5, "repetition_penalty": 1.2}
    seqs = [sequence(SamplingParams(max_tokens=None, **kind), [5]) for _ in range(3)]
    logits = torch.zeros(3, 6000)
    for token in range(5000):
        copied.append(0)
        for seq in seqs:
            seq.append(token)
        if token % 500 < 3:
            penalize(logits, [Row(seq, seq.generated) for seq in seqs])
    # Of each text: its row and the tokens there; and row, place and token of the new one.
    assert copied[2] == copied[-1 - 498] == 3 * (3 + 3)


def test_a_row_of_the_table_goes_with_the_text() -> None:
    table = penalties.table_of(torch.device("cpu"))
    gc.collect()
    before = table.rows - len(table.free)
    made: set[int] = set()
    llm = LLM(PICO, dtype="float32")
    llm.engine.runner.overlaps = True
    token = llm.engine.observer.token

    def watched(seq: Sequence, since: float | None) -> None:
        made.update(tally.row for tally in seq.tallies.values())
        token(seq, since)

    llm.engine.observer.token = watched  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=5, presence_penalty=1.0, ignore_eos=True)
    for _ in range(9):  # one after the other, whose rows are the same
        llm.generate(["a", "b"], params)
    gc.collect()
    assert len(made) == 2
    assert table.rows - len(table.free) == before


def test_rows_of_others_and_tables_that_grow_change_nothing() -> None:
    """A row is used again with what an earlier text has left there."""
    rng = random.Random(2)
    seqs: list[Sequence] = []
    for step in range(200):
        if len(seqs) < 12 and rng.random() < 0.4:
            prompt = [rng.randrange(V) for _ in range(rng.choice([3, 200]))]
            seqs.append(sequence(SamplingParams(max_tokens=None, **rng.choice(KINDS[1:5])), prompt))
        if seqs and rng.random() < 0.2:
            seqs.remove(rng.choice(seqs))
        rows = [Row(seq, seq.generated) for seq in rng.sample(seqs, len(seqs))]
        logits = torch.randn(len(rows), V)
        want = [defined(x, row) for x, row in zip(logits, rows, strict=True)]
        if rows:
            got = penalize(logits, rows).double()
            assert torch.allclose(got, torch.stack(want), rtol=1e-6, atol=1e-6), step
        for seq in seqs:
            seq.append(rng.randrange(V))


def test_counts_that_fail_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts may fail where the step behind them goes on."""
    seq = sequence(SamplingParams(presence_penalty=1.0, max_tokens=None), [2])
    row = Row(seq, 0)

    def fail(*args: object) -> None:
        raise MemoryError("no room")

    for token in (3, 4, 5):
        seq.append(token)
        with monkeypatch.context() as patch:
            patch.setattr(penalties.Table, "write", fail)
            with pytest.raises(MemoryError):
                penalize(torch.zeros(1, V), [row])
        found = penalize(torch.zeros(1, V), [row])[0].nonzero().flatten().tolist()
        assert found == [*range(3, token + 1)]


SEEN = 4  # the token that the prompt holds; neither the likeliest nor the first


@pytest.mark.parametrize("tiny", [1e-10, 1e-38, 1e-45, 1e-50, 1e-300, 5e-324])
def test_tiny_parameters_mean_what_they_say(tiny: float) -> None:
    """Also below what fp32 holds."""
    logits = torch.zeros(1, V)
    logits[0, 9], logits[0, SEEN], logits[0, 6] = 12.0, 3.0, 2.0
    for params, want in (
        (SamplingParams(top_p=tiny), 9),
        (SamplingParams(temperature=tiny), 9),
        (SamplingParams(top_p=tiny, temperature=100.0), 9),
        (SamplingParams(repetition_penalty=tiny), SEEN),
        (SamplingParams(repetition_penalty=tiny, temperature=0), SEEN),
        (SamplingParams(repetition_penalty=tiny, temperature=1.1e-5), SEEN),
        (SamplingParams(min_p=1.0), 9),
        (SamplingParams(min_p=1.0, top_k=10**30, top_p=tiny), 9),
    ):
        seq = sequence(params, [SEEN, 6])
        assert {int(choose(logits, [Row(seq, at)])) for at in range(20)} == {want}
    for params in (
        SamplingParams(min_p=tiny),
        SamplingParams(presence_penalty=tiny),
        SamplingParams(frequency_penalty=-tiny, temperature=-0.0),
        SamplingParams(logit_bias={9: -100.0, 3: 100.0}),
    ):
        seq = sequence(params, [SEEN])
        assert 0 <= int(choose(logits, [Row(seq, 0)])) < V


def test_where_nothing_is_left_to_choose_nothing_is_chosen() -> None:
    logits = torch.full((2, V), -math.inf)
    logits[:, 1] = 1.0
    early = sequence(SamplingParams(min_tokens=3), [2])
    free = sequence(SamplingParams(), [2])
    assert choose(logits, [Row(early, 0), Row(free, 0)]).tolist() == [INVALID, 1]
