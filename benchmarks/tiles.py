"""Time every kernel that a product may take on a GPU: what the costs of the choice are fitted to.

    python benchmarks/tiles.py --out h200_tiles.csv --workers 16
    python benchmarks/tiles.py --experts --out h200_tiles.csv --append

The first line takes weights and codebooks, the second experts. All tiles of a product take turns,
with cold weights and in CUDA graphs. `fit_costs.py` reads the rows. Needs a GPU of sm_90a with CuTe
DSL.
"""

import argparse
import csv
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.core.scheme import parse_scheme
from anybit.kernels.cute import operands
from anybit.kernels.cute.build import build
from anybit.kernels.cute.cells import Cells, cells_of, multiply_decoded
from anybit.kernels.cute.operands import NAMES, decoder_for
from anybit.kernels.hopper import build as hopper
from anybit.kernels.hopper import (
    choices,
    codebook_linear,
    codebook_tiles,
    expert_tiles,
    lookup,
    scalar_linear,
    tiles,
)
from anybit.kernels.hopper.backend import BACKEND
from anybit.kernels.hopper.chip import chip_of
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.mma import linear as mma_linear
from anybit.kernels.mma import tiles as mma
from anybit.measure import bench
from anybit.measure.timing import medians_in_turns, rotated
from anybit.quantizers.quantize import quantize_tensor

BOOKS = ["codebook:m=1,v=4,b=8,group=128", "codebook:m=2,v=8,b=8,group=128"]
SCHEMES = ["int4:group=128", "fp6", "liquid@int8", "int8@int8", "trellis", "trellis@int8",
           "fp6@fp8", "fp8@fp8", "int4:group=128@int8", *BOOKS]  # fmt: skip
SHAPES = ["4096x4096", "28672x4096", "4096x14336", "6144x4096", "1024x3072", "17920x1536",
          "37888x3584", "3584x18944", "8192x7168", "10240x8192", "2560x10240", "512x3584",
          "5120x17408"]  # fmt: skip
# Rows, columns, experts, and how many of them a token meets.
EXPERTS = [(1536, 2048, 128, 8), (14336, 4096, 8, 2), (5760, 2880, 32, 4), (2048, 1408, 64, 6),
           (4096, 7168, 256, 8), (2880, 2880, 32, 4), (2048, 768, 128, 8)]  # fmt: skip
EXPERT_SCHEMES = ["int4:group=64", "liquid@int8", "fp6", "fp6@fp8"]
MS = "1,8,16,24,32,48,64,96,128,192,256,512,1024,4096"
FIELDS = ["format", "M", "N", "K", "experts", "kernel", "tile", "us"]
HALF, DEVICE = torch.float16, torch.device("cuda", 0)
Timed = tuple[str, str, Callable[[Any], Tensor]]  # a kernel, its tile, and a call with a weight


def told(**fields: int) -> str:
    """A tile as a row has it: what is not as in most."""
    usual = {"rows": 128, "split": 1, "stream_k": 0}
    return " ".join(f"{k}={int(v)}" for k, v in fields.items() if usual.get(k) != v)


def told_tile(t: Tile) -> str:
    return told(tokens=t.tokens, rows=t.rows, ctas=t.ctas, split=t.split, stream_k=t.stream_k)


def told_few(t: mma.Tile) -> str:
    return told(tokens=t.tokens, slices=t.slices, warps=t.warps, ctas=t.ctas)


def scalar(x: Tensor, weight: Any, starts: Tensor | None) -> Iterator[Timed]:
    """Kernels of formats whose codes are numbers; with `starts`, for experts."""
    given = operands.tokens(x, weight)
    d, chip, (n, k) = decoder_for(weight.format, given[0].dtype), chip_of(DEVICE), weight.shape
    gpu, m, experts = tiles.gpu_for(chip), len(x), 0 if starts is None else len(starts) - 1
    for t in tiles.family(d) if starts is None else expert_tiles.family_grouped(d):
        if starts is None:
            near = min(m / 16, 96) <= t.tokens < 4 * max(m, 8)
            wanted = near and tiles.fits_once(t, d, m, n, k, chip)
        else:
            wanted = t.tokens < 16 * max(m / experts, 1)
        if wanted:
            call = partial(scalar_linear.multiply, *given, choice=choices.one(t, n), starts=starts)
            yield "wgmma", told_tile(t), lambda w, c=call: c(prepared=w, bias=None, dtype=HALF)
    some = mma.candidates(d, gpu, m, n) if starts is None else expert_tiles.family_few(d, chip)
    for few_tile in some if tiles.has_mma(d) else ():
        kernel = mma.kernel_of(d, gpu, few_tile, NAMES[HALF])
        grid = mma.grid(few_tile, gpu, m, n, k, experts)
        rest = None, HALF, kernel, grid, starts
        yield "mma", told_few(few_tile), lambda w, r=rest: mma_linear.multiply(*given, w, *r)
    if starts is None and tiles.may_copy(d) and m >= 64:
        copy = scalar_linear.copy_kernel(d)
        yield "decode", "", lambda w: mma_linear.decoded(given[0], copy, w)


def codebook(x: Tensor, weight: Any) -> Iterator[Timed]:
    cells, chip, (n, k) = cells_of(weight.format), chip_of(DEVICE), weight.shape
    d, m = lookup.lookup(weight.format, HALF), len(x)
    assert isinstance(cells, Cells)
    assert isinstance(d, lookup.LookupDecoder)
    for plan in codebook_tiles.plans(cells, m, k, NAMES[HALF], chip) if m <= 16 else ():
        text = f"name={plan.kernel.name} cluster={plan.cluster} splits={plan.splits}"
        yield "codebook", text, lambda w, p=plan: codebook_linear.multiply(x, w, None, p)
    for t in lookup.candidates(d) if m > lookup.FEW else ():
        if m / 16 <= t.tokens < max(4 * m, 64) and tiles.fits_once(t, d, m, n, k, chip):
            yield "lookup", told_tile(t), lambda w, t=t: codebook_linear.multiply(x, w, None, t)
    if m >= 256:
        yield "decoded", "", lambda w: multiply_decoded(x, w, None)


def rows_of(scheme: str, n: int, k: int, ms: list[int], experts: int, top: int) -> Iterator[Any]:
    """Rows of one weight, or of experts."""
    fmt, activation = parse_scheme(scheme)
    some = [quantize_tensor(torch.randn(n, k, device=DEVICE) * 0.02, fmt) for _ in range(4)]
    if experts:
        every = [some[i % 4] for i in range(experts)]
        weight = operands.prepare_experts(every, activation, HALF)
    else:
        weight = BACKEND.prepare(some[0], activation, HALF)
    copies = rotated(weight, some[0].nbytes() * max(1, experts))
    for tokens in ms:
        m, starts = tokens * max(1, top), None
        x = torch.randn(m, k, device=DEVICE, dtype=HALF)
        if experts:
            chosen = torch.rand(tokens, experts, device=DEVICE).topk(top).indices.flatten()
            counts = torch.bincount(chosen, minlength=experts)
            starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        timed = list(codebook(x, weight) if scheme in BOOKS else scalar(x, weight, starts))
        calls = [[partial(call, w) for w in copies] for _, _, call in timed]
        if scheme == "trellis" and tokens >= 256:
            wide = [torch.randn(k, n, device=DEVICE, dtype=HALF) for _ in range(3)]
            timed.append(("library", "", partial(torch.mm, x)))
            calls.append([partial(torch.mm, x, w) for w in wide])
        for (kernel, tile, _), us in zip(timed, medians_in_turns(calls, DEVICE), strict=True):
            if isinstance(us, Exception):
                print(scheme, m, n, k, kernel, tile, repr(us)[:200], flush=True)
            else:
                yield [scheme, m, n, k, experts, kernel, tile, f"{us:.4g}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--append", action="store_true", help="keep what the file has")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--schemes", nargs="+", help="formats")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NxK")
    parser.add_argument("--m", type=bench.parse_counts, default=bench.parse_counts(MS))
    parser.add_argument("--workers", type=int, default=1, help="processes that compile")
    args = parser.parse_args()
    torch.cuda.init()
    start = time.perf_counter()
    schemes = args.schemes or (EXPERT_SCHEMES if args.experts else SCHEMES)
    shapes = [(*bench.parse_shape(s), 0, 0) for s in args.shapes]
    kernels = [k for s in schemes for k in hopper.kernels_of(s) if "bfloat16" not in k.name]
    for error in build(kernels, jobs=args.workers):
        print(error[:300], flush=True)
    with args.out.open("a" if args.append else "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerows([] if args.append else [FIELDS])
        for n, k, experts, top in EXPERTS if args.experts else shapes:
            for scheme in schemes:
                out.writerows(rows_of(scheme, n, k, args.m, experts, top))
                file.flush()
                gc.collect()
                torch.cuda.empty_cache()
                print(scheme, n, k, experts, f"{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
