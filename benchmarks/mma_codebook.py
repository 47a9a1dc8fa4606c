"""Correctness and speed of the codebook kernels for `mma.sync`, from PTX for sm_80, on an H200.

    python benchmarks/mma_codebook.py build      # compile all that the others launch; no GPU
    python benchmarks/mma_codebook.py check time --limit 60

The tiles are those of 99 KB and of 163 KB of shared memory, and some besides, on as many
multiprocessors as there are here. `time` compares them with Hopper's codebook kernels as launched
and with cuBLAS: cold weights, CUDA graphs. Kernels lie in $ANYBIT_CACHE.
"""

import argparse
import sys
from dataclasses import replace
from functools import partial
from itertools import product

import mma
import torch
from codebook import RandomCodebook
from hopper_layers import dense_us
from mma import A100, H200, KB, elapsed, file_of

from anybit.core.format import get_format
from anybit.kernels.cute import jit
from anybit.kernels.cute.cells import Cells, cells_of
from anybit.kernels.hopper import codebook_linear as on_hopper
from anybit.kernels.hopper import codebook_tiles as hopper_tiles
from anybit.kernels.mma import codebook_linear, codebook_tiles
from anybit.kernels.mma.codebook_tiles import CodebookKernel, CodebookTile
from anybit.kernels.mma.tiles import Gpu
from anybit.kernels.reference import operand_weight
from anybit.measure import bench
from anybit.measure.timing import median_us

SMALL = Gpu((8, 0), H200.multiprocessors, 99 * KB, 100 * KB)
LARGE = replace(A100, multiprocessors=H200.multiprocessors)
SCHEMES = ["codebook:m=1,v=4,group=128", "codebook:m=2,v=8,group=128"]
MORE = [
    "codebook:m=1,v=8,group=128",
    "codebook:m=1,v=4",
    "codebook:m=4,v=8,group=128",
    "codebook:m=3,v=16,group=32",
    "codebook:m=1,v=4,group=4",
]
SHAPES = [(28672, 4096), (8192, 28672), (4096, 14336), (4096, 4096), (11008, 4096)]
DTYPE = torch.bfloat16
LAUNCHES = 48  # in a graph: its own start is a few microseconds


def cells(scheme: str) -> Cells:
    found = cells_of(get_format(scheme))
    assert isinstance(found, Cells)
    return found


def tiles(scheme: str) -> list[CodebookTile]:
    """The rule's for 99 and 163 KB, and the first with 12 warps."""
    c = cells(scheme)
    found = [codebook_tiles.choose(c, gpu) for gpu in (SMALL, LARGE)]
    more = replace(codebook_tiles.shapes(c)[-1], warps=12)
    fit = [replace(more, stages=stages) for stages in (4, 3, 2)]
    found += [t for t in fit if codebook_tiles.shared_bytes(t, c) <= SMALL.shared][:1]
    return [tile for tile in dict.fromkeys(found) if tile]


def kernels(scheme: str) -> list[CodebookKernel]:
    c, few = cells(scheme), scheme in SCHEMES
    found = tiles(scheme) if few else tiles(scheme)[:1]
    made = [CodebookKernel(c, tile, "bfloat16", "sm_80") for tile in found]
    return made + [replace(k, architecture="sm_90", overlap=True) for k in made[:2]] * few


def there(scheme: str) -> list[CodebookKernel]:
    """Those that were built: a tile that spills is not."""
    return [k for k in kernels(scheme) if file_of(k).exists()]


def check(limit: float) -> int:
    """Random products with tails and a bias, by several grids; the same bits in 20 repeats."""
    bad = total = 0
    for scheme in [*SCHEMES, *MORE]:
        layers = [RandomCodebook(scheme, *shape) for shape in ((200, 2048), (1024, 4608))]
        for kernel in there(scheme):
            if elapsed() > limit:
                print(f"LIMIT of {limit} s: kernels from {kernel.name} on are unchecked")
                return bad + 1
            errors = [wrong(p, kernel) for p in layers]
            found = next((error for error in errors if error), "right")
            bad, total = bad + (found != "right"), total + 1
            print(f"{found:8} {kernel.name}", flush=True)
    print(f"check: {bad} wrong of {total} ({elapsed():.0f} s)", flush=True)
    return bad


def wrong(p: RandomCodebook, kernel: CodebookKernel) -> str | None:
    weight = operand_weight(p.packed, DTYPE).double()
    bias = torch.randn(p.n, device="cuda").to(DTYPE)
    tile, c = kernel.tile, kernel.cells
    least = -(-(p.k // c.columns) // (tile.warps * tile.blocks))
    for m in (1, tile.tokens, 2 * tile.tokens + 3):
        x = torch.randn(m, p.k, device="cuda").to(DTYPE)
        want = x.double() @ weight.T + bias.double()
        slices = -(-m // tile.tokens)
        for splits, teams in ((least, 1), (least, 7), (least + 1, 3)):
            launch = (slices * splits * teams, splits)
            every = [
                codebook_linear.multiply(x, p.prepared, bias, kernel, launch) for _ in range(20)
            ]
            error = float((every[0].double() - want).norm() / want.norm())
            if error > 6e-3:
                return f"an error of {error:.1e} at M={m}, {p.n}x{p.k}, {launch}"
            if not all(torch.equal(every[0], y) for y in every):
                return f"repeats differ at M={m}, {p.n}x{p.k}, {launch}"
    return None


def times(shapes: list[tuple[int, int]], counts: list[int], limit: float) -> None:
    """Microseconds: a line for every kernel, the rule's for 99 KB first."""
    for (n, k), scheme in product(shapes, SCHEMES):
        p = RandomCodebook(scheme, n, k, cold=True)
        floor = p.nbytes / 4.8e6  # H200's memory, bytes a us
        for m in counts:
            if elapsed() > limit:
                print(f"LIMIT of {limit} s: {n}x{k} {scheme} M={m} and the rest are untimed")
                return
            x = torch.randn(m, k, device="cuda").to(DTYPE)
            line = f"{n}x{k} {scheme} M={m}: bytes alone {floor:.1f}"
            line += f", cuBLAS {dense_us(n, k, m, DTYPE):.1f}"
            line += ", Hopper" + "".join(
                f" {p.us(m, overlap, dtype=DTYPE):.1f} {name}"
                for overlap, name in ((True, "pdl"), (False, "plain"))
            )
            print(line, flush=True)
            for kernel in there(scheme):
                launch = codebook_tiles.grid(kernel.tile, kernel.cells, H200, (m, n, k))
                run = partial(codebook_linear.multiply, x, bias=None, kernel=kernel)
                calls = [partial(run, prepared=w, launch=launch) for w in p.copies]
                us = median_us(calls * -(-LAUNCHES // len(calls)), torch.device("cuda"))
                print(f"  {us:6.2f} {kernel.tile.name} {kernel.architecture} {launch}", flush=True)
    print(f"time: {elapsed():.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=["build", "check", "time"])
    parser.add_argument("--m", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--shapes", type=bench.parse_shape, nargs="*", default=SHAPES)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; then it ends early")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    args = parser.parse_args()
    codebook_linear.built = lambda kernel: jit.built(kernel) if kernel.overlap else file_of(kernel)
    if "build" in args.modes:
        made = [k for s in [*SCHEMES, *MORE] for k in kernels(s)]
        found = [
            hopper_tiles.choose(cells(s), m, n, k, "bfloat16")
            for s in SCHEMES
            for m in args.m
            if m <= on_hopper.MOST_TOKENS
            for n, k in args.shapes
        ]
        mma.build([*made, *dict.fromkeys(plan.kernel for plan in found if plan)], args.jobs)
    bad = check(args.limit) if "check" in args.modes else 0
    if "time" in args.modes:
        times(args.shapes, args.m, args.limit)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
