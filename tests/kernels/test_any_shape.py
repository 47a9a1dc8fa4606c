"""Weights whose K is no multiple of a K tile, and whose N is no multiple of 8, in every family.

Kernels run instruction by instruction. One-hot tokens read the last columns back; what lies behind
them in the padded weight must count nothing, whatever number it is.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import anybit
from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import CODES
from anybit.kernels.cute import operands
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.mma.tiles import DECODE
from anybit.kernels.mma.tiles import Tile as MmaTile
from anybit.kernels.reference import operand_weight, quantize_tokens
from anybit.nn.linear import QuantLinear
from tests.kernels.mma import Emulated as MmaEmulated
from tests.kernels.mma import Tokens, kernel_of
from tests.kernels.test_hopper_emulated import Emulated, assert_close, packed_weight, product
from tests.needs import EVERY_KERNEL

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
HALF, BRAIN = torch.float16, torch.bfloat16
NARROW, WIDE = MmaTile(8, 2, 4, 3, kind="narrow"), MmaTile(16, 2, 4, 3)
# scheme, K
FORMATS = [
    ("liquid@int8", 192),
    ("int3:group=32,zero", 160),
    ("fp6@fp8", 336),
]
if EVERY_KERNEL:
    FORMATS += [
        ("int8:zero@int8", 80),
        ("int4:group=64", 448),
        ("mxfp4", 96),
        ("nvfp4", 144),
        ("int4@fp8", 272),
        ("sparse@int8", 48),
        ("fp6", 136),
        ("int1", 8),
    ]


def last_columns(emulated: Emulated | MmaEmulated, k: int) -> tuple[Tokens, Tensor]:
    """Tokens (8, K) with a single number each, in the last columns; those columns."""
    columns = torch.arange(k - 1, k - 17, -2)
    x = torch.zeros(8, k)
    x[torch.arange(8), columns] = 1
    if emulated.activation is None:
        return (x.to(emulated.dtype), None, None), columns
    sums = torch.ones(8, dtype=torch.int32)
    codes = x.to(CODES[emulated.activation])
    return (codes, torch.ones(8), sums), columns


@needs_dsl
@pytest.mark.parametrize(("scheme", "k"), FORMATS)
def test_hopper_reads_the_last_columns(scheme: str, k: int) -> None:
    torch.manual_seed(k)
    emulated = Emulated(scheme, BRAIN, Tile(8, ctas=2, split=2, stages=2))
    packed = packed_weight(scheme, 24, k)
    prepared = operands.layout(packed, emulated.operand)
    x, columns = last_columns(emulated, k)
    y = emulated.run(x, prepared, 24, 2)
    weight = operand_weight(packed, BRAIN)
    assert_close(y, weight[:, columns].T.double(), BRAIN)
    x = emulated.tokens(8, k)
    assert_close(emulated.run(x, prepared, 24, 2), product(weight, x), BRAIN)


@needs_dsl
@pytest.mark.parametrize(("scheme", "k"), FORMATS)
@pytest.mark.parametrize("tile", [NARROW, WIDE], ids=["narrow", "wide"])
def test_mma_reads_the_last_columns(scheme: str, k: int, tile: MmaTile) -> None:
    torch.manual_seed(k)
    architecture = "sm_89" if scheme.endswith("fp8") else "sm_80"
    emulated = MmaEmulated(scheme, BRAIN, kernel_of(scheme, BRAIN, tile, architecture))
    packed = emulated.weight(24, k)
    layout, weight = emulated.layout(packed), operand_weight(packed, BRAIN)
    x, columns = last_columns(emulated, k)
    grid = 2 if tile is WIDE and k > 128 else 0
    assert_close(emulated.run(x, layout, 24, grid=grid), weight[:, columns].T.double(), BRAIN)
    x = emulated.tokens(8, k)
    assert_close(emulated.run(x, layout, 24, grid=grid), product(weight, x), BRAIN)


@needs_dsl
def test_a_decoded_copy_has_no_more_columns() -> None:
    emulated = MmaEmulated(
        "int3:group=32,zero", HALF, kernel_of("int3:group=32,zero", HALF, DECODE)
    )
    packed = emulated.weight(40, 160)
    y = emulated.decode(emulated.layout(packed), (40, 160))
    want = operand_weight(packed, HALF)
    assert (y.float() - want).abs().max() <= torch.finfo(HALF).eps * 1.51 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, HALF])
def test_tokens_lie_in_whole_16_bytes(dtype: torch.dtype) -> None:
    x = torch.ones(3, 50).to(dtype)
    for given in (x, x.repeat(1, 2)[:, 1:51]):
        rows = operands.aligned(given)
        assert rows.shape[1] * rows.element_size() % 16 == 0
        assert torch.equal(rows[:, :50].float(), given.float())
        assert not rows[:, 50:].float().any()
    assert operands.aligned(rows) is rows


def test_outputs_are_cut() -> None:
    y, bias = torch.randn(3, 24), torch.randn(21)
    assert operands.whole(21) == 24
    assert operands.offsets(None, 24, HALF) is None
    padded = operands.offsets(bias, 24, HALF)
    assert padded is not None
    assert torch.equal(padded[:21], bias.half())
    assert padded.shape == (24,)
    assert torch.equal(operands.cut(y, 21), y[:, :21])
    assert operands.cut(y, 21).is_contiguous()
    assert operands.cut(y, 24) is y


@pytest.mark.skipif(os.environ.get("ANYBIT_TEST_DEVICE") != "cuda", reason="runs on a GPU")
@pytest.mark.parametrize("scheme", ["int4:group=32", "fp6", "liquid:group=32@int8", "int8"])
def test_layers_of_any_shape_on_this_gpu(scheme: str) -> None:
    """As `anybit.linear` launches them, with the rules' own tiles; beside the definition."""
    fmt, activation = parse_scheme(scheme)
    for n, k in ((8, 32), (200, 96), (1000, 4096), (576, 1792), (2056, 2752), (5120, 2880)):
        packed = anybit.quantize_tensor(torch.randn(n, k, device="cuda") * 0.02, fmt)
        layer = QuantLinear(packed, None, activation, BRAIN)
        for m in (1, 5, 17, 33, 48, 64, 70, 300, 1100):
            x = torch.randn(m, k, device="cuda", dtype=BRAIN)
            seen = x.double()
            if activation is not None:
                codes, scale = quantize_tokens(x, activation)
                seen = codes.double() * scale.double()
            want = seen @ packed.dequantize().double().T
            error = float((layer(x).double() - want).norm() / want.norm())
            assert error < 8e-3, (n, k, m, error)
