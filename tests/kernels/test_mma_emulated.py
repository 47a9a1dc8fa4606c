"""Kernels for `mma.sync` as compiled, run instruction by instruction, against the definition."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from anybit.kernels.mma.tiles import DECODE, Tile
from anybit.kernels.reference import operand_weight
from tests.kernels.mma import Emulated, Tokens, kernel_of

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)

HALF, BRAIN = torch.float16, torch.bfloat16
NARROW = Tile(8, 2, 4, 3, kind="narrow")
# scheme, dtype of y, tile, (M, N, K), CTAs, architecture, overlap
Case = tuple[str, torch.dtype, Tile, tuple[int, int, int], int, str, bool]
CASES: list[Case] = [
    ("liquid@int8", BRAIN, NARROW, (5, 40, 768), 0, "sm_80", False),
    ("int4:group=128", BRAIN, Tile(16, 1, 8, 2, kind="narrow"), (13, 24, 1152), 0, "sm_80", False),
    ("fp6", HALF, NARROW, (3, 32, 640), 0, "sm_90", True),
    ("fp6@fp8", BRAIN, Tile(16, 2, 4, 3, kind="narrow"), (16, 32, 512), 0, "sm_89", False),
    ("liquid@int8", BRAIN, Tile(16, 2, 4, 3), (17, 136, 384), 2, "sm_80", False),
    ("int3:group=32,zero", HALF, Tile(32, 2, 4, 3), (20, 136, 256), 3, "sm_86", False),
]


def product(weight: Tensor, x: Tokens) -> Tensor:
    codes, scale, _ = x
    y = codes.double() @ weight.double().T
    return y if scale is None else y * scale[:, None]


def check(case: Case, seeds: int = 2) -> None:
    scheme, dtype, tile, (m, n, k), grid, architecture, overlap = case
    torch.manual_seed(m * n)
    emulated = Emulated(scheme, dtype, kernel_of(scheme, dtype, tile, architecture, overlap))
    packed = emulated.weight(n, k)
    layout, x = emulated.layout(packed), emulated.tokens(m, k)
    bias = torch.randn(n).to(dtype)
    results = [emulated.run(x, layout, n, bias, grid, seed) for seed in range(seeds)]
    want = product(operand_weight(packed, dtype), x) + bias.double()
    assert not results[0].isnan().any(), "outputs that nobody wrote"
    error = (results[0].double() - want).norm() / want.norm()
    assert error < (1e-3 if dtype == HALF else 5e-3), error
    assert all(torch.equal(r, results[0]) for r in results)  # whatever the order of events


def test_a_weight_is_decoded() -> None:
    """In fp16 and bf16, with what no whole tile covers."""
    for scheme, dtype in (("fp6", HALF), ("int3:group=32,zero", BRAIN)):
        emulated = Emulated(scheme, dtype, kernel_of(scheme, dtype, DECODE))
        packed = emulated.weight(72, 256)
        y = emulated.decode(emulated.layout(packed), (72, 256))
        want = operand_weight(packed, dtype)
        assert (y.float() - want).abs().max() <= torch.finfo(dtype).eps * 1.51 * want.abs().max()
        if scheme == "fp6":
            assert torch.equal(y, packed.dequantize().to(dtype))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2].name}-{c[5]}")
def test_products(case: Case) -> None:
    check(case)
