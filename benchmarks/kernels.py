"""Time candidate tiles of the Triton kernels on this GPU, for the tables in `kernels/tiles.py`.

    python benchmarks/kernels.py --out tiles.csv --schemes 'int4:group=128;fp6' --m 1,16

Prints the best tiles of every cell. Every result is compared with the decoded weight before it is
timed. Times are medians over replays of a CUDA graph; weights rotate over copies larger than the L2
cache. `gemm.py` beside this file compares what `tiles.choose` picks with other packages.
"""

import argparse
import csv
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from anybit.dispatch import parse_scheme
from anybit.format import Packed, tensor_shapes
from anybit.kernels.tiles import Tile
from anybit.kernels.triton import backend, layout, psumbook

SHAPES = {
    "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)
}  # fmt: skip
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
SCHEMES = (
    "int4:group=128", "int4", "int2:group=128", "int3:group=128", "int8", "fp6", "fp5", "fp8",
    "liquid@int8", "int4:group=128@int8", "int8@int8", "codebook:m=1,v=4,group=128",
    "codebook:m=2,v=8,group=128",
)  # fmt: skip
ROTATE = 160 << 20  # bytes of weight copies: well over the L2 cache
WORKERS = 16


def random_packed(scheme: str, shape: tuple[int, int]) -> Packed:
    """Random codes and plausible grids, made on the GPU."""
    fmt, _ = parse_scheme(scheme)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = {}
    for name, (size, entry) in tensor_shapes(fmt, shape).items():
        if entry is None:
            bits = (-(2**31), 2**31 - 1)
            t = torch.randint(*bits, size, generator=generator, device="cuda", dtype=torch.int32)
        elif entry.default_dtype == torch.uint8:
            t = torch.randint(1, 9, size, generator=generator, device="cuda").to(torch.uint8)
        else:
            t = torch.rand(size, generator=generator, device="cuda").add_(0.5).half()
            t = t * 0.01 if name == "scale" else t - 1
        tensors[name] = t
    return Packed.from_tensors(fmt, shape, tensors)


def copies_of(prepared: list[Tensor]) -> list[list[Tensor]]:
    size = sum(t.nbytes for t in prepared)
    count = min(64, max(2, -(-ROTATE // size)))
    return [prepared] + [[t.clone() for t in prepared] for _ in range(count - 1)]


def time_us(launches: list[Callable[[], object]], replays: int = 7) -> float:
    """Median microseconds of one launch, by replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for launch in launches:
            launch()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times[1:])


def candidates(m: int, n: int, lay: layout.Layout) -> Iterator[Tile]:
    """A short list for each number of tokens; splits that give the GPU a wave or a few."""
    narrow = lay.granule <= 128
    if m <= 8 and psumbook.supports(lay):
        for rows, parts in itertools.product((256, 512), (1, 2, 4, 8, 16)):
            if 50 <= -(-n // rows) * parts <= 300:
                yield Tile("psumbook", rows, 1, parts, 1, 8, 3)
    if m <= 16:
        plans = [(64, 2, 4, 1), (128, 4, 3, 1), (32, 1, 3, 1)]
        plans += [(128, 4, 3, 2), (64, 2, 3, 2), (64, 4, 2, 2)] if narrow else [(64, 4, 3, 1)]
        for (rows, warps, stages, steps), parts in itertools.product(plans, (1, 2, 4, 8)):
            if 160 <= -(-n // rows) * parts <= 1200:
                yield Tile("gemm", rows, 8 if m <= 8 else 16, parts, steps, warps, stages)
        return
    if m <= 64:
        plans = [(128, 64, 8, 3), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 4, 3)]
    else:
        plans = [(128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 4, 3), (128, 128, 8, 2)]
        plans += [(128, 256, 8, 3), (128, 256, 8, 2)]
        if lay.unit != 8:
            yield Tile("dense")
    for (rows, tokens, warps, stages), parts in itertools.product(plans, (1, 2, 4)):
        tiles = -(-n // rows) * -(-m // tokens)
        if parts == 1 or (120 <= tiles * parts <= 700):
            yield Tile("gemm", rows, tokens, parts, 1, warps, stages)


def run(tile: Tile, x: Tensor, prepared: list[Tensor], n: int, scheme: str) -> Tensor:
    fmt, notation = parse_scheme(scheme)
    lay = layout.layout_of(fmt, notation)
    return backend.multiply(x, prepared, None, lay, n, notation, tile)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, tuple[int, int]]]:
    for scheme in options.schemes or SCHEMES:
        for name in options.shapes or SHAPES:
            yield scheme, name, SHAPES[name]


def compile_all(options: argparse.Namespace) -> None:
    """Fill Triton's cache: one launch of every candidate, this process's share of them."""
    share, of = map(int, options.worker.split("/"))
    done: set[object] = set()
    for scheme, _, (n, k) in cells(options):
        fmt, notation = parse_scheme(scheme)
        prepared = None
        for m in options.m or TOKENS:
            for tile in candidates(m, n, layout.layout_of(fmt, notation)):
                key = (scheme, replace(tile, split=min(tile.split, 2)))
                if key in done:
                    continue
                done.add(key)
                if len(done) % of != share:
                    continue
                prepared = prepared or backend.prepare(random_packed(scheme, (n, k)), notation)
                x = torch.randn(m, k, device="cuda", dtype=torch.float16)
                try:
                    run(tile, x, prepared, n, scheme)
                except Exception as error:
                    print("compile", scheme, tile, str(error)[-100:], flush=True)


def write_rows(path: Path, rows: list[tuple[object, ...]], mode: str) -> None:
    with path.open(mode, newline="") as file:
        csv.writer(file).writerows(rows)


def sweep(options: argparse.Namespace) -> None:
    workers = [
        subprocess.Popen([sys.executable, *sys.argv, "--worker", f"{i}/{WORKERS}"])
        for i in range(WORKERS)
    ]
    for worker in workers:
        worker.wait()
    print("compiled", flush=True)
    names = ("scheme", "shape", "m", *Tile.__dataclass_fields__, "us")
    write_rows(options.out, [names], "w")
    for scheme, name, (n, k) in cells(options):
        fmt, notation = parse_scheme(scheme)
        lay = layout.layout_of(fmt, notation)
        packed = random_packed(scheme, (n, k))
        dense = packed.dequantize().half()
        copies = copies_of(layout.prepare(packed, notation))
        for m in options.m or TOKENS:
            x = torch.randn(m, k, device="cuda", dtype=torch.float16) / 8
            want = x.float() @ dense.float().T
            rows: list[tuple[float, Tile]] = []
            for tile in candidates(m, n, lay):
                try:
                    y = run(tile, x, copies[0], n, scheme)
                except triton.runtime.errors.OutOfResources:
                    continue
                error = ((y.float() - want).norm() / want.norm()).item()
                if not error < (3e-3 if notation is None else 2e-2):
                    print("WRONG", scheme, name, m, tile, error, flush=True)
                    continue
                use = copies if m <= 256 else copies[:2]
                us = time_us(
                    [lambda p=p, t=tile, x=x, n=n, s=scheme: run(t, x, p, n, s) for p in use],  # type: ignore[misc]
                    5 if m <= 256 else 3,
                )
                rows.append((us, tile))
            write_rows(
                options.out, [(scheme, name, m, *astuple(t), round(us, 2)) for us, t in rows], "a"
            )
            rows.sort(key=lambda row: row[0])
            best = " | ".join(f"{us:.1f} {' '.join(map(str, astuple(t)))}" for us, t in rows[:2])
            print(f"{scheme} {name} M={m} {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemes", type=lambda s: s.split(";"))
    parser.add_argument("--shapes", type=lambda s: s.split(","))
    parser.add_argument("--m", type=lambda s: [int(m) for m in s.split(",")])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compile_all(options)
    else:
        sweep(options)


if __name__ == "__main__":
    main()
