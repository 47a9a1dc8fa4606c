"""Draw the measurements of a CSV: for each shape, time against the number of tokens.

    python benchmarks/plot.py benchmarks/results/h200_gemm.csv --out docs/img

Writes one PNG for each shape, both axes logarithmic. Every panel holds one number of bits, so that
kernels that read the same bytes stand together; the dotted line is the time to read these bytes.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from anybit.bench import Row, read_csv

NAMES = {
    (6144, 4096): "qkv",
    (4096, 4096): "o",
    (28672, 4096): "gate and up",
    (4096, 14336): "down",
}
COLORS = {
    "cublas": "0.55",
    "humming": "tab:orange",
    "quack": "tab:purple",
    "gemlite": "tab:olive",
    "tinygemm": "tab:brown",
    "bitsandbytes": "tab:pink",
    "anybit": "tab:blue",
    "anybit-triton": "tab:cyan",
    "anybit-hopper": "tab:green",
}
DASHES = ["-", "--", "-.", (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1))]
PANELS = {
    "1 to 3 bits": ("int1", "int2", "int3", "codebook"),
    "4 bits": ("int4", "nf4", "liquid", "fp4", "sparse"),
    "5 and 6 bits": ("int5", "int6", "fp5", "fp6"),
    "7 and 8 bits": ("int7", "int8", "fp8"),
}
QUANTIZED = "8-bit activations"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args()
    shapes: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for path in args.csv:
        for row in read_csv(path):
            if row.us is not None:
                shapes[row.N, row.K].append(row)
    args.out.mkdir(parents=True, exist_ok=True)
    for (n, k), rows in shapes.items():
        path = args.out / f"gemm_{n}x{k}.png"
        draw(n, k, rows, path)
        print(path)


def panel_of(row: Row) -> str | None:
    """The panel that a row belongs to; None for the dense layers, which are in all of them."""
    if row.format in ("fp16", "bf16", "fp32"):
        return None
    if row.activation.startswith(("int8", "fp8")):
        return QUANTIZED
    name = row.format.split(":")[0].split()[0]
    return next((panel for panel, names in PANELS.items() if name in names), "other formats")


def draw(n: int, k: int, rows: list[Row], path: Path) -> None:
    """One PNG with a panel for each kind of format."""
    panels: dict[str, dict[tuple[str, str, str], list[Row]]] = defaultdict(
        lambda: defaultdict(list)
    )
    dense: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        panel, key = panel_of(row), (row.peer, row.format, row.activation)
        (dense if panel is None else panels[panel])[key].append(row)
    order = [name for name in (*PANELS, QUANTIZED, "other formats") if name in panels]
    order = order or ["dense layers"]
    columns = min(len(order), 3)
    lines = -(-len(order) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(5.2 * columns, 4.6 * lines), sharey=True, squeeze=False
    )
    for axis in grid.flat[len(order) :]:
        axis.set_visible(False)
    for axis, name in zip(grid.flat, order, strict=False):
        for key, points in dense.items():
            if key[1] == "fp16" or len(dense) == 1:
                line(axis, key, points, DASHES[0])
        used = defaultdict(int, cublas=1)  # the dense layer has the first
        for key, points in panels[name].items():
            line(axis, key, points, DASHES[used[key[0]] % len(DASHES)])
            used[key[0]] += 1
            floors(axis, points)
        axis.set(title=name, xscale="log", yscale="log", xlabel="tokens M")
        ticks = sorted({row.M for row in rows})
        axis.set_xticks(ticks, [str(m) for m in ticks])
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=7, loc="upper left")
    for axis in grid[:, 0]:
        axis.set_ylabel("microseconds")
    about = rows[0]
    figure.suptitle(
        f"{NAMES.get((n, k), 'linear')} {n}x{k}, {about.gpu}, {about.date}; "
        "dotted: time to read the weight's bytes"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def line(axis: plt.Axes, key: tuple[str, str, str], points: list[Row], dash: object) -> None:
    points = sorted(points, key=lambda row: row.M)
    ours = key[0].startswith("anybit")
    axis.plot(
        [row.M for row in points],
        [row.us for row in points],
        linestyle=dash,
        color=COLORS.get(key[0], "black"),
        linewidth=2 if ours else 1.2,
        marker="o",
        markersize=3,
        label=" ".join((key[0], key[1].replace(":group=", " g"), key[2])),
    )


def floors(axis: plt.Axes, points: list[Row]) -> None:
    """The read floor of a curve's bytes, drawn as far as the curve goes."""
    floor = next(row.us / row.vs_floor for row in points if row.us and row.vs_floor)
    ms = [row.M for row in points]
    axis.plot([min(ms), max(ms)], [floor, floor], ":", color="0.7", linewidth=0.8, zorder=0)


if __name__ == "__main__":
    main()
