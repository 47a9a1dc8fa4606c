"""One token that its product quantizes to int8: the bits are those of two launches."""

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from anybit.core.format import get_format
from anybit.core.scheme import parse_scheme
from anybit.kernels import tuned
from anybit.kernels.backend import Activations, LayerSpec, Prepared
from anybit.kernels.cute import jit
from anybit.kernels.cute.operands import decoder_for
from anybit.kernels.hopper import scalar_linear
from anybit.kernels.hopper.backend import BACKEND
from anybit.kernels.hopper.chip import H200
from anybit.kernels.mma import tiles
from anybit.kernels.mma.single_tiles import COLUMNS, quantizing
from anybit.kernels.mma.tiles import Tile
from anybit.kernels.reference import quantize_tokens
from anybit.nn.linear import QuantLinear
from anybit.quantizers.quantize import quantize_tensor
from tests.kernels.mma import GPUS, Emulated, kernel_of
from tests.needs import first_of

DEVICE = os.environ.get("ANYBIT_TEST_DEVICE", "cpu")
CUDA = torch.device("cuda", 0)
HALF, BRAIN = torch.float16, torch.bfloat16
Case = tuple[str, torch.dtype, int, int]
CASES: list[Case] = [  # scheme, dtype, slices of a tile, K
    ("int8@int8", BRAIN, 1, 328),
    ("trellis:code=look@int8", HALF, 3, 640),
    ("liquid@int8", HALF, 2, 640),
    ("int8:zero@int8", BRAIN, 1, 328),
    ("int3@int8", HALF, 2, 640),
    ("int6@int8", BRAIN, 1, 640),
    ("sparse@int8", HALF, 2, 640),
    ("trellis@int8", BRAIN, 1, 640),
]


@pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)
@pytest.mark.parametrize("case", first_of(CASES, lambda case: ["look" in case[0]]))
def test_a_token_is_quantized_as_by_a_launch_before(case: Case) -> None:
    """Small numbers, of which the scale has no inverse in fp32, and zeros too."""
    scheme, dtype, slices, k = case
    torch.manual_seed(k)
    tile = Tile(1, slices, 4, 2, kind="single", columns=1024)
    emulated = Emulated(scheme, dtype, kernel_of(scheme, dtype, tile, "sm_90", True))
    n = 16 * slices + 16
    packed, bias = emulated.weight(n, k), torch.randn(n).to(dtype)
    layout = emulated.layout(packed)
    weight = packed.values().double()
    for size in (1, 1e-36 if dtype == BRAIN else 1e-7, 0):
        x = (torch.randn(1, k) * size).to(dtype)
        codes, scale = quantize_tokens(x, "int8")
        factor = (layout[1][:n] * scale).double()  # the only roundings: this one, and of y
        want = ((codes.double() @ weight.T) * factor + bias.double()).float().to(dtype)
        assert torch.equal(emulated.run((x, None, None), layout, n, bias), want)


@pytest.fixture
def launched(an_h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "dsl_version", lambda: "any")
    monkeypatch.setattr(scalar_linear.mma, "loaded", lambda kernel, device: kernel)
    scalar_linear.quantizing.cache_clear()
    tuned.forget()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    ("scheme", "m", "k", "single"),
    [
        ("liquid@int8", 1, 4096, True),
        ("trellis:code=look@int8", 1, 14336, True),
        ("liquid@int8", 2, 4096, False),
        ("liquid@int8", 1, 4100, False),  # its last piece is not whole
        ("liquid@int8", 1, 32896, False),  # more than registers hold
        ("int4:group=128@int8", 1, 4096, False),  # another family's
        ("int8@fp8", 1, 4096, False),
        ("int8", 1, 4096, False),
    ],
)
def test_the_choice_takes_it_for_one_token(scheme: str, m: int, k: int, single: bool) -> None:
    fmt, activation = parse_scheme(scheme)
    prepared, x = Prepared(fmt, (4096, k), activation, ()), torch.empty(m, k, dtype=BRAIN)
    found = BACKEND.quantizing(x.to("meta"), prepared)
    assert bool(found) == single
    given = Activations(x.char(), torch.ones(m), torch.ones(m).int(), BRAIN)
    assert BACKEND.quantizing(given, prepared) is None
    if found:  # and it is compiled before a model starts
        kernel: Any = found.kernel
        layer = LayerSpec(fmt, activation, (4096, k), CUDA, BRAIN)
        assert kernel in BACKEND.kernels_of(layer, experts=False)
        assert kernel not in BACKEND.kernels_of(layer, experts=True)
        assert found.grid == -(-4096 // kernel.tile.rows)


@pytest.mark.usefixtures("launched")
def test_a_kernel_that_cannot_be_had_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalar_linear, "missing_kernels", lambda kernels: "no DSL")
    fmt = get_format("liquid")
    assert scalar_linear.quantizing(fmt, 4096, 4096, BRAIN, CUDA) is None
    layer = LayerSpec(fmt, "int8", (4096, 4096), CUDA, BRAIN)
    assert not [*scalar_linear.quantizing_kernels(layer)]


@pytest.mark.parametrize("spec", ["liquid", "int8", "trellis:code=look"])
def test_tiles_fit(spec: str) -> None:
    d, gpu = decoder_for(get_format(spec), torch.int8), GPUS["H200"]
    for n in (1000, 4096, 28672):
        few = tiles.choose(d, gpu, 1, n)
        assert few is not None
        for k in COLUMNS:
            tile = quantizing(few, d, gpu, k)
            if tile:
                assert tile.ctas == few.ctas
                assert tile.columns == k
                assert tiles.shared_bytes(tile, d) * tile.ctas <= gpu.shared_of_sm
    assert H200.multiprocessors == gpu.multiprocessors


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("scheme", ["liquid@int8", "int8@int8", "trellis:code=look@int8"])
def test_this_gpu_gives_a_token_the_bits_that_it_has_in_a_batch(scheme: str) -> None:
    torch.manual_seed(0)
    fmt, activation = parse_scheme(scheme)
    packed = quantize_tensor(torch.randn(1536, 1280, device=DEVICE) * 0.02, fmt)
    layer = QuantLinear(packed, torch.randn(1536, device=DEVICE), activation, BRAIN).to(DEVICE)
    x = torch.randn(4, 1280, device=DEVICE).to(BRAIN)
    with torch.inference_mode():
        every = layer(x)
        assert all(torch.equal(layer(x[i : i + 1]), every[i : i + 1]) for i in range(4))
