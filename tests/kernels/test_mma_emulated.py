"""Kernels for `mma.sync` as compiled, run instruction by instruction, against the definition."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from anybit.kernels.backend import Pairs
from anybit.kernels.between import TORCH
from anybit.kernels.cute import operands
from anybit.kernels.cute.pack import REGISTERS, pack_codes
from anybit.kernels.hopper.choices import BYTES
from anybit.kernels.hopper.scalar_linear import copy_kernel
from anybit.kernels.mma import tiles
from anybit.kernels.mma.tiles import DECODE, Tile
from anybit.kernels.reference import operand_weight
from tests.kernels import many_experts
from tests.kernels.mma import GPUS, Emulated, Tokens, kernel_of
from tests.needs import EVERY_KERNEL
from tests.ptx.machine import Machine
from tests.ptx.parse import PtxError

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)

HALF, BRAIN = torch.float16, torch.bfloat16
NARROW = Tile(8, 2, 4, 3, kind="narrow")
CROWDED = Tile(8, 1, 5, 3, ctas=4, kind="narrow")
# scheme, dtype of y, tile, (M, N, K), CTAs (0: one a tile), architecture, overlap
Case = tuple[str, torch.dtype, Tile, tuple[int, int, int], int, str, bool]
CASES: list[Case] = [
    ("liquid@int8", BRAIN, NARROW, (5, 40, 768), 0, "sm_80", False),
    ("int4:group=128", BRAIN, Tile(16, 1, 8, 2, kind="narrow"), (13, 24, 1152), 0, "sm_80", False),
    ("fp6", HALF, NARROW, (3, 32, 640), 0, "sm_90", True),
    ("int4:group=128", HALF, Tile(32, 2, 8, 2, kind="narrow"), (35, 40, 256), 0, "sm_90", True),
    ("fp6@fp8", BRAIN, Tile(16, 2, 4, 3, kind="narrow"), (16, 32, 512), 0, "sm_89", False),
    ("trellis", HALF, Tile(32, 1, 4, 3, kind="narrow"), (35, 48, 640), 0, "sm_90", True),
    ("mxfp4@fp8", BRAIN, NARROW, (5, 40, 384), 0, "sm_89", False),
    ("liquid@int8", BRAIN, Tile(16, 2, 4, 3), (17, 136, 384), 2, "sm_80", False),
    ("int3:group=32,zero", HALF, Tile(32, 2, 4, 3), (20, 136, 256), 3, "sm_86", False),
    ("trellis:code=pair8", BRAIN, NARROW, (3, 32, 128), 0, "sm_80", False),
    ("trellis", BRAIN, CROWDED, (2, 16, 768), 0, "sm_90", True),
    ("trellis@int8", HALF, CROWDED, (7, 16, 256), 0, "sm_80", False),
    ("trellis:code=look@int8", BRAIN, NARROW, (5, 48, 768), 0, "sm_90", True),
    ("trellis:bits=3,code=look@int8", HALF, Tile(16, 1, 5, 3, kind="narrow"), (9, 32, 256), 0,
     "sm_80", False),
    ("trellis:bits=4,code=look", BRAIN, CROWDED, (2, 16, 768), 0, "sm_80", False),
    ("trellis:bits=1,code=look", HALF, Tile(32, 2, 4, 3), (17, 144, 256), 3, "sm_86", False),
    # Tiles whose slices lie in two blobs, the last one's behind the weight; of one token each.
    ("trellis:code=look@int8", BRAIN, Tile(8, 7, 8, 2, kind="narrow"), (3, 176, 1152), 0, "sm_90",
     True),
    ("trellis:bits=3,code=look", HALF, Tile(1, 3, 16, 2, kind="narrow"), (2, 160, 384), 0, "sm_90",
     True),
    ("trellis:code=look@int8", BRAIN, Tile(1, 2, 4, 3, kind="narrow"), (1, 48, 640), 0, "sm_80",
     False),
    ("int3:group=32,zero", BRAIN, Tile(8, 5, 5, 2, kind="narrow"), (8, 176, 256), 0, "sm_80",
     False),
    ("trellis:bits=4,code=look", BRAIN, Tile(1, 8, 8, 2, kind="narrow"), (1, 144, 256), 0, "sm_90",
     True),
]  # fmt: skip
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
                yield scheme, dtype, NARROW, (5, 48, 896), 0, architecture, False
                yield scheme, dtype, Tile(32, 2, 4, 3), (33, 144, 384), 5, architecture, False
                if architecture == "sm_80":
                    d = kernel_of(scheme, dtype, NARROW).decoder
                    for tile in tiles.family_small(d, GPUS["H200"]):
                        yield scheme, dtype, tile, (50, 48, 1152), 0, "sm_90", True
    for scheme in ("liquid@int8", "int4:group=64,zero", "fp6"):  # what `anybit tune` may choose
        for tile in (Tile(32, 2, 8, 2), Tile(64, 4, 4, 2), Tile(8, 2, 4, 5)):
            yield scheme, BRAIN, tile, (tile.tokens - 1, tile.rows + 8, 384), 5, "sm_80", False
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


def check(case: Case) -> None:
    scheme, dtype, tile, (m, n, k), grid, architecture, overlap = case
    torch.manual_seed(m * n)
    emulated = Emulated(scheme, dtype, kernel_of(scheme, dtype, tile, architecture, overlap))
    packed = emulated.weight(n, k)
    layout, x = emulated.layout(packed), emulated.tokens(m, k)
    bias = torch.randn(n).to(dtype)
    # In two orders of events where the order could show: where CTAs share a tile.
    seeds = (0, 1) if grid or EVERY_KERNEL else (m % 2,)
    results = [emulated.run(x, layout, n, bias, grid, seed) for seed in seeds]
    want = product(operand_weight(packed, dtype), x) + bias.double()
    assert not results[0].isnan().any(), "outputs that nobody wrote"
    error = (results[0].double() - want).norm() / want.norm()
    assert error < (1e-3 if dtype == HALF else 5e-3), error
    assert all(torch.equal(r, results[0]) for r in results)  # whatever the order of events


def test_a_weight_is_decoded() -> None:
    """In fp16 and bf16, with what no whole tile covers."""
    for scheme, dtype, n in (
        ("fp6", HALF, 72), ("int3:group=32,zero", BRAIN, 72), ("trellis:code=look", HALF, 80),
    ):  # fmt: skip
        emulated = Emulated(scheme, dtype, kernel_of(scheme, dtype, DECODE))
        packed = emulated.weight(n, 640)  # more K tiles than a CTA takes
        y = emulated.decode(emulated.layout(packed), (n, 640))
        want = operand_weight(packed, dtype)
        assert (y.float() - want).abs().max() <= torch.finfo(dtype).eps * 1.51 * want.abs().max()
        if scheme == "fp6":
            assert torch.equal(y, packed.dequantize().to(dtype))


@pytest.mark.parametrize("scheme", ["trellis@int8", "trellis:bits=3,code=look@int8"])
def test_a_weight_is_decoded_to_bytes(scheme: str) -> None:
    """As the main loop takes weights of 8 bits."""
    d = kernel_of(scheme, HALF, DECODE).decoder
    emulated = Emulated(scheme, HALF, copy_kernel(d))
    packed = emulated.weight(128, 256)
    y = emulated.decode(emulated.layout(packed), (128, 256))
    want = pack_codes((packed.values() + d.middle).byte(), BYTES, REGISTERS)
    assert torch.equal(y[:1], want)  # rows are padded


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


@pytest.mark.parametrize("two", [0, 3, 9])
@pytest.mark.parametrize(("tile", "overlap"), [(NARROW, True), (Tile(16, 2, 4, 2), False)])
def test_outputs_of_both_rows_are_added_up(tile: Tile, overlap: bool, two: int) -> None:
    """Others are what they are without, and nothing is written behind the tokens."""
    torch.manual_seed(two)
    spec = kernel_of("int8@int8", BRAIN, tile, "sm_90" if overlap else "sm_80", overlap)
    emulated = Emulated("int8@int8", BRAIN, spec)
    packed, x, bias = emulated.weight(40, 384), torch.randn(9, 384), torch.randn(40).to(BRAIN)
    x[:, 3] *= 40  # which takes most of int8's range
    layout, both = (
        emulated.layout(packed),
        Pairs(torch.tensor([two], dtype=torch.int32), 9, 9 + two),
    )
    codes, scale, sums = TORCH.quantize(x, "int8", both)
    y = emulated.run((codes, scale, sums), layout, 40, bias, pairs=both.count)
    want = TORCH.join(product(operand_weight(packed, BRAIN), (codes, scale, sums)), both, bias)
    assert (y[:9] - want).abs().max() <= want.abs().max() * 2**-8
    assert y[9:].isnan().all()
    alone = TORCH.quantize(x, "int8")
    assert torch.equal(y[two:9], emulated.run(alone, layout, 40, bias)[two:])


EXPERTS = [  # scheme, tile, (N, K), tokens of each expert, CTAs
    ("liquid@int8", Tile(8, 2, 4, 3, kind="experts"), (136, 256), (0, 3, 0, 9, 0), 3),
    ("int4:group=128", Tile(16, 2, 4, 2, kind="experts"), (40, 256), (2, 0, 17), 9),
    ("liquid@int8", Tile(8, 2, 4, 3, kind="few"), (72, 640), (0, 3, 0, 9, 0), 2),
    ("int4:group=64", Tile(8, 1, 8, 4, kind="few"), (24, 320), (1, 0, 2), 1),
    ("trellis:code=look", Tile(8, 1, 4, 3, kind="few"), (32, 640), (1, 0, 2), 2),
]  # fmt: skip
if EVERY_KERNEL:
    EXPERTS += [
        (scheme, Tile(tokens, 2, 4, 2, kind="experts"), (264, 384), (0, 70, 3, 0), 5)
        for scheme in FORMATS["sm_80"] for tokens in (8, 16, 32, 64)
    ] + [
        (scheme, tile, (72, 1152), (0, 20, 3, 0), 2) for scheme in FORMATS["sm_80"]
        for tile in tiles.family_few(kernel_of(scheme, BRAIN, NARROW).decoder, GPUS["H200"])
    ]  # fmt: skip


@pytest.mark.parametrize("case", EXPERTS, ids=lambda c: f"{c[0]}-{c[1].name}")
def test_experts(case: tuple[str, Tile, tuple[int, int], tuple[int, ...], int]) -> None:
    """Tokens sorted by expert: some experts have none, some have more than a tile.

    Rows behind the last expert's are nobody's, and nobody writes them.
    """
    scheme, tile, (n, k), counts, grid = case
    torch.manual_seed(0)
    early = ("sm_90", True) if tile.kind == "few" else ("sm_80", False)
    emulated = Emulated(scheme, BRAIN, kernel_of(scheme, BRAIN, tile, *early))
    experts = [emulated.weight(n, k) for _ in counts]
    given = operands.prepare_experts(experts, emulated.activation, BRAIN)
    ends = [*accumulate(counts)]
    x = emulated.tokens(ends[-1] + 2, k)
    starts = torch.tensor([0, *ends], dtype=torch.int32)
    y = emulated.run(x, list(given.layout), n, grid=grid, starts=starts)
    want = torch.cat([
        product(operand_weight(e, BRAIN), tuple(t if t is None else t[a:b] for t in x))
        for e, (a, b) in zip(experts, pairwise([0, *ends]), strict=True)
    ])  # fmt: skip
    assert not y[: ends[-1]].isnan().any()
    assert y[ends[-1] :].isnan().all()
    assert (y[: ends[-1]].double() - want).norm() / want.norm() < 5e-3
    if scheme == "liquid@int8":  # whatever the order of events
        again = emulated.run(x, list(given.layout), n, grid=grid, seed=1, starts=starts)
        assert torch.equal(y[: ends[-1]], again[: ends[-1]])


@pytest.mark.parametrize("kind", ["experts", "few"])
def test_no_expert_has_tokens(kind: str) -> None:
    emulated = case_of(Tile(8, 2, 4, 3, kind=kind))
    experts = [emulated.weight(8, 128) for _ in range(256)]
    given = operands.prepare_experts(experts, "int8", BRAIN)
    x = emulated.tokens(2, 128)
    starts = torch.zeros(257, dtype=torch.int32)
    assert emulated.run(x, list(given.layout), 8, grid=1, starts=starts).isnan().all()
    starts[256] = 2  # all are the last one's
    y = emulated.run(x, list(given.layout), 8, grid=1, starts=starts)
    want = product(operand_weight(experts[-1], BRAIN), x)
    assert (y.double() - want).norm() / want.norm() < 5e-3


@pytest.mark.parametrize("kind", ["experts", "few"])
def test_more_experts_than_a_table_has_spans(kind: str) -> None:
    n, k = 24, 128
    emulated = case_of(Tile(8, 2, 4, 3, kind=kind))
    some = [emulated.weight(n, k) for _ in range(3)]
    given = operands.prepare_experts(some, "int8", BRAIN)
    layout = many_experts.layout_of_all(given.layout)
    x = emulated.tokens(many_experts.TOKENS, k)
    codes, scale, _ = x
    assert scale is not None
    want = many_experts.products(codes, scale, some, BRAIN)
    for grid in (1, 5):
        y = emulated.run(x, layout, n, grid=grid, starts=many_experts.STARTS)
        assert (y.double() - want).norm() / want.norm() < 5e-3
    nobody = torch.zeros_like(many_experts.STARTS)
    assert emulated.run(x, layout, n, grid=2, starts=nobody).isnan().all()


MUTANTS = {  # in a narrow kernel and in one whose CTAs share a tile: what is broken
    "the loop does not wait for its stage": ("wait_group 1;", "wait_group 2;", ""),
    "lanes do not meet before they refill": ("bar.warp.sync", "// bar.warp.sync", "narrow"),
    "sums meet before all rings are idle": ("bar.sync", "// bar.sync", ""),
    "counters are left": ("st.global.b32 [%rd", "// st.global.b32 [%rd", "gemm"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_mutants_do_not_pass(what: str) -> None:
    old, new, only = MUTANTS[what]
    torch.manual_seed(0)
    for kind, tile in (("narrow", NARROW), ("gemm", Tile(16, 2, 4, 3))):
        if only and kind != only:
            continue
        emulated = case_of(tile)
        packed, x = emulated.weight(40, 768), emulated.tokens(8, 768)
        assert old in emulated.ptx
        emulated.machine = Machine(emulated.ptx.replace(old, new))
        with pytest.raises((PtxError, AssertionError)):
            emulated.run(x, emulated.layout(packed), 40, grid=0 if kind == "narrow" else 3)


@cache
def case_of(tile: Tile) -> Emulated:
    return Emulated("liquid@int8", BRAIN, kernel_of("liquid@int8", BRAIN, tile))
