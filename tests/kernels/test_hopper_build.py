"""The Hopper family: which kernels there are, that they compile, and who is refused."""

import ctypes
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from anybit.format import get_format
from anybit.kernels.hopper import backend, build, codebook_build, load, tiles
from anybit.kernels.hopper.cells import Cells, CodebookKernel
from anybit.kernels.hopper.decode import Decoder, decoder
from anybit.kernels.hopper.tiles import Kernel, Tile
from anybit.plan import instructions

needs_dsl = pytest.mark.skipif(
    find_spec("cutlass") is None, reason="CuTe DSL is not installed: pip install 'anybit[hopper]'"
)


def decoder_of(spec: str, operand: str) -> Decoder:
    d = decoder(get_format(spec), operand)
    assert isinstance(d, Decoder)
    return d


@pytest.mark.parametrize("scheme", build.SCHEMES)
def test_the_family_holds_every_choice(scheme: str) -> None:
    kernels = set(build.kernels_of(scheme))
    assert instructions(scheme) < 5.07
    for d in {kernel.decoder for kernel in kernels}:
        output = "bfloat16" if d.operand in ("uint8", "float8_e4m3fn") else d.operand
        for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (256, 128), (6144, 512)):
            for m in (1, 7, 8, 9, 16, 33, 64, 65, 128, 200, 256, 1000, 1024, 5000):
                tile = tiles.choose(d, m, n, k)
                assert Kernel(d, tile, output) in kernels
                assert tile.split <= k // 128
                assert tile.stages >= 2
                assert tiles.grid(tile, m, n) % tile.split == 0
                assert tiles.shared_bytes(tile, d) <= tiles.MAX_SHARED
        for m in (1, 16, 32, 64, 100, 128, 256, 512, 4096):
            tile = tiles.choose_grouped(d, m, 8)
            assert Kernel(d, tile, output, grouped=True) in kernels
            assert tiles.shared_bytes(tile, d, grouped=True) <= tiles.MAX_SHARED


@pytest.mark.parametrize(("spec", "operand"), [("liquid", "int8"), ("int4:group=128", "bfloat16")])
def test_tiles_of_experts_hold_more_than_the_average(spec: str, operand: str) -> None:
    """Routed by chance, few experts may need a second tile, which reads their weights again."""
    d = decoder_of(spec, operand)
    random = torch.Generator().manual_seed(0)
    for m in (8, 24, 64, 128, 256, 400):
        tile = tiles.choose_grouped(d, m, 8)
        assert tile in tiles.family_grouped(d)
        counts = torch.randint(8, (1000, m), generator=random)
        counts = torch.nn.functional.one_hot(counts, 8).sum(1)
        assert (counts > tile.tokens).float().mean() < 0.08


def test_grid_covers_every_tile() -> None:
    tile = Tile(64, ctas=2, split=4)
    assert tiles.grid(tile, 64, 6144) == 48 * 4
    assert tiles.grid(Tile(256), 1024, 28672) == 128  # 896 tiles: seven full waves
    assert tiles.grid(Tile(16, ctas=2), 1, 28672) == 224


def test_launches_overlap_where_that_was_faster() -> None:
    liquid, int8, sparse = (decoder_of(spec, "int8") for spec in ("liquid", "int8", "sparse"))

    def overlaps(d: Decoder, m: int, n: int, k: int = 4096) -> bool:
        return tiles.overlaps(tiles.choose(d, m, n, k), d, m, n)

    assert all(overlaps(d, 1, 28672) and overlaps(d, 256, 28672) for d in (liquid, int8, sparse))
    assert overlaps(liquid, 1024, 4096)  # 128 tiles: all at once
    assert not overlaps(liquid, 1024, 28672)
    assert not tiles.overlaps(tiles.choose_grouped(liquid, 32, 8), liquid, 32, 14336, experts=8)
    # 96 CTAs of 64 tokens: of sparse two share a multiprocessor, of the others none.
    assert not overlaps(sparse, 64, 4096, 14336)
    assert overlaps(liquid, 64, 4096, 14336)
    assert overlaps(int8, 64, 4096, 14336)
    assert overlaps(sparse, 64, 4096)  # 64 CTAs leave more than half of the multiprocessors


def test_parameters_are_those_of_the_kernel() -> None:
    sizes = [getattr(load.Arguments, name).size for name, _ in load.Arguments._fields_]
    assert sizes == build.PARAMETERS
    assert ctypes.sizeof(load.Config) == 56  # CUlaunchConfig and CUlaunchAttribute, by cuda.h
    assert ctypes.sizeof(load.Attribute) == 72
    assert load.Config.stream.offset == 32


def test_names_tell_kernels_apart(tmp_path: Path) -> None:
    d = decoder_of("fp6", "float16")
    kernels = [
        Kernel(d, tiles.fitted(Tile(16, ctas=2), d), "float16"),
        Kernel(d, tiles.fitted(Tile(16, ctas=2, split=2), d), "float16"),
        Kernel(d, tiles.fitted(Tile(16, ctas=2), d), "float16", pipeline="turns"),
        Kernel(decoder_of("fp5", "float16"), Tile(16, ctas=2, stages=6), "float16"),
        Kernel(decoder_of("fp6:group=128", "float16"), Tile(16, ctas=2, stages=6), "float16"),
    ]
    names = {build.kernel_file(kernel, tmp_path) for kernel in kernels}
    assert len(names) == len(kernels)
    assert all(name.parent == tmp_path / "hopper" for name in names)


def test_a_kernel_is_compiled_once_or_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    d = decoder_of("fp6", "float16")
    kernels = [
        Kernel(d, tiles.fitted(Tile(16), d), "float16"),
        CodebookKernel(Cells(1, 4, 1), 1, "float16"),
    ]
    made: list[object] = []
    for module in (build, codebook_build):

        def compile_kernel(kernel: Any, module: Any = module) -> None:
            made.append(kernel)
            path = module.kernel_file(kernel)
            path.parent.mkdir(exist_ok=True)
            path.touch()

        monkeypatch.setattr(module, "compile_kernel", compile_kernel)
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "have_dsl", lambda: False)
    with pytest.raises(RuntimeError, match="and CuTe DSL is not installed: pip install"):
        build.built(kernels[0])
    monkeypatch.setattr(build, "have_dsl", lambda: True)
    files = [build.built(kernel) for kernel in kernels * 2]
    assert made == kernels
    assert (
        files[:2]
        == files[2:]
        == [build.kernel_file(kernels[0]), codebook_build.kernel_file(kernels[1])]
    )


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANYBIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "anybit" / "hopper"
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path / "mine"))
    assert build.cache_folder() == tmp_path / "mine" / "hopper"
    assert build.cache_folder(tmp_path / "arg") == tmp_path / "arg" / "hopper"


@needs_dsl
def test_kernels_compile(tmp_path: Path) -> None:
    liquid = decoder_of("liquid", "int8")
    zero = decoder_of("int4:group=64,zero", "bfloat16")
    fp6 = decoder_of("fp6", "float16")
    good = [
        Kernel(liquid, tiles.fitted(Tile(16, ctas=2, split=4), liquid), "bfloat16"),
        Kernel(zero, tiles.fitted(Tile(64, ctas=2), zero), "bfloat16"),
        Kernel(fp6, tiles.fitted(Tile(8, ctas=2), fp6), "float16"),
        Kernel(zero, tiles.fitted(Tile(128, rows=256), zero), "bfloat16"),
        Kernel(fp6, tiles.fitted(Tile(8, ctas=2), fp6), "float16", grouped=True),
    ]
    assert build.build(good, tmp_path, jobs=2) == []
    for kernel in good:
        header, _, cubin = build.kernel_file(kernel, tmp_path).read_bytes().partition(b"\n")
        meta = json.loads(header)
        assert cubin.startswith(b"\x7fELF")
        assert meta["entry"].encode() in cubin
        assert meta["cluster"] == kernel.tile.split
        registers, stack = build.resources(cubin)
        assert stack == 0
        assert build.waits(cubin) == 2 * kernel.tile.rows // 128 + 1
        assert build.products(cubin) == kernel.tile.rows // 128 * kernel.decoder.slot // 2
        assert 32 < registers == meta["registers"]
        # Nine warps take registers like twelve: two CTAs fit into 65536.
        assert registers <= 65536 // (384 * kernel.tile.ctas) // 8 * 8 + 16
        assert meta["shared"] == tiles.shared_bytes(kernel.tile, kernel.decoder, kernel.grouped)
        assert tiles.places(kernel.tile, kernel.decoder) == kernel.tile.ctas
    before = {p: p.stat().st_mtime_ns for p in build.cache_folder(tmp_path).iterdir()}
    assert build.build(good, tmp_path) == []
    assert {p: p.stat().st_mtime_ns for p in build.cache_folder(tmp_path).iterdir()} == before


def test_spills_and_serialized_products_are_errors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    d = decoder_of("fp6", "float16")
    kernel = Kernel(d, tiles.fitted(Tile(16), d), "float16")
    monkeypatch.setattr(build, "generate", lambda kernel: (".entry k(\n)", b"", 1))
    monkeypatch.setattr(build, "products", lambda cubin: 8)
    monkeypatch.setattr(build, "resources", lambda cubin: (96, 24))
    with pytest.raises(build.BuildError, match="spills: 24 bytes of stack"):
        build.compile_kernel(kernel, tmp_path)
    monkeypatch.setattr(build, "resources", lambda cubin: (96, 0))
    monkeypatch.setattr(build, "waits", lambda cubin: 9)
    with pytest.raises(build.BuildError, match="waits for its products at 9 places"):
        build.compile_kernel(kernel, tmp_path)
    monkeypatch.setattr(build, "waits", lambda cubin: 3)
    with pytest.raises(build.BuildError, match=r"takes parameters of \[\] bytes"):
        build.compile_kernel(kernel, tmp_path)
    assert not list(tmp_path.rglob("*.kernel"))


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA GPU")

    def refuse(spec: str, activation: str | None, shape: tuple[int, int]) -> str:
        return backend.refuse(get_format(spec), activation, shape, device) or ""

    assert "K must be a multiple of 128" in refuse("fp6", None, (4096, 1000))
    assert "N of 8" in refuse("fp6", None, (4097, 1024))
    assert "liquid@int8" in refuse("liquid", None, (4096, 4096))
    assert "group scales" in refuse("int4:group=128", "int8", (4096, 4096))
    assert "no decoder for 'codebook'" in refuse("codebook", None, (4096, 4096))
    assert "group scales" in refuse("sparse:group=64", "int8", (4096, 4096))
    assert "zero points" in refuse("int4:group=128", "fp8", (4096, 4096))
    assert "it takes 2 to 5" in refuse("int8", "fp8", (4096, 4096))
    monkeypatch.setenv("ANYBIT_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "have_dsl", lambda: False)
    assert "anybit[hopper]" in refuse("fp6", None, (4096, 4096))
    monkeypatch.setattr(build, "have_dsl", lambda: True)
    assert refuse("fp6", None, (4096, 4096)) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0))
    assert "needs an H100 or H200" in refuse("fp6", None, (4096, 4096))


def test_a_layer_is_laid_out_for_its_operand() -> None:
    import anybit

    packed = anybit.quantize_tensor(torch.randn(136, 256), "fp6")
    blobs, scale, zero, *canonical = backend.prepare(packed, None)
    assert blobs.dtype == torch.bfloat16
    assert blobs.shape == (2, 2, 128 * 128 * 6 // 8 // 2)  # 136 rows, padded to 256
    assert scale.shape == zero.shape == (256,)
    assert all(a is b for a, b in zip(canonical, packed.tensors().values(), strict=True))
    torch.set_default_dtype(torch.float16)
    try:
        assert backend.prepare(packed, None)[0].dtype == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(TypeError, match="float16 and bfloat16"):
        backend.linear(torch.ones(1, 256), [blobs, scale, zero], None, packed.format, 136, None)


def test_what_is_launched_lies_as_the_copy_engine_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous, on whole 16 bytes, and of the dtype that weights are laid out for."""
    import anybit

    seen: list[tuple[torch.Tensor, ...]] = []

    def multiply(x: torch.Tensor, scale: Any, sums: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((x,) if scale is None else (x, scale, sums))
        return x.new_zeros(len(x), 136)

    monkeypatch.setattr(backend, "multiply", multiply)
    packed = anybit.quantize_tensor(torch.randn(136, 256), "fp6")
    prepared = backend.prepare_experts([packed], None, torch.float16)
    x = torch.randn(256, 6).half().T
    shifted = torch.empty(6 * 256 + 1).half()[1:].view(6, 256).copy_(x)
    args = (None, packed.format, 136, None)
    for given in (x, shifted):
        backend.linear(given, prepared, *args)
        backend.linear_experts(given, prepared, torch.tensor([0, 6]), *args[1:])
    codes, each, total = x.to(torch.int8), torch.rand(12)[::2], torch.arange(12)[::2].int()
    backend.linear(codes, prepared, *args, each, total, torch.float16)
    wanted = [(x,)] * 4 + [(codes, each, total)]
    for tensors, want in zip(seen, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
        assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
    with pytest.raises(TypeError, match=r"laid out for torch.float16: give `prepare_experts`"):
        backend.linear_experts(x.bfloat16(), prepared, torch.tensor([0, 6]), *args[1:])
