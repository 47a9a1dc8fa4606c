"""Sampling: the right distribution, filters by definition, rows independent of each other."""

from dataclasses import replace

import pytest
import torch

from anybit.engine import sampler
from anybit.engine.sampler import INVALID
from anybit.engine.sequence import Row, SamplingParams, Sequence
from anybit.kernels.races import race, waits


def sample(logits: torch.Tensor, seqs: list[Sequence], at: int = 0) -> sampler.Sampled:
    """Output token `at` of each sequence."""
    return sampler.sample(logits, [Row(seq, at) for seq in seqs])[1]()


def sequence(params: SamplingParams, prompt: list[int] | None = None) -> Sequence:
    return Sequence("r", 0, prompt or [0], params, 1000, frozenset([1]))


def frequencies(logits: torch.Tensor, params: SamplingParams, count: int = 20000) -> torch.Tensor:
    """How often each token is drawn from one row of logits."""
    seq = sequence(replace(params, seed=0))
    out = torch.zeros(len(logits))
    for first in range(0, count, 500):
        rows = [Row(seq, first + i) for i in range(500)]
        tokens = sampler.choose(logits.expand(500, -1), rows)
        out += torch.bincount(tokens, minlength=len(logits))
    return out / count


LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0, 1.0, -0.5])


def expected(params: SamplingParams) -> torch.Tensor:
    """The distribution, token by token, from the filters' definitions."""
    probs = (LOGITS.double() / params.temperature).softmax(0)
    order = sorted(range(len(probs)), key=lambda t: -probs[t])
    kept = order[: params.top_k or None]
    total, nucleus = 0.0, []
    for token in kept:
        if total >= params.top_p:
            break
        nucleus.append(token)
        total += float(probs[token] / probs[kept].sum())
    kept = [t for t in nucleus if probs[t] >= params.min_p * probs[order[0]]]
    out = torch.zeros_like(probs)
    out[kept] = probs[kept]
    return out / out.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=3),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.1),
        SamplingParams(top_k=1000),
    ],
)
def test_frequencies_follow_the_definition(params: SamplingParams) -> None:
    want, got = expected(params), frequencies(LOGITS, params)
    assert torch.equal(got > 0, want > 0) or (got[want == 0] == 0).all()
    # Five standard deviations of a frequency over 20,000 draws.
    assert ((got - want).abs() <= 5 * (want * (1 - want) / 20000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_row_does_not_depend_on_its_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels draw tokens in int32, and torch's own functions in int64."""
    family = sampler.of(LOGITS)
    drawn = family.drawn
    monkeypatch.setattr(family, "drawn", lambda *args: drawn(*args).to(dtype))
    kinds = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=4),
        SamplingParams(seed=3, top_p=0.5),
        SamplingParams(temperature=0),
        SamplingParams(seed=4, min_p=0.3, repetition_penalty=1.5),
    ]
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    together = [sequence(p) for p in kinds]
    mixed = [sample(logits, together, at)[0] for at in range(20)]
    for i, params in enumerate(kinds):
        seq = sequence(params)
        alone = [sample(logits[i : i + 1], [seq], at)[0][0] for at in range(20)]
        assert alone == [m[i] for m in mixed]


def test_repetition_penalty() -> None:
    """Seen tokens: positive logits divided, negative ones multiplied."""
    logits = torch.tensor([[3.0, 2.0, -1.0, -1.5]])
    seq = sequence(SamplingParams(temperature=0, repetition_penalty=2.0), [0, 2])
    assert sample(logits, [seq])[0] == [1]  # 1.5, 2, -2, -1.5
    seq = sequence(SamplingParams(temperature=0, repetition_penalty=2.0), [0, 1, 2])
    assert sample(logits, [seq])[0] == [0]
    lowest = torch.tensor([[-3.0, -2.0]])
    seq = sequence(SamplingParams(temperature=0, repetition_penalty=2.0), [1])
    assert sample(lowest, [seq])[0] == [0]  # -3, -4


def test_no_end_before_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    params = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[2])
    assert sample(logits, [sequence(params)])[0] == [3]
    assert sample(logits, [sequence(SamplingParams(temperature=0))])[0] == [1]


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, filters and penalties; only for those who ask."""
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    asked = SamplingParams(temperature=0.3, top_k=2, seed=0, logprobs=3, repetition_penalty=1.2)
    seqs = [sequence(p) for p in (asked, SamplingParams(), SamplingParams(logprobs=0, seed=1))]
    tokens, found = sample(logits, seqs)
    want = logits.double().log_softmax(-1)
    assert found[1] is None
    assert found[0].token == tokens[0]
    assert found[0].logprob == pytest.approx(float(want[0, tokens[0]]), abs=1e-5)
    values, order = want[0].topk(3)
    assert [t for t, _ in found[0].top] == order.tolist()
    assert [p for _, p in found[0].top] == pytest.approx(values.tolist(), abs=1e-5)
    assert found[2].top == ()


def test_nan_and_inf_are_invalid() -> None:
    logits = torch.zeros(3, 4)
    logits[0, 2], logits[1, 1] = torch.nan, torch.inf
    seqs = [sequence(SamplingParams(logprobs=1)) for _ in range(3)]
    tokens, _ = sample(logits, seqs)
    assert tokens[:2] == [INVALID, INVALID]
    assert tokens[2] in range(4)


def test_random_numbers_are_exponential_and_independent() -> None:
    """Over columns, places in a text, and texts of neighbouring seeds."""
    seqs = [sequence(SamplingParams(seed=seed)) for seed in range(4)]
    keys = torch.tensor([seq.key(at) for seq in seqs for at in range(64)], dtype=torch.int32)
    uniform = 1 - (-waits(keys, torch.arange(1000)).double()).exp()
    assert len({tuple(key) for key in keys.tolist()}) == 256
    counts = torch.histc(uniform, 64, 0, 1)
    mean = uniform.numel() / 64
    assert (counts - mean).abs().max() < 5 * mean**0.5
    centred = (uniform - 0.5) * 12**0.5
    for a, b in ((centred[:, 1:], centred[:, :-1]), (centred[1:], centred[:-1])):
        assert abs((a * b).mean()) < 5 / a.numel() ** 0.5
    for other in (64, 128):  # the same place in another text
        assert abs((centred[other:] * centred[:-other]).mean()) < 5 / (1000 * 128) ** 0.5
    assert torch.equal(waits(keys, every := torch.arange(1000))[:, :10], waits(keys, every[:10]))


def test_two_models_choose_alike_as_often_as_races_do() -> None:
    """P(both t) = 1 / sum of max(p_s / p_t, q_s / q_t), which is little less than any draw's."""
    random = torch.Generator().manual_seed(0)
    p = torch.randn(12, generator=random, dtype=torch.float64).softmax(0)
    q = (p.log() + 0.7 * torch.randn(12, generator=random, dtype=torch.float64)).softmax(0)
    want = (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum()
    count = 100_000
    seq = sequence(SamplingParams(seed=0))
    keys = torch.tensor([seq.key(at) for at in range(count)], dtype=torch.int32)
    alike = (race(p[None].float(), keys) == race(q[None].float(), keys)).double().mean()
    assert abs(alike - want) < 5 * (want * (1 - want) / count) ** 0.5
    best = torch.minimum(p, q).sum()
    assert best / (2 - best) <= want <= best
