"""How near kernels come to what the GPU allows, and where they are slower than cuBLAS.

    python benchmarks/efficiency.py benchmarks/results/h200_shapes.csv --out docs/img

A product takes at least as long as reading its weight's bytes, which the CSV holds a measurement
of, and as its multiplications at the matrix unit's highest rate seen in long products. The larger
of both floors over the time is the efficiency: 1 is as fast as can be. Prints a table and the worst
cells, and draws a heat map for each format.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import geometric_mean

from anybit.measure.bench import Row, read_csv

PEAK = {"fp16": 790.0, "int8": 1580.0, "fp8": 1580.0}  # TFLOP/s of an H200 in long dense products
FEW = 16  # tokens; up to here, reading the weight is what takes time
SHARES = ((25e6, 0.80), (8e6, 0.60))  # of the read floor, for weights of this many bytes or more
LEVEL = 0.97  # of cuBLAS's speed; below it a cell counts as slower
GROWTH = 1.35  # in time from one number of tokens to the next, up to 64
PEER = "anybit-hopper"


@dataclass(frozen=True)
class Cell:
    """One product: a scheme, a weight and a number of tokens.

    nbytes: of the packed weight. reading: the read floor over the time. efficiency: the larger
    floor over the time. speed: the time of the faster of cuBLAS fp16 and bf16 over ours, if known.
    quantizes: whether the time holds that of quantizing tokens, which the floors do not.
    """

    scheme: str
    shape: tuple[int, int]
    m: int
    us: float
    nbytes: float
    reading: float
    efficiency: float
    speed: float | None
    quantizes: bool

    def __str__(self) -> str:
        n, k = self.shape
        return f"{self.scheme}, {n}x{k}, M={self.m}"


def cells(rows: Sequence[Row], peer: str = PEER) -> list[Cell]:
    """Measured cells of a peer; of several rows of one cell the fastest."""
    dense: dict[tuple[tuple[int, int], int], float] = {}
    for row in rows:
        if row.peer == "cublas" and row.format in ("fp16", "bf16") and row.us:
            at = (row.N, row.K), row.M
            dense[at] = min(row.us, dense.get(at, row.us))
    found: dict[tuple[str, tuple[int, int], int], Cell] = {}
    for row in rows:
        if row.peer != peer or not (row.us and row.vs_floor and row.tflops and row.weight_gbps):
            continue
        operand = row.activation.removesuffix("-given")
        reading = 1 / row.vs_floor
        cell = Cell(
            scheme_of(row),
            (row.N, row.K),
            row.M,
            row.us,
            row.weight_gbps * row.us * 1e3,
            reading,
            max(reading, row.tflops / PEAK.get(operand, PEAK["fp16"])),
            dense[at] / row.us if (at := ((row.N, row.K), row.M)) in dense else None,
            row.activation in ("int8", "fp8"),
        )
        key = cell.scheme, cell.shape, cell.m
        if key not in found or cell.us < found[key].us:
            found[key] = cell
    return list(found.values())


def scheme_of(row: Row) -> str:
    """The name of a table's line. Groups of 64 stand in for 128 where K is no multiple of that."""
    fmt = row.format.replace("group=64", "group=128") if row.K % 128 else row.format
    operand, _, given = row.activation.partition("-")
    if operand not in ("int8", "fp8"):
        return fmt
    return f"{fmt}@{operand}" + ("" if given else ", tokens quantized too")


def slower(found: Sequence[Cell]) -> list[Cell]:
    """Slower than the faster of cuBLAS fp16 and bf16, the worst first."""
    return sorted((c for c in found if c.speed and c.speed < LEVEL), key=lambda c: c.speed or 0)


def short(found: Sequence[Cell]) -> list[Cell]:
    """Few tokens that are further from the read floor than `SHARES` say, the worst first."""

    def wanted(cell: Cell) -> float:
        return next((share for size, share in SHARES if cell.nbytes >= size), 0.0)

    few = [c for c in found if c.m <= FEW and not c.quantizes and c.reading < wanted(c)]
    return sorted(few, key=lambda c: c.reading / wanted(c))


def steps(found: Sequence[Cell]) -> list[tuple[float, Cell]]:
    """(ratio, cell): took that many times the time of fewer tokens, more than it should."""
    rows: dict[tuple[str, tuple[int, int]], list[Cell]] = defaultdict(list)
    for cell in found:
        rows[cell.scheme, cell.shape].append(cell)
    out = []
    for row in rows.values():
        for low, high in pairwise(sorted(row, key=lambda c: c.m)):
            ratio, tokens = high.us / low.us, high.m / low.m
            if ratio > (min(tokens, GROWTH) if high.m <= 64 else tokens):
                out.append((ratio, high))
    return sorted(out, key=lambda step: -step[0])


def table(found: Sequence[Cell], tokens: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    """Titles and a line for each scheme: speed over cuBLAS by tokens, and counts of bad cells."""
    lines = []
    for scheme in sorted({cell.scheme for cell in found}):
        mine = [cell for cell in found if cell.scheme == scheme]
        speeds = [[c.speed for c in mine if c.m == m and c.speed] for m in tokens]
        means = [f"{geometric_mean(s):.2f}x" if s else "" for s in speeds]
        compared = [c for c in mine if c.speed]
        counts = [f"{len(slower(mine))} of {len(compared)}", str(len(short(mine)))]
        lines.append([f"`{scheme}`", *means, *counts, str(len(steps(mine)))])
    titles = ["format", *(f"M={m}" for m in tokens), "slower", "far from reading", "steps"]
    return titles, lines


def worst(found: Sequence[Cell], count: int = 3) -> list[str]:
    """Sentences on the worst cells: against cuBLAS, reading, fewer tokens, and both floors."""
    out = []
    for cell in slower(found)[:count]:
        out.append(f"{cell}: {cell.speed:.2f} times the speed of cuBLAS")
    for cell in short(found)[:count]:
        out.append(f"{cell}: {cell.reading:.0%} of the read floor, {cell.nbytes / 1e6:.0f} MB")
    for ratio, cell in steps(found)[:count]:
        out.append(f"{cell}: {ratio:.2f} times the time of the next fewer tokens")
    products = [cell for cell in found if not cell.quantizes]
    for cell in sorted(products, key=lambda c: c.efficiency)[:count]:
        out.append(f"{cell}: {cell.efficiency:.0%} of the larger floor, {cell.us:.1f} us")
    return out


def draw(found: Sequence[Cell], title: str, path: Path) -> None:
    """A heat map for each scheme, but for those that quantize tokens: floors are of the product."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    found = [cell for cell in found if not cell.quantizes]
    names = sorted({cell.scheme for cell in found})
    shapes = sorted({cell.shape for cell in found}, key=prod)
    counts = sorted({cell.m for cell in found})
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    size = (0.9 + 0.3 * len(counts)) * columns + 0.6, (1.1 + 0.2 * len(shapes)) * lines + 0.4
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    for axis in grid.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(grid.flat, names, strict=False):
        values = np.full((len(shapes), len(counts)), np.nan)
        for cell in found:
            if cell.scheme == name:
                at = shapes.index(cell.shape), counts.index(cell.m)
                values[at] = cell.efficiency
                text = f"{100 * cell.efficiency:.0f}"
                axis.text(at[1], at[0], text, ha="center", va="center", fontsize=6)
        axis.imshow(values, cmap="RdYlGn", vmin=0.3, vmax=1, aspect="auto")
        axis.set_title(name, fontsize=9)
        axis.set_xticks(range(len(counts)), [str(m) for m in counts], fontsize=6, rotation=60)
        axis.set_yticks(range(len(shapes)), [f"{n}x{k}" for n, k in shapes], fontsize=6)
    figure.suptitle(f"Floor over time, %, by weight and tokens: {title}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def report(rows: Sequence[Row], peer: str = PEER) -> str:
    """The table and the worst cells as text."""
    found = cells(rows, peer)
    if not found:
        return f"no measured rows of {peer}"
    tokens = sorted({cell.m for cell in found})
    titles, lines = table(found, tokens)
    lines = [titles, *lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    text = ["  ".join(t.rjust(w) for t, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, *worst(found, 8)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--peer", default=PEER)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    rows = [row for path in args.csv for row in read_csv(path)]
    print(report(rows, args.peer))
    if found := cells(rows, args.peer):
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "efficiency.png"
        draw(found, f"{rows[0].gpu}, {max(row.date for row in rows)}", path)
        print(path)


if __name__ == "__main__":
    main()
