"""Trellis codes on an H200: right, and how fast beside cuBLAS; as launched, on random bits.

    python benchmarks/trellis.py check time --build   # only compiles what these launch; no GPU
    python benchmarks/trellis.py check time
    python benchmarks/trellis.py tiles --m 256,1024 --schemes trellis
    ncu --profile-from-start off --set full python benchmarks/trellis.py one \\
        --schemes trellis@int8 --shapes 28672x4096 --m 1024

`check` compares products of small layers with exact ones and reads weights back. `time` prints a
table of microseconds last: cold weights, CUDA graphs, launches that may overlap. From 65 tokens on
the weight's decoded copy with its product, and the main loop, are timed in any case. `tiles` times
other tiles, if they are compiled, the fastest first. `one` launches each product once with the
profiler on. Kernels lie in $ANYBIT_CACHE, so that they can be built elsewhere and carried.
"""

import argparse
import csv
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from hopper import one_hot
from hopper_layers import (
    RandomLayer,
    dense_us,
    exact_product,
    exact_weight,
    right,
    time_tile,
)
from mma import mma_us
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.kernels.cute.build import build
from anybit.kernels.cute.decode import K_TILE, Decoder, decoder
from anybit.kernels.cute.jit import KernelSpec, kernel_file
from anybit.kernels.cute.operands import operand_of
from anybit.kernels.hopper import chip, copies, scalar_linear, tiles
from anybit.kernels.hopper.tile import Kernel, Tile
from anybit.kernels.mma import linear
from anybit.kernels.mma import tiles as mma
from anybit.measure import bench

DTYPE = torch.bfloat16
SCHEMES = [
    f"trellis:bits={bits}{suffix}" for bits in (2, 3, 4) for suffix in ("", "@int8")
]  # fmt: skip
SHAPES = ["28672x4096", "4096x14336", "6144x4096", "4096x4096"]
MS = "1,4,16,64,256,1024"
CHECKED = (208, 512), (4096, 1152), (20992, 640)  # the last: more CTAs than are resident
COUNTS = 1, 4, 9, 16, 17, 33, 64, 100, 256, 1024
H200 = tiles.gpu_for(chip.H200)


def kernels(
    modes: list[str], schemes: list[str], shapes: list[tuple[int, int]], counts: list[int]
) -> list[KernelSpec]:
    """What the modes launch."""
    problems = [(m, n, k) for m in COUNTS for n, k in CHECKED if "check" in modes]
    if modes != ["check"]:
        problems += [(m, n, k) for m in counts for n, k in shapes]
    found: dict[KernelSpec | None, None] = {}
    for scheme in schemes:
        fmt, activation = parse_scheme(scheme)
        d = decoder(fmt, operand_of(activation, DTYPE))
        assert not isinstance(d, str)
        found |= dict.fromkeys(scalar_linear.copy_kernels(d, ["bfloat16"]))
        for m, n, k in problems:
            if scalar_linear.narrow(m, n, k, d):
                found[mma.kernel_for(d, H200, m, n, "bfloat16")] = None
            else:
                found[Kernel(d, tiles.choose(d, m, n, k), "bfloat16")] = None
        for m in counts if "tiles" in modes else ():
            found |= dict.fromkeys(few_kernels(d, m) if m <= 64 else ())
            some = (t for n, k in shapes for t in hopper_tiles(d, m, n, k))
            found |= dict.fromkeys(Kernel(d, t, "bfloat16") for t in some)
    return [kernel for kernel in found if kernel]


def compiled(every: list[KernelSpec], jobs: int) -> None:
    """Compile what is missing; says when each is done, so that a slow one is known by its name."""
    start = time.perf_counter()

    def step(_: int, name: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s {name}", flush=True)

    print(*build(every, None, jobs, step), f"{len(every)} kernels", sep="\n", flush=True)


def check(schemes: list[str]) -> int:
    """How many products are wrong."""
    bad = total = 0
    for scheme in schemes:
        for n, k in CHECKED:
            p = RandomLayer(scheme, DTYPE, n, k)
            weight = exact_weight(p)
            for m in COUNTS:
                x = p.tokens(m)
                want = exact_product(p, weight, *x)
                ok = right(p, p.run(*x), want)
                if m > 64:
                    with copied():
                        ok &= right(p, p.run(*x), want)
                bad, total = bad + (not ok), total + 1
                if not ok:
                    print(f"WRONG {scheme} {(m, n, k)}", flush=True)
            ok = one_hot(p, weight)
            bad, total = bad + (not ok), total + 1
            if not ok:
                print(f"WRONG one-hot {scheme} {(n, k)}", flush=True)
    print(f"check: {bad} of {total} wrong", flush=True)
    return bad


def few_kernels(d: Decoder, m: int) -> list[mma.Kernel]:
    """Kernels of `kernels/mma` for up to 64 tokens, whatever the rule says."""
    tokens = next(t for t in (8, 16, 32, 64) if m <= t)
    alone = ((1, 8, 2), (1, 8, 3), (2, 8, 2), (2, 4, 3), (2, 4, 4))
    wanted = [mma.Tile(tokens, s, w, ctas=c, kind="narrow") for s, w, c in alone if m <= 16]
    wanted += [mma.Tile(tokens, s, w, ctas=c) for s, w, c in ((1, 8, 3), (1, 8, 2), (2, 4, 3))]
    fit = [mma.fitted(tile, d, H200, 2, 4) for tile in wanted]
    found = [mma.kernel_of(d, H200, tile, "bfloat16") for tile in fit if tile]
    return [kernel for kernel in dict.fromkeys(found) if kernel]


def hopper_tiles(d: Decoder, m: int, n: int, k: int) -> list[Tile]:
    """Tiles of the Hopper kernels for more than 8 tokens."""
    if m <= 8:
        return []
    size = next((t for t in (16, 32, 64) if m <= t), 128)
    if m <= 64:
        every = [Tile(size, ctas=2, split=s) for s in (1, 2, 4, 6, 8)]
        every += [Tile(size, ctas=c, shared=True) for c in (1, 2)]
    else:
        every = [Tile(t, split=s) for t in (128, 256) for s in (2, 3, 4)]
        every += [Tile(t, shared=s, late=True) for t in (128, 256) for s in (False, True)]
    fit = [tiles.fitted(tile, d) for tile in every]
    return [tile for tile in fit if tiles.fits_once(tile, d, m, n, k) or may_split(tile, m, n, k)]


def may_split(tile: Tile, m: int, n: int, k: int) -> bool:
    """Whether clusters might be resident at once, although the rule does not count on it."""
    ctas = -(-n // tile.rows) * -(-m // tile.tokens) * tile.split
    return tile.split > 1 and ctas <= chip.H200.multiprocessors and k // K_TILE >= 4 * tile.split


def tile_times(schemes: list[str], shapes: list[tuple[int, int]], counts: list[int]) -> None:
    for n, k in shapes:
        for scheme in schemes:
            p = RandomLayer(scheme, DTYPE, n, k, cold=True)
            for m in counts:
                x = p.tokens(m)
                want, found = p.run(*x), {"as launched": time_tile(p, m, None, True)}
                for kernel in few_kernels(p.decoder, m) if m <= 64 else ():
                    if kernel_file(kernel).exists():
                        near(linear.multiply(*x, p.prepared, None, DTYPE, kernel), want, kernel)
                        found[kernel.tile.name] = mma_us(p, x, kernel)
                for tile in hopper_tiles(p.decoder, m, n, k):
                    if kernel_file(Kernel(p.decoder, tile, "bfloat16")).exists():
                        near(p.run(*x, tile=tile), want, tile)
                        found[f"hopper {tile.name}"] = time_tile(p, m, tile, True)
                best = sorted(found, key=lambda name: found[name])
                texts = [f"{name} {found[name]:.1f}" for name in best]
                print(f"{n}x{k} {scheme} M={m}:", *texts, sep="  ", flush=True)


def near(y: Tensor, want: Tensor, what: object) -> None:
    """Says so where a tile's sums are not those of the rule's, which `check` compares."""
    if (y - want).abs().max() > want.abs().max() / 64:
        print("WRONG", what, tuple(y.shape), flush=True)


def times(schemes: list[str], shapes: list[tuple[int, int]], counts: list[int]) -> list[dict]:
    """Rows of N, K, format, how it is multiplied, and microseconds by M; also printed.

    Many tokens come last: after them the clocks are lower for a while, by a seventh.
    """
    rows: dict[tuple, dict] = {}

    def add(n: int, k: int, scheme: str, how: str, m: int, us: float) -> None:
        row = {"N": n, "K": k, "format": scheme, "how": how, "us": {}}
        rows.setdefault((n, k, scheme, how), row)["us"][m] = us

    every = [(n, k, s, RandomLayer(s, DTYPE, n, k, cold=True)) for n, k in shapes for s in schemes]
    for m in counts:
        for n, k in shapes:
            add(n, k, "bf16", "cuBLAS", m, dense_us(n, k, m, DTYPE))
            for scheme, p in ((s, p) for a, b, s, p in every if (a, b) == (n, k)):
                add(n, k, scheme, "as launched", m, time_tile(p, m, None, True))
                if m > 64 and tiles.may_copy(p.decoder):
                    loop = tiles.choose(p.decoder, m, n, k)
                    add(n, k, scheme, "main loop", m, time_tile(p, m, loop, True))
                    add(n, k, scheme, "copy", m, copied_us(p, m))
    head = "us, M =".ljust(52) + "".join(f"{m:8}" for m in counts)
    print(head, *(line(row, counts) for row in rows.values()), sep="\n")
    return list(rows.values())


def write(path: Path, rows: list[dict]) -> None:
    """One line for each time."""
    fields = ("gpu", "date", "N", "K", "format", "how", "M", "us")
    same = {"gpu": torch.cuda.get_device_name(), "date": datetime.now(UTC).date()}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            for m, us in row["us"].items():
                writer.writerow({**same, **row, "M": m, "us": f"{us:.2f}"})


def copied_us(p: RandomLayer, m: int) -> float:
    """The weight decoded once, whatever the rule says."""
    with copied():
        return time_tile(p, m, None, True)


@contextmanager
def copied() -> Iterator[None]:
    """Decode weights once for more than 16 tokens, whatever the rule says."""
    rule, copies.copies = copies.copies, lambda *args: True
    scalar_linear.chosen.cache_clear()
    try:
        yield
    finally:
        copies.copies = rule
        scalar_linear.chosen.cache_clear()


def line(row: dict, counts: list[int]) -> str:
    texts = (f"{row['us'][m]:8.1f}" if m in row["us"] else " " * 8 for m in counts)
    where = f"{row['N']}x{row['K']}"
    return f"{where:12}{row['format']:26} {row['how']:13}" + "".join(texts)


def one(schemes: list[str], shapes: list[tuple[int, int]], counts: list[int]) -> None:
    """A launch of each product between the marks of a profiler."""
    for scheme in schemes:
        for n, k in shapes:
            p = RandomLayer(scheme, DTYPE, n, k)
            for m in counts:
                x = p.tokens(m)
                p.run(*x)
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
                p.run(*x)
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=["check", "time", "tiles", "one"])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts(MS))
    parser.add_argument("--build", action="store_true", help="compile what is launched, and stop")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile; 0: one a core")
    parser.add_argument("--out", type=Path, help="the .csv file that `time` writes")
    args = parser.parse_args()
    shapes = [bench.parse_shape(text) for text in args.shapes]
    if args.build:
        compiled(kernels(args.modes, args.schemes, shapes, args.m), args.jobs)
    for mode in args.modes if not args.build else ():
        start = time.perf_counter()
        if mode == "check":
            check(args.schemes)
        elif mode == "time":
            rows = times(args.schemes, shapes, args.m)
            if args.out:
                write(args.out, rows)
        elif mode == "tiles":
            tile_times(args.schemes, shapes, args.m)
        else:
            one(args.schemes, shapes, args.m)
        print(f"{mode}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
