"""Kernels for `mma.sync` as compiled, run instruction by instruction, against the definition."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from anybit.kernels.mma import tiles
from anybit.kernels.mma.tiles import DECODE, Tile
from anybit.kernels.reference import operand_weight
from tests.kernels.mma import GPUS, Emulated, Tokens, kernel_of
from tests.needs import EVERY_KERNEL
from tests.ptx.machine import Machine
from tests.ptx.parse import PtxError

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)

HALF, BRAIN = torch.float16, torch.bfloat16
NARROW = Tile(8, 2, 4, 3, kind="narrow")
STAY = replace(NARROW, stay=True)
TALL = Tile(16, 4, 3, 3, 1, "narrow", stay=True)
# scheme, dtype of y, tile, (M, N, K), CTAs (0: one a tile), architecture, overlap
Case = tuple[str, torch.dtype, Tile, tuple[int, int, int], int, str, bool]
CASES: list[Case] = [
    ("liquid@int8", BRAIN, NARROW, (5, 40, 768), 0, "sm_80", False),
    ("int4:group=128", BRAIN, Tile(16, 1, 8, 2, kind="narrow"), (13, 24, 1152), 0, "sm_80", False),
    ("fp6", HALF, NARROW, (3, 32, 640), 0, "sm_90", True),
    ("fp6@fp8", BRAIN, Tile(16, 2, 4, 3, kind="narrow"), (16, 32, 512), 0, "sm_89", False),
    ("mxfp4@fp8", BRAIN, NARROW, (5, 40, 384), 0, "sm_89", False),
    # CTAs that stay: shared tiles and whole ones; 64 rows; fewer tiles than CTAs, two of tokens.
    ("liquid@int8", HALF, STAY, (8, 168, 384), 4, "sm_80", False),
    ("int4:group=128", BRAIN, TALL, (9, 72, 384), 3, "sm_90", True),
    ("fp5", HALF, replace(STAY, slices=1), (11, 24, 128), 5, "sm_90", True),
    ("liquid@int8", BRAIN, Tile(16, 2, 4, 3), (17, 136, 384), 2, "sm_80", False),
    ("int3:group=32,zero", HALF, Tile(32, 2, 4, 3), (20, 136, 256), 3, "sm_86", False),
]
FORMATS = {  # all kinds of decoders, and the architecture that their products need
    "sm_80": [
        "liquid@int8", "liquid:group=128@int8", "int8@int8", "int4@int8", "sparse@int8", "int8",
        "int8:zero", "int5:group=64", "int4:group=128", "int3:group=32,zero", "int1", "fp8", "fp6",
        "fp5:group=64", "fp4", "fp:e2m1", "sparse", "sparse:group=64",
    ],
    "sm_89": ["int4@fp8", "fp6@fp8", "mxfp4@fp8"],
}  # fmt: skip


def every() -> Iterator[Case]:
    """Each format in each kind of kernel, and each tile of the rule: `make test-emulated`."""
    for architecture, schemes in FORMATS.items():
        for scheme in schemes:
            for dtype in (HALF, BRAIN):
                yield scheme, dtype, NARROW, (5, 40, 896), 0, architecture, False
                yield scheme, dtype, STAY, (5, 104, 512), 3, architecture, False
                yield scheme, dtype, Tile(32, 2, 4, 3), (33, 136, 384), 5, architecture, False
    for scheme in ("liquid@int8", "int4:group=64,zero", "fp6"):
        d = kernel_of(scheme, BRAIN, NARROW).decoder
        for gpu in GPUS.values():
            for n in (1024, 4096, 28672):
                for k in tiles.family(d, gpu, n, "bfloat16"):
                    if k.tile.kind == "decode":
                        continue
                    m, rows = k.tile.tokens, k.tile.rows
                    shape = m - 1, rows + 8, 128 * (k.tile.warps + 1)
                    yield scheme, BRAIN, k.tile, shape, 0, str(gpu.architecture), k.overlap


if EVERY_KERNEL:
    CASES += [case for case in dict.fromkeys(every()) if case not in CASES]


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


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2].name}-{c[3]}-{c[5]}")
def test_products(case: Case) -> None:
    check(case)


def test_one_hot_tokens_read_weights_back() -> None:
    emulated = Emulated("fp6", HALF, kernel_of("fp6", HALF, NARROW))
    packed = emulated.weight(40, 128)
    x = torch.eye(128)[::5].to(HALF)  # four tiles of tokens, the last one not full
    y = emulated.run((x, None, None), emulated.layout(packed), 40)
    assert torch.equal(y, packed.dequantize()[:, ::5].T.to(HALF))


def test_int8_sums_are_exact() -> None:
    """The only roundings are the scale's product and the output's, however CTAs share a tile."""
    emulated = Emulated("int8@int8", BRAIN, kernel_of("int8@int8", BRAIN, Tile(16, 2, 4, 2)))
    packed, x = emulated.weight(72, 512), emulated.tokens(7, 512)
    layout, (codes, scale, _) = emulated.layout(packed), x
    assert scale is not None
    total = codes.double() @ packed.values().double().T
    want = (total.float() * (layout[1][:72] * scale[:, None])).to(BRAIN)
    for grid in (1, 3):
        assert torch.equal(emulated.run(x, layout, 72, grid=grid), want)


MUTANTS = {  # in two narrow kernels and in one whose CTAs share a tile: what is broken
    "the loop does not wait for its stage": ("wait_group 1;", "wait_group 2;", ""),
    "lanes do not meet before they refill": ("bar.warp.sync", "// bar.warp.sync", "narrow"),
    "sums meet before all rings are idle": ("bar.sync", "// bar.sync", ""),
    "counters are left": ("st.global.b32 [%rd", "// st.global.b32 [%rd", "shared"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_do_not_pass(what: str) -> None:
    old, new, only = MUTANTS[what]
    torch.manual_seed(0)
    cases = [("narrow", NARROW, 0), ("narrow shared", STAY, 3), ("shared", Tile(16, 2, 4, 3), 3)]
    for kind, tile, grid in cases:
        if only not in kind:
            continue
        emulated = case_of(tile)
        packed, x = emulated.weight(40, 768), emulated.tokens(8, 768)
        assert old in emulated.ptx
        emulated.machine = Machine(emulated.ptx.replace(old, new))
        with pytest.raises((PtxError, AssertionError)):
            emulated.run(x, emulated.layout(packed), 40, grid=grid)


@cache
def case_of(tile: Tile) -> Emulated:
    return Emulated("liquid@int8", BRAIN, kernel_of("liquid@int8", BRAIN, tile))
