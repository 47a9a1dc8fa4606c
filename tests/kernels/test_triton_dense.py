"""The dense product of few tokens against a matrix product in fp32."""

import os

import pytest
import torch

pytest.importorskip("triton")

from anybit.kernels.triton import dense

DEVICE = torch.device(os.environ.get("ANYBIT_TEST_DEVICE", "cpu"))


@pytest.mark.parametrize("m", range(1, dense.MOST_TOKENS + 1))
@pytest.mark.parametrize(("n", "k"), [(10, 300), (32, 4096), (5, 2056)])
@pytest.mark.parametrize("bias", [False, True])
def test_dense_product(m: int, n: int, k: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(n)
    x, w, b = (torch.randn(s, generator=generator).half().to(DEVICE) for s in ((m, k), (n, k), n))
    x = torch.cat([x, x], 1)[:, :k]  # rows that lie apart
    assert dense.suits(x, w)
    got = dense.linear(x, w, b if bias else None).float()
    want = x.double() @ w.double().T + (b.double() if bias else 0)
    # Sums in fp32, rounded to fp16 once.
    assert ((got - want).abs() <= 2**-11 * want.abs() + 1e-4 * k**0.5).all()
    assert want.abs().max() > 1


def test_what_it_leaves_to_torch() -> None:
    w = torch.zeros(8, 16, dtype=torch.half)
    assert not dense.suits(torch.zeros(dense.MOST_TOKENS + 1, 16, dtype=torch.half), w)
    assert not dense.suits(torch.zeros(1, 16), w)
    assert not dense.suits(torch.zeros(1, 16), w.float())
    assert not dense.suits(torch.zeros(1, 8, dtype=torch.half), w.T.contiguous().T[:, :8])
