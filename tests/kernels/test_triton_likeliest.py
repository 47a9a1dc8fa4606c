"""The likeliest tokens against torch's."""

import os

import pytest
import torch

pytest.importorskip("triton")

from anybit.kernels.between import TORCH
from anybit.kernels.races import waits
from anybit.kernels.triton import likeliest as kernel

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("vocabulary", [7, 96, 50_001])
def test_likeliest(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(5, vocabulary + 3, generator=generator).half()[:, :-3]  # rows lie apart
    logits[1, 3] = logits[1, 5] = logits[1, -1] = 9  # the first of equal ones
    logits[2, -1] = 9
    got = kernel.likeliest(logits.to(DEVICE), -1).tolist()
    assert got == logits.max(-1).indices.tolist()
    assert got[1:3] == [3, vocabulary - 1]


def test_rows_that_are_no_numbers() -> None:
    logits = torch.zeros(5, 40_000)
    logits[0, 39_000], logits[1, 5], logits[3, 7] = NAN, INF, -INF
    logits[2] = -INF
    logits[4, :2] = torch.tensor([NAN, INF])
    assert kernel.likeliest(logits.to(DEVICE), -1).tolist() == [-1, -1, -1, 0, -1]


def test_races_are_won_by_whom_the_definition_says() -> None:
    """With few tokens that count, and many; a token that is too improbable never wins."""
    generator = torch.Generator().manual_seed(0)
    rows = 96
    logits = torch.randn(rows, 5003, generator=generator).bfloat16()[:, :-3] * 4
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).int()
    temperature = torch.linspace(0.01, 20, rows)[:, None]
    least = torch.tensor([0.0, 0.2, 1.0])[torch.arange(rows) % 3, None].log()
    given = [t.to(DEVICE) for t in (logits.argmax(-1).int(), temperature, least, keys)]
    logits = logits.to(DEVICE)
    got = kernel.drawn(logits, *given)
    assert torch.equal(got.long(), TORCH.drawn(logits, *given))
    assert torch.equal(logits[2::3].gather(1, got[2::3, None].long()), logits[2::3].amax(1, True))
    assert (got != given[0]).sum() > rows / 4


def test_waits_are_as_exact_as_those_of_the_definition() -> None:
    """All logits are the same, so that numbers alone decide: the shortest waits, and all others."""
    keys = torch.arange(64, dtype=torch.int32).view(32, 2).to(DEVICE)
    logits = torch.zeros(32, 3000, device=DEVICE)
    some = torch.full((32, 1), -INF, device=DEVICE), keys
    best = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    got = kernel.drawn(logits, best, torch.ones(32, 1, device=DEVICE), *some)
    want = waits(keys, torch.arange(3000, dtype=torch.int32, device=DEVICE))
    assert torch.equal(got.long(), want.argmin(-1))
    # Of two tokens the second wins if its logit is larger by more than the waits' logarithms are.
    apart = (want[:, 1] / want[:, 0]).log()[:, None]
    for sign in (1, -1):
        two = torch.cat([torch.zeros_like(apart), apart + sign * 1e-5 * (1 + apart.abs())], 1)
        best = two.argmax(1).int()
        got = kernel.drawn(two, best, torch.ones(32, 1, device=DEVICE), *some)
        assert (got == (sign > 0)).all()


def test_no_rows() -> None:
    assert kernel.likeliest(torch.zeros(0, 8, device=DEVICE), -1).shape == (0,)
