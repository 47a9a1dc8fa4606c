"""The Hopper family: which kernels there are, that they compile, and who is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybit.core.format import get_format
from anybit.core.scheme import parse_scheme
from anybit.errors import Unsupported
from anybit.formats.presets import HOPPER
from anybit.kernels.backend import Activations, LayerSpec
from anybit.kernels.cute import jit, products
from anybit.kernels.cute.decode import Decoder, decoder
from anybit.kernels.cute.operands import decoder_for, operand_of
from anybit.kernels.hopper import chip, choices, scalar_linear, tiles
from anybit.kernels.hopper.backend import BACKEND as backend
from anybit.kernels.hopper.chip import H200, Chip
from anybit.kernels.hopper.choices import Choice, Part
from anybit.kernels.hopper.expert_tiles import choose_experts, family_few, family_grouped
from anybit.kernels.hopper.scalar_linear import Way
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.mma.build import narrow_kernels
from anybit.kernels.mma.tiles import kernel_for, kernel_of, tiles_of
from tests.kernels.mma import GPUS, built
from tests.needs import pairs


def decoder_of(spec: str, operand: str) -> Decoder:
    d = decoder(get_format(spec), operand)
    assert isinstance(d, Decoder)
    return d


pytestmark = pytest.mark.usefixtures("an_h200")
HALF, CUDA = torch.float16, torch.device("cuda", 0)
# As `cuDeviceGetAttribute` has it: multiprocessors, clock and memory's clock in kHz, bits of its
# bus.
CHIPS = {
    "H200": (132, 1_980_000, 3_201_000, 6144),
    "H100 PCIe": (114, 1_755_000, 1_593_000, 5120),
    "H20": (78, 1_980_000, 2_619_000, 6144),
    "an eighth of an H200": (16, 1_980_000, 3_201_000, 768),
    "a virtual one": (66, 0, 0, 0),
}


def chip_named(name: str, monkeypatch: pytest.MonkeyPatch) -> Chip:
    """What `chip_of` makes of such a device."""
    which = chip.MULTIPROCESSORS, chip.CLOCK, chip.MEMORY_CLOCK, chip.BUS
    said = dict(zip(which, CHIPS[name], strict=True))

    def call(function: str, value: Any, attribute: int, device: int) -> None:
        assert (function, device) == ("cuDeviceGetAttribute", 1)
        value._obj.value = said[attribute]

    monkeypatch.setattr(chip, "call", call)
    return chip.chip_of.__wrapped__(torch.device("cuda", 1))


SCALAR = [scheme for scheme in HOPPER if parse_scheme(scheme)[0].lookup is None]
SCALAR += ["trellis", "trellis:code=look", "trellis:code=look@int8", "trellis:bits=3,code=look"]
SCALAR += ["trellis:bits=4,code=pair8@int8", "int5:group=128@int8", "int8:group=32@int8"]


def test_instructions_by_format() -> None:
    int8, liquid = decoder_of("int8", "int8"), decoder_of("liquid", "int8")
    assert int8.instructions == 0  # the codes are the operand
    assert liquid.instructions / 32 < 7 / 8  # LiquidGEMM, section 5.3
    # Two planes for two weights in a register.
    fp6 = decoder_of("fp6", "float16").instructions / 32
    assert fp6 == pytest.approx((16 * 2 + 14 + 12) / 32, abs=0.2)
    row, groups = (decoder_of(spec, "float16") for spec in ("int4", "int4:group=128"))
    assert groups.instructions > row.instructions


@pytest.mark.parametrize("scheme", SCALAR)
def test_the_family_holds_every_choice(scheme: str) -> None:
    every = built(scheme)
    kernels = {kernel for kernel in every if isinstance(kernel, Kernel)}
    copied = {choices.BYTES} if "trellis" in scheme else set()  # whose products are few
    for d in {kernel.decoder for kernel in kernels} - copied:
        assert d.instructions / 32 < 5.07  # of a weight: what reading 4 bits hides on an H100
        output = d.operand if d.operand in ("float16", "bfloat16") else "bfloat16"
        for n, k in ((28672, 4096), (4096, 14336), (256, 128)):
            for m in (1, 8, 9, 16, 17, 33, 64, 96, 200, 1000, 5000):
                choice = choices.choose(d, m, n, k)
                if choice.few:
                    assert kernel_of(d, GPUS["H200"], choice.few, output) in every
                for tile, _, rows in choice.parts:
                    weight = choices.BYTES if choice.copy else d
                    assert Kernel(weight, tile, output) in kernels
                    assert tile.split <= k // 128
                    assert tile.stages >= 2
                    assert tiles.grid(tile, m, rows) % tile.split == 0
        assert all(tiles.shared_bytes(t, d) <= tiles.MAX_SHARED for t in tiles.family(d))
        for m in (1, 16, 32, 64, 100, 128, 256, 512, 4096):
            found = choose_experts(d, m, 4096, 1024, 8)
            if isinstance(found, Tile):
                assert Kernel(d, found, output, grouped=True) in kernels
                assert tiles.shared_bytes(found, d, grouped=True) <= tiles.MAX_SHARED
            else:
                assert kernel_of(d, GPUS["H200"], found, output) in every


WEIGHTS = [("liquid", "int8"), ("fp6", "float16"), ("trellis", "bfloat16")]


@pytest.mark.parametrize(("name", "weight"), pairs([*CHIPS], WEIGHTS))
def test_any_chip_has_the_same_kernels_and_all_of_its_multiprocessors(
    name: str, weight: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled for another number of them; grids follow the number."""
    found = chip_named(name, monkeypatch)
    assert found.multiprocessors == CHIPS[name][0]
    assert 0.3 < found.read / H200.read * 132 / found.multiprocessors < 1.5
    if name == "H200":
        assert round(found.read) == H200.read
    (spec, operand), output = weight, "float16" if weight[1] == "float16" else "bfloat16"
    d = decoder_of(spec, operand)
    gpu = replace(GPUS["H200"], multiprocessors=found.multiprocessors)
    narrow = narrow_kernels(d, gpu, [output])
    assert set(narrow) <= set(narrow_kernels(d, GPUS["H200"], [output]))
    for n, k in ((4096, 4096), (5120, 17408), (256, 512)):
        for m in (1, 16, 64, 256, 1024):
            choice = choices.choose(d, m, n, k, found)
            for tile, _, rows in choice.parts:
                assert tile in tiles.family(d)
                grid = tiles.grid(tile, m, rows, chip=found)
                room = found.multiprocessors * tile.ctas
                assert grid == room if tile.stream_k else tile.split > 1 or grid <= room
            if m <= 16:
                assert kernel_for(d, gpu, m, n, output) in narrow
            for experts in (8, 128):
                chosen = choose_experts(d, m, n, k, experts, found)
                assert chosen in (*family_grouped(d), *family_few(d, found))


def test_launches_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def chip_of(device: torch.device) -> Chip:
        asked.append(device)
        return Chip(78, H200.read)

    monkeypatch.setattr(scalar_linear, "chip_of", chip_of)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a slice")
    loaded: list[int] = []
    for module in (scalar_linear, scalar_linear.mma):
        monkeypatch.setattr(module, "loaded", lambda kernel, device: loaded.append(device))
    device = torch.device("cuda", 1)
    problem = HALF, 4096, 28672, 4096, HALF, device, None
    chosen = scalar_linear.chosen.__wrapped__
    for experts in (0, 8):
        assert chosen(get_format("fp6"), None, *problem, experts).launches[0].grid == 78
    assert loaded == [1, 1]
    d, tile = decoder_of("trellis", "int8"), choices.copied_tiles()[0]
    for copy in (False, True):  # where the kernel before writes the copy
        choice = Choice(copy=copy, parts=(Part(tile, 0, 6144),))
        found = scalar_linear.launches_of(d, choice, 1000, 4096, "float16", device)
        assert found[0].overlap != copy
    few = choices.choose(decoder_of("fp6", "float16"), 1, 4096, 4096, chip_of(device)).few
    way = chosen(get_format("fp6"), None, HALF, 1, 4096, 4096, HALF, device, None, 0)
    assert few
    assert way.launches[0].grid == tiles_of(few, 1, 4096)
    assert set(asked) == {device}


@pytest.mark.parametrize("scheme", ["int4:group=128", "int8@int8", "trellis", "int4:group=64@fp8"])
def test_another_number_of_tokens_makes_no_tiles(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts have all kinds of lengths, and the host waits for the choice."""
    fmt, activation = parse_scheme(scheme)
    d = decoder_for(fmt, getattr(torch, operand_of(activation, HALF)))
    seen = choices.choose(d, 300, 6144, 4096)
    monkeypatch.setattr(tiles, "replace", lambda *args, **options: pytest.fail("another tile"))
    assert choices.choose(d, 301, 6144, 4096) == seen


def test_weights_are_copied_for_many_tokens() -> None:
    """If they decode slowly; the kernel for it is among those that are built."""

    def copies(spec: str, operand: str, m: int, n: int = 28672, k: int = 4096) -> bool:
        return choices.choose(decoder_of(spec, operand), m, n, k).copy

    counts = (1, 64, 256, 4096)
    assert [copies("trellis:bits=3", "float16", m) for m in counts] == [*[False] * 3, True]
    assert not any(copies("fp6", "float16", m) for m in counts)
    assert not any(copies("trellis:bits=3", "float16", m, 256, 512) for m in counts)  # two launches
    assert choices.decoded_rows(4096) * 4096 * 2 == choices.DECODED
    assert choices.decoded_rows(1 << 24) == 128
    whole = choices.choose(decoder_of("trellis", "int8"), 4096, 28672, 4096)
    assert whole.copy
    assert Kernel(choices.BYTES, whole.parts[0].tile, "float16") in built("trellis@int8")
    trellis = get_format("trellis:bits=3")
    way = scalar_linear.chosen(trellis, None, HALF, 4096, 28672, 4096, HALF, CUDA, None, 0)
    assert way == Way(copy=way.copy)
    assert way.copy in built(trellis.spec)


BOTH = ["trellis:bits=1", "trellis:bits=1,code=look"]  # without and with a table


@pytest.mark.parametrize("spec", BOTH)
def test_a_copy_is_multiplied_by_the_library(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import anybit

    packed = anybit.quantize_tensor(torch.randn(144, 128), spec)
    prepared = backend.prepare(packed, None, HALF)
    seen: list[Any] = []

    def decoded(x: torch.Tensor, kernel: Any, given: Any) -> torch.Tensor:
        assert [*map(id, given.layout[3:])] == [*map(id, prepared.layout[3:])]
        seen.append((kernel.tile.kind, kernel.output, given.shape, len(given.layout[0])))
        return packed.dequantize()[len(seen) * 128 - 128 :][: given.shape[0]].half()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(scalar_linear.mma, "decoded", decoded)
    monkeypatch.setattr(choices, "choose", lambda *args: Choice(copy=True))
    monkeypatch.setattr(choices, "decoded_rows", lambda k: 128)
    x, bias = torch.randn(100, 128).half(), torch.randn(144)
    y = backend.linear(x, prepared, bias)
    assert torch.equal(y, torch.nn.functional.linear(x, packed.dequantize().half(), bias.half()))
    assert seen == [("decode", "float16", (128, 128), 1), ("decode", "float16", (16, 128), 1)]


@pytest.mark.parametrize("spec", BOTH)
def test_a_copy_in_bytes_is_multiplied_by_the_main_loop(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import anybit

    packed = anybit.quantize_tensor(torch.randn(16, 128), spec)
    prepared = backend.prepare(packed, "int8", HALF)
    copy, seen = torch.zeros(2, 1, 128 * 128, dtype=torch.uint8), []
    launcher = SimpleNamespace(launch=lambda values, *rest: seen.append(dict(values)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(scalar_linear.mma, "decoded", lambda *args: copy)
    own = Choice(copy=True, parts=(Part(choices.copied_tiles()[0], 0, 16),))
    monkeypatch.setattr(choices, "choose", lambda *args: own)
    monkeypatch.setattr(scalar_linear, "loaded", lambda kernel, device: launcher)
    codes = torch.ones(100, 128, dtype=torch.int8)
    scalar_linear.multiply(
        codes, torch.ones(100), codes.sum(1).int(), prepared, None, torch.float16
    )
    names = "w", "row_scale", "row_zero"
    layout = copy, *prepared.layout[1:3]
    assert [seen[0][name] for name in names] == [tensor.data_ptr() for tensor in layout]
    table = prepared.layout[3] if "look" in spec else None
    assert seen[0]["table"] is table


def test_stages_of_half_a_k_tile_are_for_kernels_that_give_them_back() -> None:
    fp6, liquid = decoder_of("fp6", "float16"), decoder_of("liquid", "int8")
    half = Tile(128, rows=256, stages=4, columns=64)
    assert Kernel(fp6, half, "float16").tile.slots == 2
    assert Kernel(liquid, replace(half, columns=128), "float16")
    with pytest.raises(Unsupported, match="stages of 64 columns are for operands of 16 bits"):
        Kernel(liquid, half, "float16")
    few = replace(half, rows=128)
    assert Kernel(fp6, few, "float16").tile.slots == 2
    with pytest.raises(Unsupported, match="clusters split no tiles of experts"):
        Kernel(fp6, Tile(8, split=2), "float16", grouped=True)
    with pytest.raises(Unsupported, match="with 3 of them the loop would hang"):
        Kernel(fp6, replace(few, stages=3), "float16")


def test_grid_covers_every_tile() -> None:
    few = Tile(8, ctas=2)
    assert tiles.grid(few, 8, 1536, experts=128) == 12 * 8  # each row an expert of its own
    assert tiles.grid(few, 20, 256, experts=4) == 2 * (4 + 2)  # of 9, 9, 1 and 1 rows
    assert tiles.grid(few, 8192, 1536, experts=128) == 264
    tile = Tile(64, ctas=2, split=4)
    assert tiles.grid(tile, 64, 6144) == 48 * 4
    assert tiles.grid(Tile(256), 1024, 28672) == 128  # 896 tiles: seven full waves
    assert tiles.grid(Tile(16, ctas=2), 1, 28672) == 224


def test_launches_overlap_where_that_was_faster() -> None:
    liquid, int8, sparse = (decoder_of(spec, "int8") for spec in ("liquid", "int8", "sparse"))

    def overlaps(d: Decoder, m: int, n: int, k: int = 4096) -> bool:
        return all(tiles.overlaps(t, d, m, rows) for t, _, rows in choices.choose(d, m, n, k).parts)

    assert all(overlaps(d, 1, 28672) and overlaps(d, 256, 28672) for d in (liquid, int8, sparse))
    assert overlaps(liquid, 1024, 4096)  # 128 tiles: all at once
    assert not overlaps(liquid, 1024, 28672)
    # 96 CTAs of 64 tokens, where two share a multiprocessor.
    pair = tiles.fitted(Tile(64, ctas=2, split=3), sparse)
    assert not tiles.overlaps(pair, sparse, 64, 4096)
    assert tiles.overlaps(tiles.fitted(Tile(64, ctas=2), sparse), sparse, 64, 4096)
    assert overlaps(liquid, 64, 4096, 14336)
    assert overlaps(int8, 64, 4096, 14336)
    assert overlaps(sparse, 64, 4096)  # 64 CTAs leave more than half of the multiprocessors


def test_few_tokens_may_go_to_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all their CTAs are resident at once."""
    whole, half = (decoder_for(get_format("int4"), x) for x in (torch.int8, torch.bfloat16))
    for d in (whole, half):
        assert [bool(choices.choose(d, m, 4096, 4096).few) for m in (1, 16, 100)] == [1, 1, 0]
    assert [bool(choices.choose(half, 1, n, 4096).few) for n in (6144, 28672)] == [True, True]
    for spec, operand in (("fp6", torch.float8_e4m3fn), ("int4:group=128", torch.int8)):
        assert not choices.choose(decoder_for(get_format(spec), operand), 1, 4096, 4096).few
    device, seen = torch.device("cuda", 0), list[torch.device]()

    def chip_of(device: torch.device) -> Chip:
        seen.append(device)
        return H200

    monkeypatch.setattr(scalar_linear, "chip_of", chip_of)
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    layer = LayerSpec(get_format("fp6"), None, (4096, 4096), device)
    assert set(scalar_linear.kernels_of(layer)) < built("fp6")
    assert seen == [device, device]  # fp16 and bf16
    assert scalar_linear.refuse_kernels(layer) is None
    assert seen == [device, device]  # nobody names kernels where they can be compiled


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA GPU")
    monkeypatch.setattr(scalar_linear.mma_tiles, "gpu_of", lambda device: GPUS["H200"])

    def refuse(spec: str, activation: str | None, shape: tuple[int, int]) -> str:
        return backend.refuse(LayerSpec(get_format(spec), activation, shape, device)) or ""

    assert "liquid@int8" in refuse("liquid", None, (4096, 4096))
    assert "zero points of groups" in refuse("int4:group=128,zero", "int8", (4096, 4096))
    assert "group scales" in refuse("sparse:group=64", "int8", (4096, 4096))
    assert "zero points" in refuse("int4:group=64,zero", "fp8", (4096, 4096))
    assert "it takes 2 to 5" in refuse("int8", "fp8", (4096, 4096))
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(jit, "dsl_version", lambda: None)
    assert "anybit[hopper]" in refuse("fp6", None, (4096, 4096))
    monkeypatch.setattr(jit, "dsl_version", lambda: "4.8.1")
    assert refuse("fp6", None, (4096, 4096)) == ""
    assert refuse("fp6", None, (4097, 1001)) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0))
    assert "needs an H100 or H200" in refuse("fp6", None, (4096, 4096))


def test_a_layer_is_laid_out_for_its_operand() -> None:
    import anybit

    packed = anybit.quantize_tensor(torch.randn(136, 256), "fp6")
    prepared = backend.prepare(packed, None)
    blobs, scale, zero = prepared.layout
    assert blobs.dtype == torch.bfloat16
    assert blobs.shape == (2, 2, 128 * 128 * 6 // 8 // 2)  # 136 rows, padded to 256
    assert scale.shape == zero.shape == (256,)
    assert prepared.dtype == torch.bfloat16
    assert backend.prepare(packed, "fp8").dtype is None  # fp8 codes come of any activations
    torch.set_default_dtype(torch.float16)
    try:
        assert backend.prepare(packed, None).dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(TypeError, match="float16 and bfloat16"):
        backend.linear(torch.ones(1, 256), prepared, None)


def test_what_is_launched_lies_as_the_copy_engine_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous, on whole 16 bytes, and of the dtype that weights are laid out for."""
    import anybit

    seen: list[tuple[torch.Tensor, ...]] = []

    def multiply(x: torch.Tensor, scale: Any, sums: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((x,) if scale is None else (x, scale, sums))
        return x.new_zeros(len(x), 136)

    monkeypatch.setattr(scalar_linear, "multiply", multiply)
    packed = anybit.quantize_tensor(torch.randn(136, 256), "fp6")
    prepared = backend.prepare_experts([packed], None, torch.float16)
    x = torch.randn(256, 6).half().T
    shifted = torch.empty(6 * 256 + 1).half()[1:].view(6, 256).copy_(x)
    for given in (x, shifted):
        backend.linear(given, prepared, None)
        backend.linear_experts(given, torch.tensor([0, 6]), prepared)
    codes, each, total = x.to(torch.int8), torch.rand(12)[::2], torch.arange(12)[::2].int()
    backend.linear(Activations(codes, each, total, torch.float16), prepared, None)
    wanted = [(x,)] * 4 + [(codes, each, total)]
    for tensors, want in zip(seen, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
        assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
    with pytest.raises(TypeError, match=r"laid out for torch.float16: give `prepare`"):
        backend.linear_experts(x.bfloat16(), torch.tensor([0, 6]), prepared)


@pytest.mark.parametrize("spec", ["int7:group=128", "int4:group=32", "int8:group=64"])
def test_sums_of_groups_have_tiles_of_one_block_and_no_copy(spec: str) -> None:
    """A copy in bytes would lose the scales of groups."""
    d = decoder_for(get_format(spec), torch.int8)
    assert not tiles.may_copy(d)
    most = 128 if spec == "int7:group=128" else 64
    for tile in [*tiles.family(d), *family_grouped(d)]:
        assert tile.rows == 128
        assert tile.tokens <= most


# Scheme, tokens, (N, K); rows and tokens of the tile that was fastest or nearly so on an H200.
SMALL = [  # scheme, tokens, (N, K), and whether such a kernel was the fastest
    ("int4:group=128", 32, (1024, 2048), True),
    ("int4:group=128", 64, (1024, 3072), True),
    ("liquid@int8", 32, (1024, 3072), True),
    ("trellis", 32, (4096, 4096), True),  # which decodes slowly
    ("int4:group=128", 48, (28672, 4096), False),
    ("int4:group=128", 65, (1024, 2048), False),
    ("mxfp4@fp8", 32, (1024, 2048), False),
]


@pytest.mark.parametrize(("scheme", "m", "shape", "few"), SMALL)
def test_17_to_64_tokens_may_have_kernels_of_their_own(
    scheme: str,
    m: int,
    shape: tuple[int, int],
    few: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import anybit

    fmt, activation = parse_scheme(scheme)
    dtype = getattr(torch, operand_of(activation, HALF))
    tile = choices.choose(decoder_for(fmt, dtype), m, *shape).few
    assert bool(tile) == few
    if tile is None:
        return
    kernel = kernel_of(decoder_for(fmt, dtype), GPUS["H200"], tile, "float16")
    assert kernel in built(scheme)  # compiled beforehand
    seen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(scalar_linear.mma, "loaded", lambda kernel, device: kernel)
    monkeypatch.setattr(products, "multiply", lambda *args: seen.append(args[7]))
    packed = anybit.quantize_tensor(torch.randn(256, 256), fmt)
    prepared = backend.prepare(packed, activation, HALF)._replace(shape=shape)
    scalar_linear.multiply(torch.zeros(m, 256).to(dtype), None, None, prepared, None, HALF)
    [(launch,)] = seen
    assert (launch.kernel, launch.grid) == (kernel, tiles_of(tile, m, shape[0]))
