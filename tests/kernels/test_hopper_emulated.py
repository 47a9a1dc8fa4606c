"""Hopper kernels as compiled, run instruction by instruction on the CPU, against the definition.

Every feature of the main loop appears in one of these kernels at least: split K, 256-row tiles with
register reallocation, experts, every operand type, ragged M and N, bias.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from anybit.core.packed import Packed
from anybit.core.scheme import parse_scheme
from anybit.kernels.backend import Pairs
from anybit.kernels.between import TORCH
from anybit.kernels.cute import operands
from anybit.kernels.cute.operands import decoder_for
from anybit.kernels.hopper import tiles
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.reference import operand_weight, quantize_tokens
from tests.kernels import many_experts
from tests.kernels.mma import generated
from tests.needs import EVERY_KERNEL
from tests.ptx.machine import Machine
from tests.ptx.state import InUse, TensorMap
from tests.specs import weight_of

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)

HALF, BRAIN = torch.float16, torch.bfloat16
# scheme, dtype of y, tile, (M, N, K)
CASES = [
    ("liquid@int8", BRAIN, Tile(8, ctas=2), (5, 264, 384)),
    ("liquid:group=128@int8", BRAIN, Tile(16, ctas=2, split=4, stages=2), (3, 128, 512)),
    ("int8@int8", BRAIN, Tile(16, split=3), (11, 200, 512)),
    ("fp6", HALF, Tile(16, ctas=2, split=2), (16, 136, 384)),
    ("int3:group=32,zero", HALF, Tile(8, ctas=2), (7, 128, 256)),
    ("int4:group=128", BRAIN, Tile(128, rows=256, stages=2), (130, 200, 256)),
    ("fp6", HALF, Tile(16, rows=256, stages=5, columns=64, late=True), (20, 136, 384)),
    ("int4:group=128", HALF, Tile(112, stages=2, late=True), (115, 128, 256)),
    ("fp6@fp8", HALF, Tile(8, ctas=2), (8, 128, 256)),
    ("fp8:group=128@fp8", BRAIN, Tile(16, ctas=2, split=2), (11, 136, 512)),
    ("mxfp4@fp8", BRAIN, Tile(16, ctas=2, split=2), (11, 200, 512)),
    ("int4:group=32@int8", BRAIN, Tile(16, ctas=2, split=2), (11, 200, 384)),
    ("q4_k", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
    ("iq2_xs", HALF, Tile(8, ctas=2), (8, 128, 256)),
    ("sparse@int8", HALF, Tile(8, ctas=2), (8, 128, 384)),
    ("trellis@int8", BRAIN, Tile(128, stages=2), (9, 144, 256)),
    ("trellis:code=look@int8", BRAIN, Tile(16, ctas=2, split=2), (11, 144, 256)),
    ("trellis:bits=3,code=look", HALF, Tile(16, stages=4, columns=64, late=True), (20, 144, 384)),
]
if EVERY_KERNEL:
    CASES += [
        ("int8", HALF, Tile(16, ctas=2, stages=2), (9, 136, 256)),
        ("mxfp4", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
        ("mxfp6@fp8", BRAIN, Tile(16, ctas=2, split=2), (11, 200, 512)),
        ("iq4_xs", HALF, Tile(8, ctas=2), (8, 128, 256)),
        ("int4:group=128@fp8", HALF, Tile(64), (70, 200, 384)),
        ("int4:group=256@fp8", HALF, Tile(8, ctas=2), (3, 128, 512)),
        ("mxfp8@fp8", BRAIN, Tile(128), (130, 136, 352)),
        ("mxfp6@fp8", BRAIN, Tile(128, late=True), (130, 136, 352)),
        ("int4:group=128@int8", BRAIN, Tile(64, late=True), (70, 136, 640)),
        ("int4:group=64@fp8", HALF, Tile(8, ctas=2), (3, 128, 320)),
        ("nvfp4:group=64@fp8", HALF, Tile(16, ctas=2), (9, 128, 256)),
        ("mxfp4@int8", HALF, Tile(8, ctas=2), (8, 128, 256)),
        ("iq3_s", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
        ("iq3_s@int8", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
        ("iq4_xs@int8", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
        ("fp4@int8", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
        ("int8:group=256@int8", HALF, Tile(64), (9, 128, 512)),
        ("int3:group=128@int8", BRAIN, Tile(32, ctas=2), (9, 136, 384)),
        ("liquid@int8", HALF, Tile(16, ctas=2, split=2), (17, 128, 640)),
        ("liquid@int8", BRAIN, Tile(32, stages=2), (40, 256, 512)),
        ("liquid@int8", BRAIN, Tile(128, rows=256, stages=2), (9, 256, 384)),
        ("int8@int8", BRAIN, Tile(128, stages=2), (8, 128, 640)),
        ("int3:group=128", HALF, Tile(8, ctas=2, split=6), (8, 136, 896)),
        ("int4@int8", BRAIN, Tile(8, ctas=2), (8, 128, 256)),
        ("fp6", BRAIN, Tile(32, ctas=2, stages=2), (33, 128, 384)),
        ("int4:group=128", BRAIN, Tile(8, ctas=2), (8, 128, 384)),
        ("fp6", HALF, Tile(128, rows=256, stages=2), (9, 256, 384)),
        ("int4@fp8", BRAIN, Tile(8, ctas=2), (6, 128, 256)),
        ("q2_k", HALF, Tile(8, ctas=2), (3, 128, 256)),
        ("q6_k", BRAIN, Tile(8, ctas=2), (3, 128, 256)),
        ("nf4", BRAIN, Tile(8, ctas=2), (3, 128, 256)),
        ("nvfp4", HALF, Tile(8, ctas=2, split=2), (3, 128, 256)),
        ("sparse:group=64", BRAIN, Tile(16, ctas=2, split=2), (9, 128, 384)),
        ("sparse", HALF, Tile(8, ctas=2), (5, 128, 256)),
        ("trellis", HALF, Tile(16, ctas=2, split=2), (16, 144, 384)),
        ("trellis:bits=4,code=mul1", BRAIN, Tile(128, rows=256, stages=2), (130, 144, 128)),
        ("trellis:bits=3@int8", HALF, Tile(256, stages=2), (64, 144, 256)),
        ("trellis", HALF, Tile(256, split=2), (64, 144, 512)),
        ("trellis@int8", BRAIN, Tile(256, split=2), (64, 144, 512)),
        ("fp6", BRAIN, Tile(160, late=True), (165, 136, 256)),
        ("int4:group=128", HALF, Tile(176, late=True), (180, 136, 256)),
    ]
PAIRED = [Tile(16, ctas=2, split=2)]
if EVERY_KERNEL:
    PAIRED += [Tile(8, ctas=2), Tile(32, stages=2), Tile(128, rows=256, stages=2)]
EXPERTS = [("liquid@int8", 48)]  # and tokens of a tile
if EVERY_KERNEL:
    others = ["liquid@int8", "mxfp4@fp8", "mxfp8@fp8", "int4:group=128@int8", "fp8:group=128@fp8"]
    EXPERTS += [(scheme, 8) for scheme in (*others, "fp8:group=128", "mxfp4")]
    EXPERTS += [("int4:group=64", 48), ("liquid@int8", 160)]


CODES = ("sum8", "pair8", "look", "mul1", "mcg", "3inst")
READ = ["fp6", "trellis"]
if EVERY_KERNEL:
    READ += [f"trellis:bits={bits}" for bits in (1, 3, 4, 5, 6, 7, 8)]
    READ += [f"trellis:bits={bits}@int8" for bits in range(1, 9)]
    READ += [f"trellis:code={code}" for code in CODES]


class Emulated:
    """A compiled kernel and what it is launched with."""

    def __init__(self, scheme: str, dtype: torch.dtype, tile: Tile, grouped: bool = False):
        from anybit.kernels.hopper import stream_k, tile_order

        self.fmt, self.activation = parse_scheme(scheme)
        self.dtype = dtype
        self.operand = operands.operand_of(self.activation, dtype)
        decoder = decoder_for(self.fmt, getattr(torch, self.operand))
        self.tile = tiles.fitted(tile, decoder, grouped)
        kernel = Kernel(decoder, self.tile, operands.NAMES[dtype], grouped=grouped)
        self.ptx, _, self.shared = generated(kernel, stream_k.LEAST_UNITS, tile_order.NEAR)
        self.machine = Machine(self.ptx)

    def tokens(self, m: int, k: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x = torch.randn(m, k).to(self.dtype)
        if self.activation is None:
            return x, None, None
        codes, scale = quantize_tokens(x, self.activation)
        return codes, scale.flatten(), codes.float().sum(1).int()

    def run(
        self,
        x: tuple[Tensor, Tensor | None, Tensor | None],
        prepared: list[Tensor],
        n: int,
        grid: int,
        bias: Tensor | None = None,
        starts: Tensor | None = None,
        seed: int = 0,
        into: tuple[Tensor, int] | None = None,
        pairs: Tensor | None = None,
    ) -> Tensor:
        """y (M, N). into: another y of more outputs, and the first that is written, instead.

        pairs: `Pairs.count`.
        """
        codes, scale, sums = x
        m, k = codes.shape
        y, first = into or (torch.full((m, n), torch.nan, dtype=self.dtype), 0)
        size, places = codes.element_size(), grid if self.tile.stream_k else 0
        work = torch.full((2 * places * self.tile.rows * self.tile.tokens,), torch.nan)
        counters = torch.zeros(8 * places, dtype=torch.int32)
        rows = codes.view(torch.uint8).numpy().reshape(m, k * size)
        arguments = [
            TensorMap(rows, self.tile.tokens, size, in_use=True),
            0,
            *(array(t) for t in [*prepared, None][:4]),
            *(in_use(t) for t in (scale, sums)),
            array(bias),
            *(in_use(t) for t in (y.view(-1)[first:], starts, work, counters, pairs)),
            *(m, n, y.shape[1], k, 1 if starts is None else len(starts) - 1, 1),
        ]
        self.machine.launch(arguments, grid, self.tile.threads, self.shared, self.tile.split, seed)
        assert not counters.any()
        return y


def array(tensor: Tensor | None) -> np.ndarray | int:
    """The memory of a tensor, which the machine writes to; 0 for none."""
    return 0 if tensor is None else tensor.view(torch.uint8).numpy()


def in_use(tensor: Tensor | None) -> InUse | int:
    """Memory that the previous kernel may still use."""
    return 0 if tensor is None else InUse(tensor.view(torch.uint8).numpy())


def packed_weight(scheme: str, n: int, k: int) -> Packed:
    return weight_of(parse_scheme(scheme)[0], torch.randn(n, k) * 0.02)


def product(weight: Tensor, x: tuple[Tensor, Tensor | None, Tensor | None]) -> Tensor:
    codes, scale, _ = x
    y = codes.double() @ weight.double().T
    return y if scale is None else y * scale[:, None]


def assert_close(y: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Up to the output's rounding, a scaled weight's rounding, and fp32 sums."""
    assert not y.isnan().any(), "outputs that nobody wrote"
    error = (y.double() - want).norm() / want.norm()
    assert error < (1e-3 if dtype == HALF else 5e-3), error


@pytest.mark.parametrize(("scheme", "dtype", "tile", "shape"), CASES)
def test_products(scheme: str, dtype: torch.dtype, tile: Tile, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    torch.manual_seed(m * n)
    emulated = Emulated(scheme, dtype, tile)
    packed = packed_weight(scheme, n, k)
    prepared = operands.layout(packed, emulated.operand)
    x, bias = emulated.tokens(m, k), torch.randn(n).to(dtype)
    whole = tiles.grid(emulated.tile, m, n)
    # Fewer CTAs than tiles, each of which does several; and in two orders of events where the order
    # could show: where CTAs share a tile.
    few = 1 if emulated.tile.split == 1 else whole
    runs = [(few, 1)] if few < whole and not EVERY_KERNEL else [(whole, 0), (few, 1)]
    results = [emulated.run(x, prepared, n, grid, bias, seed=seed) for grid, seed in runs]
    want = product(operand_weight(packed, dtype), x) + bias.double()
    assert_close(results[0], want, dtype)
    assert all(torch.equal(y, results[0]) for y in results)


def test_token_tiles_come_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tiles of tokens in groups of two, three of rows, over four CTAs."""
    from anybit.kernels.hopper import tile_order

    monkeypatch.setattr(tile_order, "NEAR", 256)
    emulated = Emulated("int8@int8", BRAIN, Tile(128, stages=2))
    packed, x = packed_weight("int8@int8", 264, 128), emulated.tokens(520, 128)
    y = emulated.run(x, operands.layout(packed, "int8"), 264, 4)
    assert_close(y, product(operand_weight(packed, BRAIN), x), BRAIN)


def test_int8_sums_are_exact() -> None:
    """Integer sums are exact: the only roundings are the scale's product and the output's."""
    emulated = Emulated("liquid@int8", BRAIN, Tile(8, ctas=2))
    packed = packed_weight("liquid@int8", 128, 512)
    prepared = operands.layout(packed, "int8")
    x = emulated.tokens(8, 512)
    codes, scale, _ = x
    assert scale is not None
    total = codes.double() @ packed.values().double().T
    want = (total.float() * (prepared[1][:128] * scale[:, None])).to(BRAIN)
    assert torch.equal(emulated.run(x, prepared, 128, 1), want)


@pytest.mark.parametrize("tile", PAIRED, ids=str)
@pytest.mark.parametrize("two", [0, 5, 21])
def test_outputs_of_both_rows_are_added_up(tile: Tile, two: int) -> None:
    """Others are what they are without, and nothing is written behind the tokens."""
    torch.manual_seed(two)
    emulated = Emulated("int8@int8", BRAIN, tile)
    packed, x, bias = packed_weight("int8@int8", 136, 384), torch.randn(21, 384), torch.randn(136)
    x[:, 3] *= 40  # which takes most of int8's range
    layout, both = operands.layout(packed, "int8"), Pairs(torch.tensor([two]).int(), 21, 21 + two)
    codes, scale, sums = TORCH.quantize(x, "int8", both)
    grid = tiles.grid(emulated.tile, 21 + two, 136)
    y = emulated.run((codes, scale, sums), layout, 136, grid, bias.to(BRAIN), pairs=both.count)
    want = TORCH.join(product(operand_weight(packed, BRAIN), (codes, scale, sums)), both, bias)
    assert (y[:21] - want).abs().max() <= want.abs().max() * 2**-8
    assert y[21:].isnan().all()
    grid = tiles.grid(emulated.tile, 21, 136)
    alone = emulated.run(TORCH.quantize(x, "int8"), layout, 136, grid, bias.to(BRAIN))
    assert torch.equal(y[two:21], alone[two:])


@pytest.mark.parametrize("scheme", READ)
def test_one_hot_tokens_read_weights_back(scheme: str) -> None:
    emulated = Emulated(scheme, HALF, Tile(32, ctas=2))
    packed = packed_weight(scheme, 128, 128)
    prepared = operands.layout(packed, emulated.operand)
    x = torch.eye(128, dtype=getattr(torch, emulated.operand))[::4]
    ones = (torch.ones(32), torch.ones(32, dtype=torch.int32))
    y = emulated.run((x, *(ones if emulated.activation else (None, None))), prepared, 128, 1)
    assert torch.equal(y, packed.dequantize()[:, ::4].T.to(HALF))


@pytest.mark.parametrize(("scheme", "tokens"), EXPERTS)
def test_experts(scheme: str, tokens: int) -> None:
    """Tokens sorted by expert: some experts have none, some have more than a tile."""
    n, k, most = 136, 256, tokens + 3
    starts = torch.tensor([0, 3, 3, 3 + most, 4 + most], dtype=torch.int32)
    emulated = Emulated(scheme, BRAIN, Tile(tokens, ctas=2 if tokens < 64 else 1), grouped=True)
    experts = [packed_weight(scheme, n, k) for _ in range(4)]
    prepared = list(operands.prepare_experts(experts, emulated.activation, BRAIN).layout)
    x = emulated.tokens(4 + most, k)
    codes, scale, _ = x
    want = torch.cat([
        product(operand_weight(e, BRAIN), (codes[a:b], None if scale is None else scale[a:b], None))
        for e, a, b in zip(experts, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ])  # fmt: skip
    grid = tiles.grid(emulated.tile, 4 + most, n, experts=4)
    y = emulated.run(x, prepared, n, grid, starts=starts)
    assert_close(y, want, BRAIN)
    assert torch.equal(emulated.run(x, prepared, n, 3, starts=starts, seed=1), y)


def test_more_experts_than_a_table_has_spans() -> None:
    n, k = 24, 128
    emulated = Emulated("liquid@int8", BRAIN, Tile(8, ctas=2), grouped=True)
    some = [packed_weight("liquid@int8", n, k) for _ in range(3)]
    given = operands.prepare_experts(some, "int8", BRAIN)
    layout = many_experts.layout_of_all(given.layout)
    x = emulated.tokens(many_experts.TOKENS, k)
    codes, scale, _ = x
    assert scale is not None
    want = many_experts.products(codes, scale, some, BRAIN)
    for grid in (1, 5):
        y = emulated.run(x, layout, n, grid, starts=many_experts.STARTS)
        assert_close(y, want, BRAIN)
