"""Draw how near anybit's kernels come to what the GPU allows: a heat map for each format.

    python benchmarks/plot_efficiency.py benchmarks/results/h200_gemm.csv --out docs/img

A product takes at least as long as reading its weight's bytes, which the CSV holds a measurement
of, and as its multiplications at the matrix unit's highest rate seen in long products. A cell is
the larger of both floors over the time: 100 is as fast as can be. One PNG, and the worst cells as
text.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np

from anybit.measure.bench import Row, read_csv

PEAK = {"fp16": 790.0, "int8": 1580.0, "fp8": 1580.0}  # TFLOP/s of an H200 in long dense products
WORST = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--peer", default="anybit-hopper")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    rows = [row for path in args.csv for row in read_csv(path) if row.peer == args.peer]
    cells = efficiencies(rows)
    if not cells:
        raise SystemExit(f"no measured rows of {args.peer}; --peer names another")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "efficiency.png"
    draw(cells, f"{rows[0].gpu}, {rows[0].date}", path)
    print(path)
    flat = [(value, name, *cell) for name, found in cells.items() for cell, value in found.items()]
    for value, name, (n, k), m in sorted(flat)[:WORST]:
        print(f"{value:4.0%}  {name}  {n}x{k}  M={m}")


def efficiencies(rows: list[Row]) -> dict[str, dict[tuple[tuple[int, int], int], float]]:
    """For each scheme, by shape and tokens: the larger floor over the time, the best of its rows.

    Times with the quantization of tokens in them are left out: the floors are of the product.
    """
    out: dict[str, dict[tuple[tuple[int, int], int], float]] = defaultdict(dict)
    for row in rows:
        if row.vs_floor is None or row.tflops is None or row.activation in ("int8", "fp8"):
            continue
        operand = row.activation.removesuffix("-given")
        peak = PEAK[operand if operand in PEAK else "fp16"]
        value = max(1 / row.vs_floor, row.tflops / peak)
        name = row.format if operand not in ("int8", "fp8") else f"{row.format}@{operand}"
        cell = (row.N, row.K), row.M
        out[name][cell] = max(value, out[name].get(cell, 0.0))
    return out


def draw(
    cells: dict[str, dict[tuple[tuple[int, int], int], float]], title: str, path: Path
) -> None:
    columns = min(3, len(cells))
    lines = -(-len(cells) // columns)
    shapes = sorted({shape for found in cells.values() for shape, _ in found}, key=np.prod)
    counts = sorted({m for found in cells.values() for _, m in found})
    size = (1.5 + 0.45 * len(counts)) * columns, (1.1 + 0.3 * len(shapes)) * lines + 0.4
    figure, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, sharey=True)
    for axis in grid.flat[len(cells) :]:
        axis.set_visible(False)
    for axis, (name, found) in zip(grid.flat, sorted(cells.items()), strict=False):
        values = np.full((len(shapes), len(counts)), np.nan)
        for (shape, m), value in found.items():
            values[shapes.index(shape), counts.index(m)] = value
        axis.imshow(values, cmap="RdYlGn", vmin=0.3, vmax=1, aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                axis.text(j, i, f"{value:.0%}"[:-1], ha="center", va="center", fontsize=7)
        axis.set_title(name, fontsize=9)
        axis.set_xticks(range(len(counts)), [str(m) for m in counts], fontsize=7, rotation=60)
        axis.set_yticks(range(len(shapes)), [f"{n}x{k}" for n, k in shapes], fontsize=7)
    figure.suptitle(f"Floor over time, %, by weight and tokens: {title}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
