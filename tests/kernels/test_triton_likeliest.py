"""The likeliest tokens against torch's."""

import os

import pytest
import torch

pytest.importorskip("triton")

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


def test_no_rows() -> None:
    assert kernel.likeliest(torch.zeros(0, 8, device=DEVICE), -1).shape == (0,)
